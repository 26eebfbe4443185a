"""Structures, options and trajectories that are refused, with the reason."""

from __future__ import annotations

import math
import os
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.constraints import FixAtoms, FixBondLength
from ase.io import read, write
from tiny import tiny_potential

import torchmdnet2
from torchmdnet2.benchmark import water_box
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig, BadData, StructureWarning, UnknownElement, UnknownModel
from torchmdnet2.md import MDOptions, Unphysical, check_stability, guard, run_md
from torchmdnet2.md.guard import Limits, check_overlaps, closest_pair
from torchmdnet2.md.integrators import HostEngine
from torchmdnet2.md.output import Table
from torchmdnet2.system import System


def options(tmp_path, steps=20, name="run", **more):
    return MDOptions(steps=steps, output=str(tmp_path / name), **more)


def test_overlapping_atoms_at_the_start(potential, tmp_path):
    atoms = Atoms("H2OH", [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0.2, 2]])
    with pytest.raises(Unphysical, match=r"atom [23] \([OH]\) and atom [23] \([OH]\) are 0.200 Å apart"):
        run_md(potential, atoms, options(tmp_path))
    assert not os.listdir(tmp_path)
    check_overlaps(System.from_ase(molecule("H2")))  # the shortest bond there is
    with pytest.raises(Unphysical, match="periodic image"):
        check_overlaps(System.from_ase(Atoms("H", cell=[0.3, 5, 5], pbc=True)))


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("edge", [4.0, 40.0])
def test_closest_pair_by_search_or_by_all_pairs(monkeypatch, replicas, edge):
    random = torch.Generator().manual_seed(replicas)
    z = torch.tensor([1, 6, 8, 8, 1, 1, 7, 6]).repeat(replicas)
    pos = edge * torch.rand(8 * replicas, 3, generator=random, dtype=torch.float64)
    system = System(z=z, pos=pos, batch=torch.arange(replicas).repeat_interleave(8))
    found = closest_pair(system)
    monkeypatch.setattr(guard, "_DENSE", 0)
    expected = closest_pair(system)
    assert (found is None) == (expected is None) == (edge == 40.0)
    if expected is not None:
        assert found[1:3] == expected[1:3]
        assert found[::3] == pytest.approx(expected[::3], rel=1e-12)


def test_unknown_element(potential, tmp_path):
    with pytest.raises(UnknownElement, match=r"C.*H, O"):
        run_md(potential, molecule("CH4"), options(tmp_path))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("atoms", [Atoms(), Atoms("H", pbc=True), Atoms("H", [[np.nan, 0, 0]])])
def test_unusable_start(potential, tmp_path, atoms):
    with pytest.raises(ValueError, match=r"no atoms|lattice vector|not finite"):
        run_md(potential, atoms, options(tmp_path / "new" / "folder"))
    assert not os.listdir(tmp_path), "folders are made for a start that can be simulated"


def test_a_start_that_cannot_move_as_it_should(potential, water, tmp_path):
    def changed(change):
        atoms = water.copy()
        change(atoms)
        return atoms

    for atoms, words in (
        (changed(lambda w: w.set_constraint(FixAtoms(range(len(w))))), "every atom of the start structure is fixed"),
        (changed(lambda w: w.set_constraint(FixBondLength(0, 1))), "has a FixBondLengths?; only FixAtoms is supported"),
        (changed(lambda w: w.set_masses([0.0, *w.get_masses()[1:]])), "atom 0 has a mass of 0; give it a positive"),
    ):
        with pytest.raises(BadData, match=words):
            run_md(potential, atoms, options(tmp_path))


