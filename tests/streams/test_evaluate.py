"""`torchmdnet2 evaluate` as a stream: devices, frames that fail, restart."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read, write
from tiny import tiny_potential
from warm import warm_python

import torchmdnet2
from torchmdnet2 import System, checkpoint
from torchmdnet2.cli import main
from torchmdnet2.core import pipeline
from torchmdnet2.data import Sample, ase_formats, file_readers
from torchmdnet2.data.ase_formats import ExtxyzReader
from torchmdnet2.data.extxyz import read_extxyz
from torchmdnet2.ensemble import EnsembleResult
from torchmdnet2.errors import BadConfig
from torchmdnet2.potential.output import Output
from torchmdnet2.potential.potential import Potential, Result
from torchmdnet2.streams import batches, evaluating
from torchmdnet2.training.config.sections import LOSS_WEIGHT
from torchmdnet2.training.reporting.evaluation import Predictions
from torchmdnet2.training.steps.trainer import Properties


def water(k: int) -> Atoms:
    rng = np.random.default_rng(k)
    atoms = Atoms("OH2", [(0, 0, 0), (0.96, 0, 0), (-0.24, 0.93, 0)])
    atoms.positions += rng.normal(0, 0.03, (3, 3))
    atoms.info |= {"energy": float(rng.normal()), "number": k}
    atoms.arrays["forces"] = rng.normal(0, 1, (3, 3))
    return atoms


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate("mn"):
        checkpoint.save(tiny_potential(seed=k), f"{name}.tmn")
    write("data.xyz", [water(k) for k in range(300)])
    return tmp_path


def errors(capsys, *arguments: str) -> dict:
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setitem(evaluating._BLOCK, "cpu", 32)


@pytest.mark.parametrize("models", [["m.tmn"], ["m.tmn", "n.tmn"]])
def test_processes_and_blocks_give_the_same(folder, capsys, monkeypatch, models):
    """Errors, their order in the file and the spread do not depend on the number of processes, nor on the blocks."""
    one = errors(capsys, *models, "data.xyz", "--output", "one.xyz", "--devices", "cpu")
    monkeypatch.setitem(evaluating._BLOCK, "cpu", 32)
    two = errors(capsys, *models, "data.xyz", "--output", "two.xyz", "--devices", "cpu,cpu")
    assert one["frames"] == two["frames"] == 300
    for name in ("energy_per_atom", "forces"):
        assert one[name]["rmse"] == pytest.approx(two[name]["rmse"], rel=1e-12)
        assert one[name]["count"] == two[name]["count"]
    if len(models) > 1:
        assert one["spread"]["forces"]["correlation"] == pytest.approx(two["spread"]["forces"]["correlation"], abs=1e-9)
        assert [m["forces"]["mae"] for m in one["members"]] == pytest.approx(
            [m["forces"]["mae"] for m in two["members"]]
        )
    assert (folder / "one.xyz").read_text() == (folder / "two.xyz").read_text()
    assert [atoms.info["frame"] for atoms in read("two.xyz", ":")] == [f"data.xyz, frame {k}" for k in range(300)]
    assert not [path.name for path in folder.iterdir() if re.search("progress|failed|spread|lock", path.name)]


def test_helpers_beside_a_gpu_give_the_same(folder, capsys, small_blocks, monkeypatch):
    """Processes read parts of a file and write predictions. A part that has no limits is read by the main process."""
    broken(folder)
    found = []
    for helpers in (0, 2):
        monkeypatch.setattr(evaluating, "helpers_for", lambda *_, helpers=helpers: helpers)
        monkeypatch.setattr(evaluating.FrameSource, "takes_long", True)
        output = f"out{helpers}.xyz"
        found.append(errors(capsys, "m.tmn", "data.xyz", "bad.xyz", "--output", output, "--devices", "cpu"))
    assert found[0] == found[1] and found[0]["failed"]
    for end in (".xyz", ".failed.txt"):
        assert (folder / f"out0{end}").read_bytes() == (folder / f"out2{end}").read_bytes()


def broken(folder) -> list[int]:
    """Write bad.xyz, in which one frame in ten is broken in one of eight ways; return the frames that are right."""
    alone = [folder / "alone.xyz"]
    texts, right = [], []
    for k in range(200):
        write(alone[0], water(k))
        text = alone[0].read_text()
        if k % 10 == 3:
            kind = k // 10 % 8
            lines = text.splitlines(keepends=True)
            if kind == 0:
                lines[1] = lines[1].replace("energy=", "charge=many energy=")
            if kind == 1:
                lines[2] = lines[2].replace("O ", "Xx", 1)
            if kind == 2:  # an element that the model does not know
                lines[2] = lines[2].replace("O ", "Au", 1)
            if kind == 3:  # two atoms at one place
                lines[4] = "H " + lines[3][2:]
            if kind == 4:
                lines[3] = "H 0.0 nothing\n"
            if kind == 5:
                lines = ["0\n", "energy=0.0\n"]
            if kind == 6:
                lines[1] = lines[1].replace("energy=", "energy=twelve other=")
            if kind == 7:
                lines[3] = "H nan" + lines[3][5:]
            text = "".join(lines)
        else:
            right.append(k)
        texts.append(text)
    (folder / "bad.xyz").write_text("".join(texts))
    return right


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_frames_that_fail_are_lines(folder, capsys, small_blocks, devices):
    right = broken(folder)
    assert main(["evaluate", "m.tmn", "bad.xyz", "--json", "--output", "out.xyz", "--devices", devices]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["frames"], found["failed"]) == (180, 20) and "20 of 200 frames could not be evaluated, see" in err
    names = [atoms.info["frame"] for atoms in read("out.xyz", ":")]
    assert names == [f"bad.xyz, frame {k}" for k in right]
    lines = (folder / "out.failed.txt").read_text().splitlines()
    assert [int(re.match(r"bad\.xyz, frame (\d+)", line)[1]) for line in lines] == list(range(3, 200, 10))
    write("good.xyz", [water(k) for k in right])
    alone = errors(capsys, "m.tmn", "good.xyz")
    assert found["forces"]["rmse"] == pytest.approx(alone["forces"]["rmse"], rel=1e-12)
    assert main(["evaluate", "m.tmn", "bad.xyz", "--json"]) == 1  # without a file of failures, a script must see it
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == 20 and "20 of 200 frames could not be evaluated, also" in err
    assert len(re.findall("bad.xyz, frame", err)) == 10


def test_blocks_of_large_structures_have_fewer_frames(folder, monkeypatch):
    monkeypatch.setattr(evaluating, "_LARGEST", 40)
    chain = Atoms("H60", np.arange(180.0).reshape(60, 3), info={"energy": 0.0})
    write("large.xyz", [*[water(k) for k in range(30)], chain, chain, water(30)], format="extxyz")
    parts = ExtxyzReader.parts
    monkeypatch.setattr(ExtxyzReader, "parts", lambda self, size: iter([self]))
    for done, sizes in ((0, [13, 13, 4, 1, 1, 1]), (20, [10, 1, 1, 1])):
        (reader,) = file_readers(["large.xyz"], {"energy": "energy"}, {})
        blocks = list(evaluating.FrameSource([reader]).blocks(32, (0, done)))
        assert [len(block) for block in blocks] == sizes and max(block.num_atoms for block in blocks) == 60
        names = [name for block in blocks for name in block.names]
        assert names == [f"large.xyz, frame {k}" for k in range(done, 33)]
    monkeypatch.setattr(ExtxyzReader, "parts", parts)  # for other processes: their text is limited
    monkeypatch.setattr(ase_formats, "_PART", 2500)
    (reader,) = file_readers(["large.xyz"], {"energy": "energy"}, {})
    blocks = [block.read() for block in evaluating.FrameSource([reader]).blocks(32, (0, 20))]
    assert max(block.num_atoms for block in blocks) == 60 and len(blocks) > 4 and not len(blocks[0])
    assert [name for block in blocks for name in block.names] == names[-13:]


def test_without_any_good_frame_it_is_an_error(folder, capsys):
    write("gold.xyz", Atoms("Au", info={"energy": 1.0}))
    assert main(["evaluate", "m.tmn", "gold.xyz", "--forces-key", "null"]) == 1
    assert "none of 1 frames could be evaluated; the first: gold.xyz, frame 0: atom 0 is Au" in capsys.readouterr().err


def test_a_run_that_is_killed_continues(folder, capsys):
    """The file, the errors, the failures and the spread are those of a run that was not killed."""
    broken(folder)
    write("more.xyz", read("data.xyz", ":100"))
    options = ["m.tmn", "n.tmn", "bad.xyz", "more.xyz", "--json"]
    script = (
        "import json, os, sys; from pathlib import Path; from torchmdnet2.cli import main\n"
        "from torchmdnet2.streams import evaluating as e\n"
        "e._BLOCK['cpu'] = 16; add, progress = e.Evaluated.add, Path('out.xyz.progress')\n"
        "def add_or_die(*a):\n"
        "    done = json.loads(progress.read_text())['records'] if progress.exists() else 0\n"
        "    if done >= int(os.environ.get('DIE_AFTER', 10**9)): os.kill(os.getpid(), 9)\n"
        "    add(*a)\n"
        "e.Evaluated.add = add_or_die; sys.exit(main(sys.argv[1:]))"
    )
    command = [str(warm_python()), "-c", script, "evaluate", *options, "--batch-size", "16", "--output"]
    whole = subprocess.run([*command, "whole.xyz"], capture_output=True, text=True, check=True)
    progress = folder / "out.xyz.progress"
    for blocks in (1, 5, 12):
        killed = subprocess.run(
            [*command, "out.xyz"], capture_output=True, env={**os.environ, "DIE_AFTER": str(16 * blocks)}
        )
        assert killed.returncode == -signal.SIGKILL and json.loads(progress.read_text())["records"] >= 16 * blocks
    last = subprocess.run([*command, "out.xyz"], capture_output=True, text=True, check=True)
    assert "continues after" in last.stderr
    assert json.loads(last.stdout) == json.loads(whole.stdout)
    for name in ("{}.xyz", "{}.failed.txt"):
        assert (folder / name.format("out")).read_bytes() == (folder / name.format("whole")).read_bytes()
    assert not progress.exists()


@pytest.mark.parametrize("models", [["m.tmn"], ["m.tmn", "n.tmn"]])
def test_batches_are_halved_where_a_gpu_has_too_little_memory(folder, capsys, monkeypatch, models):
    whole, reference = errors(capsys, *models, "data.xyz@0:50"), Potential.reference

    def small(self, system, *options):
        if system.num_systems > 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return reference(self, system, *options)

    monkeypatch.setattr(Potential, "reference", small)
    halved = errors(capsys, *models, "data.xyz@0:50")
    for name in ("energy", "forces"):
        assert halved[name]["count"] == whole[name]["count"]
        assert halved[name]["rmse"] == pytest.approx(whole[name]["rmse"], rel=1e-9)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BrokenProcessPool(), "the processes could not start. Each"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory. Remedy: lower --batch-size, or"),
    ],
)
def test_an_end_by_the_system_is_told_without_a_traceback(folder, capsys, monkeypatch, error, words):
    def end(*_):
        raise error

    monkeypatch.setattr(pipeline, "in_order", end)
    assert main(["evaluate", "m.tmn", "data.xyz", "--devices", "cpu,cpu"]) == 1
    assert capsys.readouterr().err.startswith(f"torchmdnet2 evaluate: {words}")


def interrupt_after_two_blocks(monkeypatch):
    add, blocks = evaluating.Evaluated.add, iter("ab")

    def stop(self, block):
        if next(blocks, None) is None:
            raise KeyboardInterrupt
        add(self, block)

    monkeypatch.setattr(evaluating.Evaluated, "add", stop)


def test_an_interruption_says_that_the_same_command_continues(folder, capsys, monkeypatch, small_blocks):
    interrupt_after_two_blocks(monkeypatch)
    assert main(["evaluate", "m.tmn", "data.xyz", "--output", "out.xyz"]) == 130
    assert "interrupted: the same command continues after 64 frames" in capsys.readouterr().err


def test_brackets_in_names_are_shown_as_they_are(folder, capsys, monkeypatch, small_blocks):
    os.mkdir("out[")
    command = ["evaluate", "m.tmn", "data.xyz", "--output", "out[/b].xyz"]  # [/b] ends a style of rich
    with monkeypatch.context() as patch:
        interrupt_after_two_blocks(patch)
        assert main(command) == 130
    assert main(command) == 0
    assert "out[/b].xyz: continues after 64 frames" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("verb", ["evaluate", "relax"])
def test_a_pipe_is_refused_as_one(folder, capsys, verb):
    os.mkfifo("pipe.xyz")
    assert main([verb, "m.tmn", "pipe.xyz", *(["out.xyz"] if verb == "relax" else [])]) == 1
    assert "pipe.xyz is a pipe or a device" in capsys.readouterr().err


def test_another_command_does_not_continue(folder, capsys, monkeypatch, small_blocks):
    def fail(*_):
        raise KeyboardInterrupt

    add, count = evaluating.Evaluated.add, 0

    def twice(self, block):
        nonlocal count
        count += 1
        if count > 2:
            fail()
        add(self, block)

    monkeypatch.setattr(evaluating.Evaluated, "add", twice)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        sys.exit(main(["evaluate", "m.tmn", "data.xyz", "--output", "out.xyz"]))
    monkeypatch.setattr(evaluating.Evaluated, "add", add)
    capsys.readouterr()
    for command, changed in ((["n.tmn", "data.xyz"], "model"), (["m.tmn", "data.xyz", "--format", "ase"], "options")):
        assert main(["evaluate", *command, "--output", "out.xyz"]) == 2
        assert f"belongs to an interrupted run that differs in {changed}:" in capsys.readouterr().err


def test_the_spread_of_many_atoms_is_a_sample(folder, capsys, monkeypatch, small_blocks):
    """Of all frames and atoms alike: regular rows of molecules of eight atoms were those of one atom of each, and the
    first frames counted more than the last."""
    rng, frames = np.random.default_rng(0), [molecule("C2H6") for _ in range(300)]
    for k, atoms in enumerate(frames):
        atoms.positions += rng.normal(0, 0.02 + 0.08 * (k > 150), (8, 3))
        atoms.info["energy"] = 0.0
        atoms.arrays["forces"] = rng.normal(0, 1, (8, 3))
    write("ethane.xyz", frames)
    whole = errors(capsys, "m.tmn", "n.tmn", "ethane.xyz")
    monkeypatch.setattr(evaluating, "_ALL", 512)
    some = errors(capsys, "m.tmn", "n.tmn", "ethane.xyz")
    again = errors(capsys, "m.tmn", "n.tmn", "ethane.xyz", "--output", "out.xyz", "--devices", "cpu,cpu")
    assert some["forces"] == whole["forces"] and some["members"] == whole["members"]
    assert again["spread"] == some["spread"]
    some, whole = some["spread"]["forces"], whole["spread"]["forces"]
    for name in ("rmse", "rms_spread", "correlation"):
        assert some[name] != whole[name] and some[name] == pytest.approx(whole[name], rel=0.15)


@pytest.mark.slow
def test_workers_of_a_cluster(folder, capsys, small_blocks):
    distributed = pytest.importorskip("distributed", reason="dask's distributed is not installed")
    alone = errors(capsys, "m.tmn", "data.xyz")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        found = errors(capsys, "m.tmn", "data.xyz", "--output", "o.xyz", "--dask", cluster.scheduler_address)
        assert main(["evaluate", "m.tmn", "data.xyz", "--devices", "all", "--dask", cluster.scheduler_address]) == 2
    assert "dask: each worker uses one device" in capsys.readouterr().err
    assert found["forces"]["rmse"] == pytest.approx(alone["forces"]["rmse"], rel=1e-12)
    assert [atoms.info["frame"] for atoms in read("o.xyz", ":")] == [f"data.xyz, frame {k}" for k in range(300)]


def test_missing_lines_cost_the_frames_that_lack_them(folder, capsys):
    """A line of an atom, a comment line and a number of atoms are missing, and a line is too much."""
    texts = (folder / "data.xyz").read_text().splitlines(keepends=True)
    frames = [texts[first : first + 5] for first in range(0, len(texts), 5)]
    del frames[10][3], frames[20][1], frames[30][0]
    frames[40].append("and so on\n")
    (folder / "gap.xyz").write_text("".join(line for frame in frames for line in frame))
    assert main(["evaluate", "m.tmn", "gap.xyz", "--output", "out.xyz"]) == 0
    found = [atoms.info["reference_energy"] for atoms in read("out.xyz", ":")]
    given = [atoms.get_potential_energy() for atoms in read("data.xyz", ":")]
    np.testing.assert_allclose(found, [e for k, e in enumerate(given) if k not in (10, 20, 30)], atol=1e-9)
    assert "could not be evaluated, see" in capsys.readouterr().err


def test_data_without_labels_are_refused_early_and_leave_nothing(folder, capsys):
    frames = [water(k) for k in range(20)]
    for atoms in frames:
        del atoms.info["energy"], atoms.arrays["forces"]
    write("bare.xyz", frames * 60)
    before = sorted(path.name for path in folder.iterdir())
    assert main(["evaluate", "m.tmn", "bare.xyz", "--output", "out.xyz"]) == 1
    assert "bare.xyz" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before
    assert main(["evaluate", "m.tmn", "bare.xyz", "--unlabelled", "--output", "out.xyz"]) == 0


def test_time_left(folder):
    found = evaluating.Evaluated({})
    found.read = 300
    assert found.words(10.0, 100, 0.25) == "300 frames, 20 frames/s, 30 s left"
    assert found.words(10.0, 0, 0.0) == "300 frames, 30 frames/s"
    assert found.words(0.02, 0, 0.0) == "300 frames, 15,000 frames/s"
    parts = []
    for _ in read_extxyz("data.xyz", parts.append):
        pass
    assert len(parts) == 300 and parts == sorted(parts) and parts[-1] == 1


def test_files_of_an_interrupted_run_are_spared(folder, capsys):
    """The failures beside s.xyz and s.csv have one name."""
    (folder / "s.xyz.progress").write_text(json.dumps({"records": 5, "files": ["s.xyz", "s.failed.txt"], "job": {}}))
    assert main(["score", "organic-small", "data.xyz", "s.csv"]) == 2
    assert "s.failed.txt belongs to the interrupted run that writes s.xyz" in capsys.readouterr().err
    assert not (folder / "s.csv").exists() and (folder / "s.xyz.progress").exists()


def test_an_input_is_never_written(folder):
    """Also not from Python, nor by a file that is needed on the way."""
    for name, output in (("data.xyz", "data.xyz"), ("o.h5.xyz", "o.h5")):
        text = (folder / "data.xyz").read_text()
        (folder / name).write_text(text)
        for run in (torchmdnet2.score, torchmdnet2.relax):
            with pytest.raises(BadConfig, match=f"{name} is read by this command and would be written too"):
                run("organic-small", name, output)
        assert (folder / name).read_text() == text and not (folder / f"{name}.old").exists()


def test_predictions_are_written_as_ase_writes_them():
    """From arrays, without structures of ASE between: molecules and cells, charges, labels that are missing, spread."""
    sizes, n = [1, 3, 2], 6
    systems = [
        System(torch.ones(k, dtype=torch.long), torch.randn(k, 3).double(), charge=torch.tensor([q]).double(),
               spin=torch.tensor([s]), cell=torch.eye(3).double()[None] * p * 9.1, pbc=torch.tensor([[p, p, False]]))
        for k, q, s, p in zip(sizes, (0, -1, 0.5), (0, 3, 0), (False, False, True), strict=True)
    ]  # fmt: skip
    labels = {"energy": torch.tensor([1.0, torch.nan, -2.5]).double(), "forces": torch.randn(n, 3),
              "stress": torch.full((3, 3, 3), torch.nan), LOSS_WEIGHT: torch.ones(3)}  # fmt: skip
    labels["stress"][2] = torch.randn(3, 3)
    sample = Sample(System.concatenate(systems), labels)
    stress = torch.randn(3, 3, 3)
    plain = {"energy": torch.randn(3).double(), "forces": torch.randn(n, 3), "stress": stress + stress.mT}
    outputs = {o.name: o for o in (Output("charges", "atom"), Output("gap", "system"), Output("alpha", "atom", (2,)))}
    properties = {name: torch.randn(n if output.per_atom else 3, *output.shape) for name, output in outputs.items()}
    properties["dipole"] = torch.randn(3, 3)
    for result in (
        Result(plain["energy"]),
        Result(**plain, charges=properties["charges"], properties=properties),
        EnsembleResult(**plain, energy_std=torch.rand(3), forces_std=torch.rand(n, 3)),
    ):
        found = Predictions.of(sample, result, outputs, ["a.xyz, frame 0", 'b "c"', "d"])
        text = io.StringIO()
        write(text, found.frames(), format="extxyz")
        assert found.text() == text.getvalue()
        assert ("reference_energy" in found.text()) and found.text().count("reference_energy=") == 2
        assert found.text().count(" stress=") == (result.stress is not None)


@pytest.mark.parametrize(("models", "size"), [(1, None), (2, 7)])
def test_batches_as_on_a_gpu_give_the_same(monkeypatch, models, size):
    """There batches have one size: atoms that fill them are in no result. A frame that is refused is named."""
    monkeypatch.setattr(batches, "_SMALLEST", 512)  # atoms; of 16384, nearly all would fill
    members = [tiny_potential(seed=k, dtype=torch.float32) for k in range(models)]
    systems = System.from_ase([water(k) if k % 5 else molecule("CH3CH2OH") for k in range(40)])
    systems.z[0] = 79
    labels = {"energy": torch.zeros(40).double(), "forces": torch.zeros(systems.num_atoms, 3).double()}
    block = evaluating.FrameBlock.of([Sample(systems, labels)], [f"frame {k}" for k in range(40)], [])
    found = []
    for on_gpu in (False, True):
        options = evaluating.Evaluation((), {}, Properties(True, False), size, {}, True)
        work = evaluating._BlockEvaluator(options, members)
        work._on_gpu = on_gpu
        found.append(work(block))
        assert found[-1].failures == ["frame 0: atom 0 is Au (Z = 79), " + found[-1].failures[0].split(", ", 1)[1]]
        assert found[-1].frames == 39 and (work._capacity is not None) == on_gpu
    for plain, filled in zip(found[0].sums, found[1].sums, strict=True):
        assert plain.keys() == filled.keys()
        for name in plain:
            np.testing.assert_allclose(filled[name], plain[name], rtol=1e-4, atol=1e-6)
    one, two = (read(io.StringIO(block.written().text.decode()), ":", format="extxyz") for block in found)
    assert [atoms.info["frame"] for atoms in two] == [f"frame {k}" for k in range(1, 40)]
    for plain, filled in zip(one, two, strict=True):
        np.testing.assert_allclose(filled.get_forces(), plain.get_forces(), atol=2e-5)
        assert filled.get_potential_energy() == pytest.approx(plain.get_potential_energy(), abs=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 200), (torch.float32, 2000)])
def test_batches_on_a_cpu_have_a_number_of_atoms(dtype, most):
    """Intermediate results of a batch fit into the caches of a core."""
    sizes = [5, 300, 120, 90, *[60] * 40, most + 1, 5]
    systems = [System(z=torch.ones(n, dtype=torch.long), pos=torch.zeros(n, 3)) for n in sizes]
    block = evaluating.FrameBlock.of(
        [Sample(s, {"energy": torch.zeros(1)}) for s in systems], [str(n) for n in sizes], []
    )

    def batches(size):
        options = evaluating.Evaluation(("a.tmn",), {}, Properties(), size, {}, False)
        found = evaluating._BlockEvaluator(options, [tiny_potential(dtype=dtype)])._batches(block.dataset())
        return [list(batch) for batch in found]

    found = batches(None)
    assert [k for batch in found for k in batch] == list(range(len(sizes)))  # all, in order
    atoms = [sum(sizes[k] for k in batch) for batch in found]
    assert all(n <= most or len(batch) == 1 for n, batch in zip(atoms, found, strict=True))
    assert all(n + sizes[batch[0]] > most for n, batch in zip(atoms, found[1:], strict=False))  # none is too short
    assert {len(batch) for batch in batches(7)[:-1]} == {7}  # as asked


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cells_of_a_model_that_sums_over_all_pairs_of_molecules(folder, capsys, dtype):
    """Molecules and cells in one file, by lattice sums in cells, as the potential evaluates them."""
    cell = water(0)
    cell.cell, cell.pbc = [9.0, 9.0, 9.0], True
    write("mixed.xyz", [water(1), cell, cell, water(2)])
    found = errors(capsys, "organic-small", "mixed.xyz", "--dtype", dtype, "--output", "out.xyz")
    assert found["forces"]["count"] == 36
    exact = torchmdnet2.load("organic-small", dtype=torch.float64)
    expected = exact.reference(System.from_ase(read("mixed.xyz", ":"))).energy.numpy()
    energies = [atoms.get_potential_energy() for atoms in read("out.xyz", ":")]
    np.testing.assert_allclose(energies, expected, atol=1e-8 if dtype == "float64" else 2e-4, rtol=0)
