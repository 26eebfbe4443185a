"""relax and score on files: order, broken records, kills, processes, messages."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.io import read, write
from rattled import NAMES, rattled
from rich.console import Console
from tiny import tiny_potential
from warm import warm_python

import torchmdnet2
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.core.pipeline import Journal, devices_pool, helpers_pool, in_order
from torchmdnet2.data import open_dataset
from torchmdnet2.errors import BadConfig, BadData, StructureWarning
from torchmdnet2.streams import Ranking, run
from torchmdnet2.streams.records import WRITERS, RecordFile, csv_head
from torchmdnet2.streams.run import _Source


def _xyz(path: Path) -> list[int]:
    """Good records with broken ones between them; returns the numbers of the good ones."""
    good, text, number = [], [], 0
    broken = [
        lambda a: a.info.update(charge=0.5),
        lambda a: a.numbers.__setitem__(0, 92),
        lambda a: a.info.update(charge=1),  # an open shell
        lambda a: a.positions.__setitem__(1, a.positions[0]),
        lambda a: a.positions.__setitem__(0, np.nan),
    ]
    for k in range(6 * len(broken)):
        atoms = rattled([NAMES[k % len(NAMES)]])[0]
        bad = k % 6 == 3
        if bad:
            broken[k // 6](atoms)
        else:
            good.append(number)
        write(path.with_suffix(".one.xyz"), atoms, format="extxyz")
        text.append(path.with_suffix(".one.xyz").read_text())
        number += 1
    for damaged in ("0\n\n", "x2\n\nH 0 0 0\nH 0 0 1\n", "3\n\nH 0 0 0\n", "1\n\nHe 0 0 0\nHe 0 0 3\n"):
        text.append(damaged)
        number += 1
        text.append(text[0])
        good.append(number)
        number += 1
    path.write_text("".join(text))
    return good


def test_broken_records_of_xyz_are_named_and_all_others_are_right(small, tmp_path):
    good = _xyz(tmp_path / "in.xyz")
    torchmdnet2.relax(small, tmp_path / "in.xyz", tmp_path / "out.xyz", fmax=0.1, block=7)
    found = read(tmp_path / "out.xyz", ":")
    assert [atoms.info["record"] for atoms in found] == good
    failed = (tmp_path / "out.failed.txt").read_text().splitlines()
    assert len({line.split(":")[0] for line in failed}) == len(failed) == 9
    for words in ("whole number", "is U (Z = 92)", "odd number of electrons", "overlap", "finite", "no atoms"):
        assert any(words in line for line in failed), words
    whole = {k: atoms for k, atoms in enumerate(rattled())}
    for atoms in found[:6]:
        start = whole[atoms.info["record"] % len(NAMES)]
        assert (atoms.numbers == start.numbers).all() and atoms.info["converged"]


def test_relax_and_score_refuse_the_same_for_the_same_reason(small):
    """Of several faults, the first in the order: what is stated, elements and charges, atoms that overlap."""

    def broken():
        found = [molecule("CH4") for _ in range(4)]
        found[0].info["charge"], found[1].positions[0] = 0.5, np.nan
        for atoms in (found[0], *found[2:]):
            atoms.positions[1] = atoms.positions[0]
        found[2].numbers[0] = 92
        return found

    relaxed, scored = ([o.errors for o in run(small, broken())] for run in (torchmdnet2.relax, torchmdnet2.score))
    assert relaxed == scored
    assert all(word in e[0] for word, e in zip(("whole number", "finite", "is U", "overlap"), scored, strict=True))


def molfile(atoms, title):
    lines = [title, "", "", f"{len(atoms):3d}  0  0  0  0  0            999 V2000"]
    lines += [f"{x:10.4f}{y:10.4f}{z:10.4f} {s:<3} 0  0" for s, (x, y, z) in zip(atoms.symbols, atoms.positions)]
    return "\n".join([*lines, "M  END", "> <source>", "test", "", "$$$$", ""])


def test_sdf_keeps_its_blocks_and_titles(small, tmp_path):
    good = molfile(molecule("CH3CH2OH"), "one")
    text = good + "$$$$\n" + good.replace("one", "two") + good.replace(" O ", " Xx")
    (tmp_path / "in.sdf").write_text(text)
    assert main(["relax", "organic-small", str(tmp_path / "in.sdf"), str(tmp_path / "out.sdf"), "--fmax", "0.1"]) == 0
    found = [record.molfile for record in RecordFile(str(tmp_path / "out.sdf"))]
    again = ["relax", "organic-small", str(tmp_path / "out.sdf"), str(tmp_path / "again.sdf"), "--fmax", "0.05"]
    assert main(again) == 0  # results of the first run are replaced
    records = list(RecordFile(str(tmp_path / "again.sdf")))
    items = [[block.partition(f"> <{name}>\n")[2].split("\n")[0] for name in ("energy", "record")]
             for block in (found[1], records[1].molfile)]  # fmt: skip
    assert float(items[1][0]) < float(items[0][0]) - 1e-5 and [record for _, record in items] == ["2", "1"]
    assert [record.name for record in records] == ["one", "two"]
    assert records[0].starts[0].info["source"] == "test" and records[0].molfile.count("> <energy>") == 1
    assert [line.split(":")[0] for line in (tmp_path / "out.failed.txt").read_text().splitlines()] == [
        "record 1", "record 3 (one)",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", [torchmdnet2.relax, torchmdnet2.score])
def test_data_of_an_sdf_do_not_damage_extended_xyz(small, tmp_path, verb):
    """Several lines of text, no text, or names with a meaning in extended XYZ, would make the file unreadable."""
    names = "Lattice Properties pbc forces charges stress virial dipole magmom free_energy".split()
    data = ["> <note>\none line\n9 lines\n\n", "> <note>\n\n", *(f"> <{name}>\n1.5\n\n" for name in names)]
    (tmp_path / "in.sdf").write_text("".join(f"{_WATER}{one}$$$$\n" for one in data))
    for suffix in (".xyz", ".h5"):
        verb(small, tmp_path / "in.sdf", tmp_path / f"out{suffix}")
    assert len(open_dataset(tmp_path / "out.h5")) == len(data)
    found = read(tmp_path / "out.xyz", ":")
    assert [atoms.info["record"] for atoms in found] == list(range(len(data)))
    assert found[0].info["note"] == "one line 9 lines"
    assert len({atoms.get_potential_energy() for atoms in found}) == 1
    for atoms in found:
        assert not atoms.pbc.any() and atoms.get_forces().shape == (3, 3)
        assert not {"stress", "dipole", "magmom", "free_energy"} & {*atoms.calc.results}


_WATER = """water
  test

  3  2  0  0  0  0  0  0  0  0999 V2000
    0.0000    0.0000    0.1193 O   0  0
    0.0000    0.7632   -0.4770 H   0  0
    0.0000   -0.7632   -0.4770 H   0  0
  1  2  1  0
  1  3  1  0