def test_only_a_table_of_a_run_is_continued(tmp_path):
    (tmp_path / "run.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadData, match=r"run\.csv is not a table of a simulation; move it away to go on"):
        Table(tmp_path / "run.csv", keep_to=5)


@pytest.mark.parametrize("explosion", ["hot", "strong", "nan", "collapse"])
def test_explosion_stops_with_the_last_good_frame(potential, water, tmp_path, monkeypatch, host, explosion):
    """From step 34 on the model goes wrong; the message names step and atoms, the trajectory ends before."""
    advance = host.advance

    def wrong(self, steps):
        state = self._state
        for _ in range(steps):
            advance(self, 1)
            if state.step < 34:
                continue
            if explosion == "nan":
                state.forces[1] = math.nan
            elif explosion == "strong":
                state.forces[1] += 300.0
            elif explosion == "hot":
                state.vel.mul_(8)
            else:
                state.pos[1] = state.pos[0] + 0.1

    monkeypatch.setattr(host, "advance", wrong)
    words = {
        "hot": "temperature|conserved energy",
        "strong": r"force of .*atom 1 \(H\)",
        "nan": r"not finite.*atom 1 \(H\)",
        "collapse": r"atom [01] \([OH]\) and atom [01] \([OH]\) are 0.173 Å apart",
    }
    with pytest.raises(Unphysical, match=f"step 34: .*({words[explosion]}).*last good frame .step 33"):
        run_md(potential, water, options(tmp_path, 100, every=10))
    frames = read(tmp_path / "run.xyz", ":")
    assert [f.info["step"] for f in frames] == [0, 10, 20, 30, 33]
    assert all(np.isfinite(f.positions).all() and np.isfinite(f.get_forces()).all() for f in frames)
    monkeypatch.undo()
    healthy = run_md(potential, water, options(tmp_path, 33, "healthy"))
    np.testing.assert_allclose(frames[-1].positions, healthy.atoms.positions, atol=1e-7)


def test_limits_are_those_of_the_page():
    """Automatic stops: 200 eV/Å, 5,000 K or ten times the target, 0.5 eV per atom, a volume ten times as large."""
    usual, hot = Limits.for_temperature(300.0), Limits.for_temperature(600.0)
    for limits, temperature, force, energy, words in [
        (usual, 4999.0, 199.0, 0.49, None), (usual, 4999.0, 199.0, -0.49, None), (hot, 5999.0, 0.0, 0.0, None),
        (usual, 5001.0, 0.0, 0.0, "temperature of 5e"), (hot, 6001.0, 0.0, 0.0, "temperature of 6e"),
        (usual, 300.0, 201.0, 0.0, "force of 201 eV/Å (limit 200)"),
        (usual, 300.0, 0.0, 0.51, "conserved energy is off by 0.51"), (usual, 300.0, 0.0, -0.51, "off by -0.51"),
    ]:  # fmt: skip
        found = limits.violation(temperature, force, energy)
        assert found is None if words is None else words in found
    for volume, passed in ((99.0, True), (101.0, False), (1.01, True), (0.99, False)):
        found = usual.volume_violation(volume, 10.0)
        assert (found is None) == passed and (passed or "volume of the cell" in found)


@pytest.mark.parametrize("factor", [2.2, 0.46])
def test_a_cell_that_swells_or_shrinks_stops_a_run(potential, tmp_path, monkeypatch, factor):
    advance = HostEngine.advance

    def wrong(self, steps):
        for _ in range(steps):
            advance(self, 1)
            if self._state.step == 3:
                self._state.cell.mul_(factor)

    monkeypatch.setattr(HostEngine, "advance", wrong)
    atoms = molecule("H2O", cell=[12.0] * 3, pbc=True)
    with pytest.raises(Unphysical, match=r"step 3: .*the volume of the cell is .* and was 1.73e\+03 .*limit 10 times"):
        run_md(potential, atoms, options(tmp_path, 6, every=1, ensemble="npt"))


def test_a_long_timestep_is_noticed(potential, tmp_path):
    """A real blow-up: strong forces and a time step that is far too long."""
    strong = {**potential.config, "energy_scale": 200.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = type(potential).from_config(strong).double()
    with pytest.raises(Unphysical, match="last good frame"):
        run_md(made, molecule("H2O"), options(tmp_path, 2000, timestep=5.0))
    assert np.isfinite(read(tmp_path / "run.xyz").get_forces()).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"ensemble": "nph"}, {"timestep": 0.0}, {"timestep": math.nan}, {"timestep": 50.0}, {"timestep": 5e-16},
        {"temperature": -1.0}, {"seed": 2**70}, {"seed": 2**63 - 2, "replicas": 3}, {"seed": 1.5},
        {"friction": 0.0}, {"steps": -1}, {"every": 0}, {"trajectories": ("a.pdb",)}, {"replicas": 0},
        {"trajectories": ("a/t.xyz", "b/t.xyz")}, {"friction": 3.0}, {"friction": 1.0},
        {"pressure": 1.0}, {"barostat": "isotropic", "ensemble": "nvt"}, {"barostat_time": 2.0},
        {"pressure": math.inf, "ensemble": "npt"}, {"barostat": "berendsen", "ensemble": "npt"},
        {"barostat_time": 0.005, "ensemble": "npt"}, {"barostat_compressibility": -1.0, "ensemble": "npt"},
        {"hydrogen_mass": 0.0}, {"remove_drift": 0}, {"inner_steps": 0}, {"precision": "tf32"},
    ],
)  # fmt: skip
def test_options_are_checked(bad):
    with pytest.raises(BadConfig, match=next(iter(bad)).removesuffix("ies")):
        MDOptions(**{"steps": 10, **bad})


def test_mixed_precision_needs_kernels(potential, water, tmp_path):
    with pytest.raises(ValueError, match=r"precision='mixed': .*take precision='native'"):
        run_md(potential, water, options(tmp_path, precision="mixed"))


@pytest.mark.parametrize(
    ("pbc", "fixed", "words"),
    [
        (False, [], "the start structure has no periodic cell; constant pressure needs"),
        ([True, True, False], [], "periodic along a and b only"),
        (True, [0], "fixed atoms, which hold its cell"),
    ],
)
def test_constant_pressure_needs_a_free_cell(potential, tmp_path, pbc, fixed, words):
    atoms = molecule("H2O", cell=[5, 5, 5], pbc=pbc)
    atoms.set_constraint(FixAtoms(fixed) if fixed else None)
    with pytest.raises(BadData, match=words):
        run_md(potential, atoms, options(tmp_path, ensemble="npt"))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(inner_steps=2), "inner_steps: .*no inner model"),
        (dict(timestep=0.5, inner=True), r"timestep: 0\.5 fs in 4 inner steps .*about 2 fs"),
        (dict(hydrogen_mass=9.0), "hydrogen_mass: 9 amu would leave atom 0 .O. with 0.02 amu"),
        (dict(hydrogen_mass=3.0, atoms=molecule("H2")), "atom 0 .H. is bonded to no heavier atom"),
        (dict(remove_drift=10, fixed=True), "remove_drift: some atoms are fixed"),
    ],
)
def test_what_has_no_meaning_is_refused(potential, water, tmp_path, change, words):
    change = dict(change)
    inner, atoms = potential if change.pop("inner", False) else None, change.pop("atoms", water)
    if change.pop("fixed", False):
        atoms.set_constraint(FixAtoms([0]))
    with pytest.raises(ValueError, match=words):
        run_md(potential, atoms, options(tmp_path, **change), inner=inner)
    assert not os.listdir(tmp_path)


def test_a_mistyped_inner_model(tmp_path, potential, water):
    with pytest.raises(UnknownModel, match=r"inner: Spring: no such model file.*, or 'springs', which are fitted to"):
        run_md(potential, water, options(tmp_path), inner="Spring")
    assert not os.listdir(tmp_path)


def test_atoms_that_a_model_without_repulsion_may_attract(tmp_path):
    """`aimnet2` as published is such a model: a warning in md, relax, score and scan; organic repels."""
    soft, hard = tiny_potential(), tiny_potential(priors=[{"name": "zbl"}])
    delta = tiny_potential(priors=[{"name": "baseline", "potential": hard.config}])
    oxygens, hydrogens = Atoms("O2", [[0, 0, 0], [0, 0, 0.88]]), Atoms("H2", [[0, 0, 0], [0, 0, 0.49]])
    for atoms in (oxygens, hydrogens, [oxygens, hydrogens]):
        with pytest.warns(StructureWarning, match=r"atom 0 \(O|H\) and .* this model has no repulsive prior"):
            assert check_overlaps(System.from_ase(atoms), [hard, soft])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not check_overlaps(System.from_ase(atoms), [hard, delta])
            assert not check_overlaps(System.from_ase(atoms))
    bonds = [("V2", 1.77), ("Cr2", 1.68), ("Mo2", 1.94), ("UO", 1.76), ("BaO", 1.94)]
    metals = [Atoms(name, [[0, 0, 0], [0, 0, length]]) for name, length in bonds]
    for atoms in [*map(molecule, ("N2", "H2", "CO", "HCN", "C2H2")), *metals]:  # the shortest bonds
        assert not check_overlaps(System.from_ase(atoms), [soft])
    with pytest.warns(StructureWarning, match=r"\(organic\)"):
        assert check_overlaps(System.from_ase(oxygens), [tiny_potential(elements=[1, 6, 8])])
    with pytest.warns(StructureWarning, match=r"take a model that has one \(zbl or pair_potential\)"):
        assert check_overlaps(
            System.from_ase(Atoms("Cr2", [[0, 0, 0], [0, 0, 1.5]])), [tiny_potential(elements=[8, 13])]
        )
    with pytest.warns(StructureWarning, match="no repulsive prior") as told:
        run_md(soft, hydrogens, options(tmp_path, 2, every=1, timestep=0.05))
    assert len([each for each in told if "repulsive" in str(each.message)]) == 1
    assert not any(prior.repels for prior in torchmdnet2.load("aimnet2").priors)
    assert any(prior.repels for prior in torchmdnet2.load("organic-small").priors)