M  END
"""


@pytest.mark.parametrize("verb", ["relax", "score"])
def test_failures_are_shown_and_a_run_of_failures_alone_is_an_error(tmp_path, capsys, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    text = "1\n\nU 0 0 0\n"
    (tmp_path / "in.xyz").write_text(text)
    assert main([verb, "organic-small", "in.xyz", "out.xyz"]) == 1
    error = capsys.readouterr().err
    assert "none of 1 records could be computed, see out.failed.txt; record 0: " in error and "is U (Z = 92)" in error
    (tmp_path / "in.xyz").write_text(text + "3\n\nO 0 0 0.12\nH 0 0.76 -0.48\nH 0 -0.76 -0.48\n")
    assert main([verb, "organic-small", "in.xyz", "out2.xyz"]) == 0
    shown = "".join(capsys.readouterr())
    assert "1 with failures" in shown and "failures are in out2.failed.txt; the first: record 0: " in shown


@pytest.mark.parametrize("verb", [torchmdnet2.relax, torchmdnet2.score])
def test_atoms_nearer_than_a_bond_are_counted_over_the_stream(tmp_path, verb):
    """One warning at its end, from all blocks; structures that fail do not count, nor if models repel."""
    starts, options = rattled(["H2O"] * 9), {"steps": 1} if verb is torchmdnet2.relax else {}
    for k in (2, 5, 8):
        starts[k] = Atoms("H2", [[0, 0, 0], [0, 0, 0.49]])
    starts[8].info["charge"] = 0.5
    soft, hard = tmp_path / "soft.tmn", tmp_path / "hard.tmn"
    save(tiny_potential(), soft)
    save(tiny_potential(priors=[{"name": "zbl"}]), hard)
    write(tmp_path / "in.xyz", starts, format="extxyz")
    for given, output in ((starts, None), (tmp_path / "in.xyz", tmp_path / "out.xyz")):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            verb(soft, given, output, block=2, **options)
            verb(hard, given, output, block=2, **options)
        (words,) = [str(one.message) for one in told if "nearer" in str(one.message)]
        assert words.startswith(
            "2 structures have atoms nearer than any bond, first record 2: atom 0 (H) and atom 1 (H)"
        )
        assert "no repulsive prior" in words


@pytest.mark.parametrize("suffix", [".xyz", ".csv"])
def test_scores_are_those_of_the_potential(small, tmp_path, suffix):
    good = _xyz(tmp_path / "in.xyz")
    torchmdnet2.score(small, tmp_path / "in.xyz", tmp_path / f"out{suffix}", block=11)
    assert len((tmp_path / "out.failed.txt").read_text().splitlines()) == 9
    starts = [record.starts[0] for record in RecordFile(str(tmp_path / "in.xyz")) if record.number in good]
    if suffix == ".csv":
        head, *rows = (tmp_path / "out.csv").read_text().splitlines()
        rows = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
        assert [int(row["record"]) for row in rows] == good
        assert [float(row["charge"]) for row in rows] == [float(s.info.get("charge", 0)) for s in starts]
        energies = [float(row["energy"]) for row in rows]
    else:
        found = read(tmp_path / "out.xyz", ":")
        assert [atoms.info["record"] for atoms in found] == good and "charges" in found[0].calc.results
        energies = [atoms.get_potential_energy() for atoms in found]
    for start, energy in zip(starts, energies, strict=True):
        assert abs(energy - float(small(torchmdnet2.System.from_ase(start)).energy)) < 1e-5


def test_hdf5_is_a_data_set_and_a_page_shows_the_run(small, tmp_path, drawn):
    pytest.importorskip("h5py")
    pytest.importorskip("matplotlib")
    good = _xyz(tmp_path / "in.xyz")
    for verb, more in (("score", []), ("relax", ["--fmax", "0.2"])):
        out = tmp_path / f"{verb}.h5"
        assert main([verb, "organic-small", str(tmp_path / "in.xyz"), str(out), "--report", *more]) == 0
        names = {"scalar:record": "record", "energy": "energy", "forces": "forces"}
        found = open_dataset(str(out), keys=names, cache="off")
        assert [int(found[k].labels["scalar:record"]) for k in range(len(found))] == good
        for k in (0, 7):
            sample = found[k]
            result = small(sample.system)
            assert abs(float(sample.labels["energy"] - result.energy)) < 1e-5
            assert abs(sample.labels["forces"] - result.forces).max() < 1e-4
        page = (tmp_path / f"{verb}.html").read_text()
        assert f"<h1>{verb}.h5: in.xyz by organic-small</h1>" in page
        assert page.count("<img") > 6 and "overlap" in page and "<td class=text>9</td>" in page
        assert [words in page for words in ("converged", "bonds")] == [verb == "relax"] * 2
        lowest = page.partition("<h2>Lowest structures</h2>")[2].partition("<h2>Failures</h2>")[0]
        labels = [found[k].labels for k in range(len(found))]
        energies = {int(known["scalar:record"]): float(known["energy"]) for known in labels}
        rows = re.findall(r"<td>(\d+)</td><td>(-[\d.]+)</td>", lowest)
        assert len(rows) == 12 and all(abs(energies[int(record)] - float(energy)) < 6e-4 for record, energy in rows)
        assert {path.name for path in tmp_path.glob(f"{verb}*")} == {f"{verb}.h5", f"{verb}.html", f"{verb}.failed.txt"}


@pytest.mark.slow
def test_a_cluster_gives_the_same_and_loses_nothing_with_a_worker(tmp_path):
    distributed = pytest.importorskip("distributed")
    _xyz(tmp_path / "in.xyz")
    torchmdnet2.score("organic-small", tmp_path / "in.xyz", tmp_path / "one.csv", block=3)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())

        def kill():
            while not _records(tmp_path, "two.csv"):
                time.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        torchmdnet2.score("organic-small", tmp_path / "in.xyz", tmp_path / "two.csv", block=3, dask=client)
        thread.join()
        assert pids[0] not in client.run(os.getpid).values()
        address = cluster.scheduler_address
        arguments = ["score", "organic-small", str(tmp_path / "in.xyz"), str(tmp_path / "three.csv"), "--dask", address]
        assert main(arguments) == 0
    for name in ("two", "three"):
        for suffix in (".failed.txt", ".csv"):
            lines = [(tmp_path / f"{k}{suffix}").read_text().splitlines() for k in ("one", name)]
            assert [line.split(",")[0] for line in lines[0]] == [line.split(",")[0] for line in lines[1]]


def test_processes_give_the_same_in_the_same_order(tmp_path):
    starts = rattled() * 4
    found = [torchmdnet2.score("organic-small", starts, devices=names, block=3) for names in ("cpu", "cpu,cpu")]
    for one, two in zip(*found, strict=True):
        assert abs(one.structures[0].info["energy"] - two.structures[0].info["energy"]) < 1e-5
    _xyz(tmp_path / "in.xyz")
    source = _Source(tmp_path / "in.xyz", None, None)
    with helpers_pool(2, run.__name__) as helping:  # as of a large file on a GPU: processes parse it
        blocks = in_order(source.blocks(2, 4), helping(source.preparation, False))
        parsed = [record for block in blocks for record in block]
    for record, other in zip(parsed, list(RecordFile(str(tmp_path / "in.xyz")))[2:], strict=True):
        assert record.ready and (record.number, record.error) == (other.number, other.error)
        assert all(
            np.array_equal(a.positions, b.positions, equal_nan=True)
            for a, b in zip(record.starts, other.starts, strict=True)
        )


@pytest.mark.parametrize("verb", [torchmdnet2.score, torchmdnet2.relax])
def test_stages_in_other_processes_give_the_same(tmp_path, monkeypatch, verb):
    """As on a GPU: processes parse and write, and one thread computes."""
    save(tiny_potential(noise=0.02), tmp_path / "tiny.tmn")
    starts = [atoms.copy() for atoms in rattled() * 4]
    starts[5].numbers[0] = starts[13].numbers[0] = 92
    write(tmp_path / "in.xyz", starts, format="extxyz")
    through, options = run.through, {"steps": 10} if verb is torchmdnet2.relax else {}
    for name in ("alone", "helped"):
        files = [tmp_path / given for given in ("tiny.tmn", "in.xyz", f"{name}.xyz")]
        verb(*files, devices="cpu", block=5, **options)
        monkeypatch.setattr(
            run, "through", lambda blocks, stages, names, module, *_: through(blocks, stages, names, module, 2, True)
        )
    for suffix in (".xyz", ".failed.txt"):
        one, two = ((tmp_path / f"{name}{suffix}").read_text() for name in ("alone", "helped"))
        assert one == two and len(one.splitlines()) > 1


def test_scores_are_written_as_ase_writes_them(small, tmp_path):
    """From arrays, without structures of ASE between."""
    starts = rattled()
    starts[1].info |= {"charge": 0, "note": "a word, and 'more'", "wide": np.ones(3)}
    starts.append(bulk("C", "diamond", 3.57))
    torchmdnet2.score(small, starts, tmp_path / "out.xyz")
    torchmdnet2.score(small, starts, tmp_path / "out.csv")
    outcomes = torchmdnet2.score(small, starts)
    assert (tmp_path / "out.csv").read_text() == csv_head(Path("a.csv")) + "".join(map(WRITERS[".csv"], outcomes))
    (tmp_path / "ase.xyz").write_text("".join(map(WRITERS[".xyz"], outcomes)))
    pairs = [read(tmp_path / name, ":") for name in ("out.xyz", "ase.xyz")]
    assert len(pairs[0]) == len(pairs[1]) >= len(NAMES)
    for one, two in zip(*pairs, strict=True):
        assert one == two and one.info == two.info and one.calc.results.keys() == two.calc.results.keys()
        for name, value in two.calc.results.items():
            np.testing.assert_array_equal(one.calc.results[name], value)


@pytest.mark.parametrize(("name", "kills"), [("out.xyz", 5), ("out.h5", 2)])
def test_a_run_that_is_killed_has_every_record_once(tmp_path, name, kills):
    save(tiny_potential(noise=0.02), tmp_path / "tiny.tmn")
    starts = [atoms.copy() for atoms in rattled(["CH3CH2OH", "H2O", "CH4", "H2CO"]) * (2 * kills)]
    for k in range(7, len(starts), 10):
        starts[k].info["charge"] = 0.5
    write(tmp_path / "in.xyz", starts)
    rng, killed = np.random.default_rng(0), 0
    files = [tmp_path / text for text in ("tiny.tmn", "in.xyz", name)]
    for _ in range(kills):
        wanted, delay, child = _records(tmp_path, name) + int(rng.integers(0, 7)), rng.uniform(0, 0.03), os.fork()
        if not child:
            torchmdnet2.relax(*files, steps=4, block=2)
            os._exit(0)
        while _records(tmp_path, name) < wanted and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.002)
        time.sleep(delay)  # in the midst of reading, computing, writing
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert killed == kills and (tmp_path / f"{name}.progress").exists(), "it had ended before"
    growing = tmp_path / (name if name == "out.xyz" else "out.h5.xyz")
    with open(growing, "ab") as file:
        file.write(b"9\nof a block that was written in part")
    with pytest.raises(BadConfig, match="differs in steps: give the same command"):
        torchmdnet2.relax(*files, steps=5, block=2)
    torchmdnet2.relax(*files, steps=4, block=2)
    if name == "out.xyz":
        found = [atoms.info["record"] for atoms in read(files[2], ":")]
    else:
        names = {"scalar:record": "record"}
        data = open_dataset(str(files[2]), keys=names, cache="off")
        found = [int(data[k].labels["scalar:record"]) for k in range(len(data))]
    assert found == [k for k in range(len(starts)) if k % 10 != 7]
    failed = (tmp_path / "out.failed.txt").read_text().splitlines()
    assert [int(line.split()[1].rstrip(":")) for line in failed] == list(range(7, len(starts), 10))
    assert not list(tmp_path.glob("*.progress")) and growing.exists() == (growing == files[2])


def _records(folder: Path, name: str = "out.xyz") -> int:
    path = folder / f"{name}.progress"
    return json.loads(path.read_text())["records"] if path.exists() else 0


@pytest.mark.parametrize("name", ["in.xyz", "in.extxyz.gz", "in.traj", "in.smi"])
def test_inputs_are_closed(tmp_path, name):
    path = tmp_path / name
    path.write_text("O water\nC methane\n") if name.endswith("smi") else write(path, rattled())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert len(list(RecordFile(str(path)))) > 1
        next(RecordFile(str(path)).blocks(0, 1))  # and not read to the end
        gc.collect()
    assert not [str(one.message) for one in found if issubclass(one.category, ResourceWarning)]


def test_a_finished_output_is_kept(tmp_path):
    for text in ("old", "new"):
        journal = Journal(tmp_path / "out.csv", [tmp_path / "out.csv", tmp_path / "out.failed.txt"], {})
        journal.commit(1, text, "")
        journal.close(True)
    assert (tmp_path / "out.csv").read_text() == "new" and (tmp_path / "out.csv.old").read_text() == "old"


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_without_a_finished_record_hinders_no_other(small, tmp_path, monkeypatch, killed):
    """A wrong input, or the end of the process in the first block: the corrected call starts again."""
    output, earlier = tmp_path / "out.csv", tmp_path / "out.csv.old"
    (tmp_path / "in.eth").write_text("no structure")
    write(tmp_path / "in.xyz", rattled(["H2O"]))
    output.write_text("earlier")
    with monkeypatch.context() as patch, pytest.raises(BadData, match=r"in\.eth"):
        if killed:
            patch.setattr(Journal, "close", lambda *_: None)
        torchmdnet2.score(small, tmp_path / "in.eth", output, report=True)
    assert {path.name for path in tmp_path.glob("out.*")} - {earlier.name} == (
        {"out.csv", "out.csv.progress", "out.failed.txt", "out.rows.csv"} if killed else set()
    )
    torchmdnet2.score(small, tmp_path / "in.xyz", output)
    assert len(output.read_text().splitlines()) == 2 and earlier.read_text() == "earlier"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["in.xyz", "out.sdf"], "an SDF needs bonds"),
        (["in.xyz", "out.xyz", "--conformers", "3"], "molecules with bonds"),
        (["in.xyz", "out.xyz", "--fmax", "0"], "fmax must be a positive number of eV/Å, such as 0.02, got 0.0"),
        (["in.xyz", "out.xyz", "--devices", "gpu"], "cannot be used here"),
        (["in.xyz", "in.xyz"], "is read by this command"),
        (["none.xyz", "out.xyz"], "no such file"),
        (["folder", "out.xyz"], "folder is a folder: give a file"),
        (["in.xyz@0:3", "out.xyz"], "in.xyz@0:3: no such file; in.xyz is read as a whole, without @"),
        (["in.xyz", "out.pdb"], "must end in .sdf or .xyz"),
        (["in.xyz", "out.xyz", "--devices", ","], "devices: name at least one"),
        (["in.xyz", "out.xyz", "--dask", "tcp://127.0.0.1:1", "--devices", "cpu,cpu"], "each worker uses one device"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write("in.xyz", molecule("H2O"))
    Path("folder").mkdir()
    assert main(["relax", "organic-small", *arguments]) in (1, 2)
    assert re.search(words, capsys.readouterr().err)


def test_mistakes_of_calls_are_named(small):
    for options, words in (
        ({"report": True}, "report: the report is written beside the output, but no output is given"),
        ({"dask": "tcp://127.0.0.1:1"}, "dask: give the path or the name of the model, which every worker reads"),
        ({"output": "out.pdb"}, r"out\.pdb: results can be written to \.sdf, \.xyz"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"devices": 2}, "devices must be names, such as 'cuda:0,cuda:1' or 'cpu,cpu', got 2"),
        ({"dask": 3}, "dask: must be the address of a scheduler, such as 'tcp://HOST:8786', or a .*Client, got 3"),
        ({"fmax": "a"}, "fmax must be a positive number of eV/Å, such as 0.02, got 'a'"),
        ({"steps": "a"}, "steps must be at least 1, got 'a'; give a whole number"),
        ({"conformers": 2.5}, "conformers must be at least 1, got 2.5; give a whole number"),
        ({"block": 0}, "block must be at least 1, got 0; give a whole number"),
        ({"seed": "a"}, "seed must be at least 0, got 'a'; give a whole number"),
        ({"ranking": Ranking()}, "ranking has no effect: .* give conformers too"),
    ):
        with pytest.raises(BadConfig, match=words):
            torchmdnet2.relax(small, [molecule("H2O")], **options)
    with pytest.raises(BadConfig, match="block must be at least 1, got -1"):
        torchmdnet2.score(small, [molecule("H2O")], block=-1)
    for options in ({"window": "a"}, {"rmsd": None}, {"most": "a"}):
        with pytest.raises(BadConfig, match="must be 0 or more, and the number to keep at least 1; got"):
            Ranking(**options)


def test_records_that_cannot_be_used_are_told_in_words(small, tmp_path):
    (tmp_path / "in.sdf").write_text("\n\n\n  1  0  0  0  0  0  0  0  0  0999 V2000\n  garbage\nM  END\n$$$$\n")
    with pytest.raises(BadData, match="not a molfile that can be read: a line is too short"):
        torchmdnet2.relax(small, tmp_path / "in.sdf", tmp_path / "out.sdf")
    found = torchmdnet2.relax(small, [molecule("H2O"), Atoms()])
    assert [repr(outcome) for outcome in found] == [
        "<Outcome of record 0: 1 structure>",
        "<Outcome of record 1: 0 structures, 1 failed: it has no atoms: remove it>",
    ]
    assert found[1].errors == ["it has no atoms: remove it"] and found[0].structures


def test_an_input_without_structures_and_results_that_are_not_finite(small, tmp_path):
    (tmp_path / "in.sdf").write_text("\n")
    broken = copy.deepcopy(small)
    broken.energy_scale = float("nan")
    for verb in (torchmdnet2.relax, torchmdnet2.score):
        with pytest.raises(BadData, match=r"in\.sdf: the input has no structures"):
            verb(small, tmp_path / "in.sdf", tmp_path / "out.xyz")
        (outcome,) = verb(broken, [molecule("H2O")])
        assert not outcome.structures and "is not finite" in outcome.errors[0]


def test_an_empty_input_leaves_no_file_and_says_where_the_earlier_one_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.sdf").write_text("\n")
    Path("out.csv").write_text("earlier")
    assert main(["score", "organic-small", "in.sdf", "out.csv"]) == 1
    assert "note: the earlier out.csv was renamed to out.csv.old" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"in.sdf", "out.csv.old"}
    assert Path("out.csv.old").read_text() == "earlier"


@pytest.mark.parametrize("verb", ["score", "evaluate"])
def test_a_stderr_that_nobody_reads_does_not_end_a_run(tmp_path, verb):
    starts = rattled(["H2O"] * 3)
    for atoms in starts:
        atoms.info["energy"], atoms.arrays["forces"] = 0.0, np.zeros((3, 3))
    write(tmp_path / "in.xyz", starts, format="extxyz")
    save(tiny_potential(), tmp_path / "tiny.tmn")
    output = {"score": ["out.xyz"], "evaluate": ["--output", "out.xyz"]}[verb]
    (tmp_path / "out.xyz").write_text("earlier")  # of which a note tells
    python = sys.executable if verb == "score" else warm_python()  # the end of Python flushes it again
    command = [python, "-m", "torchmdnet2", verb, "tiny.tmn", "in.xyz", *output]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=writing)
    os.close(writing)
    assert ended.returncode == 0 and len(read(tmp_path / "out.xyz", ":")) == 3


def test_two_runs_of_a_process_keep_their_models(small):
    """Each in a thread: one computes while the other begins."""
    with (
        devices_pool(lambda _: "first {}".format, ["cpu"]) as one,
        devices_pool(lambda _: "second {}".format, ["cpu"]) as two,
    ):
        assert [one.submit(1).result(), two.submit(2).result()] == ["first 1", "second 2"]


@pytest.mark.parametrize("verb", [torchmdnet2.score, torchmdnet2.relax])
def test_what_is_no_structure_is_a_type_error(small, verb):
    with pytest.raises(TypeError, match=r"a file or ase\.Atoms, got str"):
        verb(small, ["H2O"])


def test_settings_without_effect_are_refused(tmp_path):
    """A seed without conformers, a sum in cells without cells; messages name the setting and its value."""
    atoms = rattled(["H2O"])
    write(tmp_path / "in.xyz", atoms, format="extxyz")
    for verb in (torchmdnet2.relax, torchmdnet2.score):
        for given in (atoms, atoms[0], tmp_path / "in.xyz", str(tmp_path / "in.xyz")):
            for seed in (0, 7):
                with pytest.raises(BadConfig, match=f"seed={seed} has no effect"):
                    verb("organic-small", given, seed=seed)
            with pytest.raises(ValueError, match=r"coulomb='dsf' has no effect: .* no structure is periodic"):
                verb("organic-small", given, coulomb="dsf")
        with pytest.raises(BadConfig, match="seed must be at least 0, got -1"):
            verb("organic-small", atoms, seed=-1)
    (tmp_path / "a.sdf").write_text("")
    with pytest.raises(ValueError, match="coulomb='dsf' has no effect"):
        torchmdnet2.score("organic-small", tmp_path / "a.sdf", coulomb="dsf")
    for setting, words in (
        ({"fmax": float("nan")}, "fmax must be a positive number of eV/Å, such as 0.02, got nan"),
        ({"fmax": float("inf")}, "fmax must be .* got inf"),
        ({"fmax": 0}, "fmax must be .* got 0"),
        ({"steps": -1}, "steps must be at least 1, got -1"),
        ({"conformers": 0}, "conformers must be at least 1, got 0"),
    ):
        with pytest.raises(BadConfig, match=words):
            torchmdnet2.relax("organic-small", atoms, **setting)


@pytest.mark.parametrize("name", ["in.xyz", "in.sdf"])
def test_a_file_that_was_read_is_read_to_its_end(tmp_path, name):
    write(tmp_path / "in.xyz", rattled(), format="extxyz")
    atom = f"{0:10.4f}{0:10.4f}{0:10.4f} O   0"
    (tmp_path / "in.sdf").write_text(f"a\n\n\n  1  0  0  0  0  0            999 V2000\n{atom}\nM  END\n$$$$\n")
    file = RecordFile(str(tmp_path / name))
    assert file.fraction == 0
    assert not any(record.error for record in file) and file.fraction == 1


def test_the_part_of_a_file_up_to_each_block(tmp_path, monkeypatch):
    """The time left follows from it. Of a file that is read in one piece it was 1 from the first block on."""
    write(tmp_path / "in.xyz", rattled(["H2O"] * 8), format="extxyz")
    parts = []
    monkeypatch.setattr(run.Summary, "words", lambda self, fraction, before: parts.append(fraction) or "")
    console = Console(file=io.StringIO())
    torchmdnet2.relax("organic-small", tmp_path / "in.xyz", tmp_path / "out.xyz", block=2, steps=1, console=console)
    assert parts[:3] == pytest.approx([0.25, 0.5, 0.75], abs=0.02)


def test_atoms_nearer_than_a_bond_are_counted_over_restarts(tmp_path, monkeypatch):
    starts = rattled(["H2O"] * 6)
    for k in (1, 3, 5):
        starts[k] = Atoms("H2", [[0, 0, 0], [0, 0, 0.49]])
    commit, potential = Journal.commit, tiny_potential()

    def killed(self, *arguments, **options):
        commit(self, *arguments, **options)
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Journal, "commit", killed)
            torchmdnet2.score(potential, starts, tmp_path / "out.csv", block=2)
    console = Console(file=io.StringIO())
    with pytest.warns(StructureWarning, match="3 structures have atoms nearer than any bond, first record 1: "):
        torchmdnet2.score(potential, starts, tmp_path / "out.csv", block=2, console=console)
    assert "6 records, 6 structures, " in console.file.getvalue()  # not only those since the restart


@pytest.mark.parametrize(("charge", "named"), [("-2", True), ("0", False)])
def test_the_charge_in_a_file_of_xtb_beside_a_stream_is_named(tmp_path, charge, named):
    write(tmp_path / "in.xyz", rattled(["H2O"]), format="extxyz")
    (tmp_path / ".CHRG").write_text(charge)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchmdnet2.score(tiny_potential(), tmp_path / "in.xyz", tmp_path / "out.csv", novelty=False)
    assert named == any(
        "the file .CHRG beside it is not read, since the file may hold" in str(one.message) for one in caught
    )


def test_doubts_about_a_record_are_told_once(small, tmp_path):
    """Its novelty is computed of the relaxed structure, whose entries are the same."""
    (tmp_path / "in.xyz").write_text("3\noxalate 2- Q=-2\nO 0 0 0\nH 0 0.76 0.6\nH 0 -0.76 0.6\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (outcome,) = torchmdnet2.relax(small, tmp_path / "in.xyz")
    told = [str(one.message).partition(" is not read")[0] for one in caught]
    assert told == ["'Q'", "'2-' in a title or comment line"]
    assert "novelty" in outcome.structures[0].info


def test_a_run_in_memory_continues_only_with_the_same_structures(tmp_path, monkeypatch):
    """After a kill: other structures, or another potential, do not continue the file."""
    starts, potential = rattled(), tiny_potential(noise=0.02)

    def run_with(structures, model, **options):
        torchmdnet2.score(model, structures, tmp_path / "out.csv", block=2, **options)

    commit, calls = Journal.commit, []

    def killed(self, *arguments, **options):
        commit(self, *arguments, **options)
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "commit", killed)
    with pytest.raises(KeyboardInterrupt, match="the same command continues after 2 records"):
        run_with(starts, potential)
    monkeypatch.setattr(Journal, "commit", commit)
    for other in ((rattled(size=0.1), potential), (starts, tiny_potential(noise=0.03))):
        with pytest.raises(BadConfig, match=r"belongs to an interrupted run that differs in (input|model):"):
            run_with(*other)
    with pytest.raises(BadConfig, match=r"that differs in dtype, novelty: give the same command"):
        run_with(starts, potential, dtype="float64", novelty=False)
    run_with(starts, potential)
    assert calls and len((tmp_path / "out.csv").read_text().splitlines()) == len(starts) + 1