def test_settings_of_cells_for_a_molecule(model_file, tmp_path, monkeypatch, capsys):
    """Bar K8: what would have no effect is refused."""
    monkeypatch.chdir(tmp_path)
    write("w.xyz", molecule("H2O"))
    assert main(["md", str(model_file), "w.xyz", "--steps", "5", "--isolated"]) != 0
    assert "--isolated has no effect: the start is not periodic" in capsys.readouterr().err
    assert main(["md", str(model_file), "w.xyz", "--steps", "5", "--isolated", "--ensemble", "npt"]) != 0
    assert "--isolated removes the cell, and --ensemble npt needs one" in capsys.readouterr().err
    charged = tiny_potential(priors=[{"name": "coulomb", "charges": {"H": 0.3, "O": -0.6}}])
    with pytest.raises(ValueError, match=r"coulomb='dsf' has no effect: .* no structure is periodic"):
        run_md(charged, molecule("H2O"), options(tmp_path), coulomb="dsf")
    with pytest.raises(ValueError, match=r"coulomb='dsf' has no effect: .* no structure is periodic"):
        check_stability(charged, [molecule("H2O")] * 2, [300.0], coulomb="dsf")
    assert os.listdir(tmp_path) == ["w.xyz"]
    save(charged, tmp_path / "charged.tmn")
    write("w.xyz", molecule("H2O", info={"energy": 1.0}))
    given = ["evaluate", "charged.tmn", "w.xyz", "--forces-key", "null", "--coulomb", "dsf"]
    assert main(given) == 0 and "note: --coulomb dsf had no effect: no frame is periodic" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--trajectory", "md.xyz"]])
def test_the_command_does_not_write_over_its_start(model_file, tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    write("md.xyz", molecule("H2O"))
    before = (tmp_path / "md.xyz").read_bytes()
    assert main(["md", str(model_file), "md.xyz@0", "--steps", "5", *more]) != 0
    assert "md.xyz is read by this command and would be written too" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["md.xyz"] and (tmp_path / "md.xyz").read_bytes() == before
    assert main(["md", str(model_file), "md.xyz@7", "--steps", "5", "--output", "run"]) != 0
    assert not capsys.readouterr().err.rstrip().endswith(":")


@pytest.mark.parametrize("distance", [0.33, 0.3101, 0.3099, 0.1])
def test_overlaps_are_seen_in_every_replica(distance):
    """H2, whose atoms overlap below 0.31 Å, in the second replica only; the first is two atoms apart by more."""
    far, near = Atoms("H2", [[0, 0, 0], [0, 0, 0.74]]), Atoms("H2", [[5, 5, 5], [5, 5 + distance, 5]])
    system = System.from_ase([far, near])
    if distance < 0.31:
        with pytest.raises(Unphysical, match="replica 1"):
            check_overlaps(system)
    else:
        check_overlaps(system)


def test_a_cell_that_explodes_in_a_step_is_an_error_in_words(tmp_path, monkeypatch):
    """Before meshes and lists of its new size are made, which would need terabytes."""
    monkeypatch.chdir(tmp_path)
    options = MDOptions(5, ensemble="npt", temperature=300.0, barostat_compressibility=10.0, output="md")
    (box,) = water_box(2).to_ase()
    with pytest.raises(BadConfig, match="the volume of the cell is more than 100 times that of the start"):
        run_md("organic-small", box, options)
