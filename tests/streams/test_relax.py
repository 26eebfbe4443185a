"""What relax and score give: minima as ASE's, cells, conformers, scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.io import read, write
from ase.optimize import LBFGS
from rattled import rattled
from tiny import tiny_potential

import torchmdnet2
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadConfig, UndeterminedEnergyWarning
from torchmdnet2.evaluator import Evaluator
from torchmdnet2.streams import batches
from torchmdnet2.streams.batches import BatchOptions
from torchmdnet2.streams.lbfgs import BatchedLBFGS
from torchmdnet2.streams.records import Record
from torchmdnet2.streams.relaxing import Relaxer, RelaxOptions, _bonds_changed
from torchmdnet2.streams.scoring import Scorer


def test_minima_are_those_of_ase_in_order(small):
    starts, outcomes = rattled(), []
    for padded in (False, True):
        options = RelaxOptions(fmax=0.005, atoms=30, padded=padded)  # two or three at a time: slots are filled again
        outcomes.append(Relaxer(small, options)([Record(k, starts=[atoms]) for k, atoms in enumerate(starts)]))
    calculator = TorchMDNet2Calculator(small)
    for start, outcome, padded in zip(starts, *outcomes, strict=True):
        (found,) = outcome.structures
        assert not outcome.errors and (found.numbers == start.numbers).all()
        assert found.info["converged"] and found.info["largest_force"] <= 0.005 and not found.info["bonds_changed"]
        assert 0 < found.info["novelty"] < 3
        alone = start.copy()
        alone.calc = calculator
        LBFGS(alone, logfile=None).run(fmax=0.005, steps=300)
        assert abs(found.info["energy"] - padded.structures[0].info["energy"]) < 1e-5
        assert abs(found.info["energy"] - alone.get_potential_energy()) < 1e-4
        found.calc = calculator
        assert abs(found.get_potential_energy() - found.info["energy"]) < 1e-5


@pytest.mark.filterwarnings("error::torchmdnet2.errors.UndeterminedEnergyWarning")
@pytest.mark.parametrize("worker", [Relaxer, Scorer])
def test_what_fills_batches_is_no_structure_to_warn_of(worker):
    options = {Relaxer: RelaxOptions, Scorer: BatchOptions}[worker](atoms=30, padded=True)
    model = tiny_potential(compositions=[{"1": 2, "8": 1}])
    (outcome,) = worker(model, options)([Record(0, starts=[molecule("H2O")])])
    assert outcome.structures and not outcome.errors
    with pytest.warns(UndeterminedEnergyWarning, match="is CH4"):
        worker(model, options)([Record(0, starts=[molecule("CH4")])])


@pytest.mark.parametrize("worker", [Relaxer, Scorer])
def test_warnings_name_the_record(worker):
    """Also where other structures of a block are refused."""
    options = {Relaxer: RelaxOptions, Scorer: BatchOptions}[worker]()
    model = tiny_potential(compositions=[{"1": 2, "8": 1}])
    names = ["H2O", "H2O", "CH4"]
    records = [Record(40 + k, f"m{k}", starts=[molecule(name)]) for k, name in enumerate(names)]
    records[0].starts[0].info["charge"] = 0.5
    with pytest.warns(UndeterminedEnergyWarning, match=r"^record 42 \(m2\) is CH4: the training frames"):
        worker(model, options)(records)


def test_optimizer_finds_the_minimum_of_wells_and_never_goes_up():
    torch.manual_seed(0)
    batch = torch.tensor([0] * 4 + [1] * 7 + [2] * 5)
    curvature = torch.logspace(0, 3, 48, dtype=torch.float64).view(16, 3)
    wells = torch.randn(16, 3).double() * 2
    pos, optimizer = wells + torch.randn(16, 3).double(), BatchedLBFGS(torch.device("cpu"))
    radii = np.array([0.0] * 4 + [0.7] * 11 + [0.0])  # with springs, without, and in part
    optimizer.take(np.array([4, 7, 5]), np.full(3, -1), pos, radii)
    last = torch.full((3,), torch.inf)
    for _ in range(1000):  # 70 to 850 are needed, by the rounding of the sums
        x = pos - wells
        energy = torch.zeros(3).double().index_add(0, batch, (curvature * x**2 / 2 + torch.sin(2 * x)).sum(1))
        pos = optimizer.advance(pos, -curvature * x - 2 * torch.cos(2 * x), energy)
        assert (optimizer.energy <= last + 1e-5).all()
        last = optimizer.energy.clone()
    assert float(optimizer.forces.abs().max()) < 1e-4


def test_torsions_are_nearer_to_their_minimum_than_by_ase(small):
    """Small forces do not say so: at 0.02 eV/Å, ASE's L-BFGS stops 31 meV above the minimum of this molecule."""
    start = read(Path(__file__).parents[2] / "examples/data/ibuprofen.xyz")
    start.rattle(0.1, seed=0)
    loose, tight = (
        Relaxer(small, RelaxOptions(fmax=fmax))([Record(0, starts=[start])])[0].structures[0] for fmax in (0.02, 0.002)
    )
    start.calc = TorchMDNet2Calculator(small)
    LBFGS(start, logfile=None).run(fmax=0.02)
    assert loose.info["energy"] < start.get_potential_energy() - 5e-3
    lowest = tight.info["energy"]
    tight.calc = TorchMDNet2Calculator(small)
    assert abs(tight.get_potential_energy() - lowest) < 1e-5 and lowest < loose.info["energy"]
    LBFGS(tight, logfile=None).run(fmax=0.002)
    assert abs(tight.get_potential_energy() - lowest) < 1e-4


@pytest.mark.parametrize("periodic", [False, True])
def test_bonds_that_are_broken_or_made_are_counted(periodic):
    chain = [
        Atoms("C3", [[x, 0, 0] for x in xs], cell=[9.0] * 3, pbc=periodic) for xs in ([0, 1.5, 4.2], [0, 2.7, 4.2])
    ]
    for atoms in chain if periodic else ():  # both bonds cross a face
        atoms.positions[:, 0] -= 2.6
        atoms.wrap()
    assert _bonds_changed(chain[0], chain[0]) == 0
    assert _bonds_changed(*chain) == 2  # the first bond is broken, another one made


def test_fixed_atoms_stay_and_step_limits_hold(small):
    from ase.constraints import FixAtoms

    start = molecule("CH3CH2OH")
    start.rattle(0.1, seed=3)
    start.set_constraint(FixAtoms([0, 1]))
    (whole,) = Relaxer(small, RelaxOptions())([Record(0, starts=[start])])[0].structures
    assert np.allclose(whole.positions[:2], start.positions[:2]) and whole.info["converged"]
    lowest = torch.inf
    for steps in (1, 2, 3, 5, 8):
        (short,) = Relaxer(small, RelaxOptions(steps=steps))([Record(0, starts=[start])])[0].structures
        assert short.info["steps"] == steps and not short.info["converged"]
        energy = float(small(torchmdnet2.System.from_ase(short)).energy)
        assert abs(energy - short.info["energy"]) < 1e-4 and energy <= lowest + 1e-4  # not that of a step taken back
        lowest = energy


def test_cells_are_relaxed(tmp_path):
    crystal = bulk("Si", "diamond", a=5.6)
    (outcome,) = torchmdnet2.relax(tiny_potential(noise=0.02), [crystal], cell=True, steps=5)
    (found,) = outcome.structures
    assert found.info["steps"] <= 5 and abs(found.get_volume() - crystal.get_volume()) > 1e-3
    (outcome,) = torchmdnet2.relax(tiny_potential(), [molecule("CH4")], cell=True)
    assert "no cell" in outcome.errors[0]


def test_conformers_are_ranked_without_duplicates(tmp_path):
    pytest.importorskip("rdkit")
    (tmp_path / "in.smi").write_text("OCCO glycol\nC1CC broken\nC methane\n")
    arguments = ["relax", "organic-small", str(tmp_path / "in.smi"), str(tmp_path / "out.sdf"), "--conformers", "8"]
    assert main([*arguments, "--fmax", "0.05"]) == 0
    chem = pytest.importorskip("rdkit.Chem")
    found = [mol.GetPropsAsDict() for mol in chem.SDMolSupplier(str(tmp_path / "out.sdf"))]
    glycol = [info["relative_energy"] for info in found if info["name"] == "glycol"]
    assert len(glycol) > 1 and glycol == sorted(glycol) and glycol[0] == 0 and glycol[-1] <= 0.26
    assert sum(info["name"] == "methane" for info in found) == 1
    assert (tmp_path / "out.failed.txt").read_text().startswith("record 1 (broken): ")


def test_several_models_give_their_mean_and_spread(tmp_path):
    models, starts = [tmp_path / "a.tmn", tmp_path / "b.tmn"], rattled()
    for k, path in enumerate(models):
        save(tiny_potential(seed=k, noise=0.02), path)
    write(tmp_path / "in.xyz", starts)
    names = ",".join(map(str, models))
    assert main(["score", names, str(tmp_path / "in.xyz"), str(tmp_path / "out.csv")]) == 0
    head, *lines = (tmp_path / "out.csv").read_text().splitlines()
    rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
    committee, parts = Ensemble.load(models), torchmdnet2.score(models, starts)
    for row, start, outcome in zip(rows, starts, parts, strict=True):
        expected = committee(torchmdnet2.System.from_ase(start))
        assert float(row["energy"]) == pytest.approx(float(expected.energy), abs=1e-5)
        assert float(row["energy_std"]) == pytest.approx(float(expected.energy_std), abs=1e-5) and outcome.structures
        spread = float(expected.forces_std.norm(dim=1).max())
        assert float(row["force_std"]) == pytest.approx(spread, rel=1e-3) and spread > 0
    (outcome, *_) = torchmdnet2.relax(models, starts, steps=3)
    assert outcome.structures[0].info["energy"] < float(rows[0]["energy"])
    with pytest.raises(BadConfig, match="one model"):
        torchmdnet2.relax(models, [bulk("Si")], cell=True)


def test_what_has_no_conformers_is_named_in_its_record(monkeypatch):
    chem = pytest.importorskip("rdkit.Chem.AllChem")
    from torchmdnet2.streams.conformers import Preparation

    def error(record):
        (found,) = Preparation(2)([record])
        assert not found.starts
        return found.error

    assert error(Record(0, smiles="C(")) == "'C(' is not a SMILES that RDKit can read"
    assert error(Record(0, molfile="no molfile")) == "RDKit cannot read its bonds"
    several = "it has several molecules, but conformers need a single one: leave out ions and solvents"
    assert error(Record(0, smiles="C.C")) == several
    assert error(Record(0, parse=Atoms)) == "it has no atoms"
    monkeypatch.setattr(chem, "EmbedMultipleConfs", lambda *_: [])
    assert error(Record(0, smiles="CC")) == "RDKit finds no conformer; give a file with its structure"


def test_a_cell_that_cannot_be_relaxed_is_named(small):
    for several in (molecule("H2O"), [molecule("H2O")]):
        (outcome,) = torchmdnet2.score(small, several)
        assert outcome.structures[0].info["energy"] == pytest.approx(-2081, abs=1)
    (outcome,) = torchmdnet2.relax(small, [molecule("H2O")], cell=True)
    assert outcome.errors and "it has no cell that is periodic in three directions" in str(outcome.errors)


def test_the_last_ones_take_smaller_batches(small, monkeypatch):
    """Padded batches, as on a GPU: of a quarter of the size once no more structures wait, with the same minima."""
    starts, shapes = rattled(["CH3CH2OH", "H2O", "CH4", "CH3OH"] * 2), set()
    monkeypatch.setattr(batches, "_FULL", 16)
    call = Evaluator.__call__
    monkeypatch.setattr(
        Evaluator, "__call__", lambda self, system, *a, **k: (shapes.add(len(system.z)), call(self, system, *a, **k))[1]
    )  # fmt: skip
    found = []
    for padded in (True, False):
        worker = Relaxer(small, RelaxOptions(atoms=64, padded=padded, novelty=False))
        found.append(worker([Record(k, starts=[atoms.copy()]) for k, atoms in enumerate(starts)]))
        if padded:
            assert shapes == {64, 16}
    for one, two in zip(*found, strict=True):
        assert one.structures[0].info["energy"] == pytest.approx(two.structures[0].info["energy"], abs=2e-4)


def test_a_sum_in_cells_is_taken_where_some_structures_have_cells(tmp_path):
    atoms = rattled(["H2O", "H2O"])
    atoms[1].set_cell([9, 9, 9])
    atoms[1].pbc = True
    write(tmp_path / "in.xyz", atoms, format="extxyz")
    by_list = torchmdnet2.score("organic-small", atoms, coulomb="dsf", novelty=False)
    by_file = torchmdnet2.score("organic-small", tmp_path / "in.xyz", coulomb="dsf", novelty=False)
    energies = [[one.structures[0].info["energy"] for one in found] for found in (by_list, by_file)]
    assert np.isfinite(energies).all() and energies[0] == pytest.approx(energies[1], abs=1e-4)


def test_cells_that_stay(small):
    """Periodic structures have no springs; a batch of these alone was an error of shapes."""
    free = molecule("CH3CH2OH")
    free.rattle(0.05, seed=1)
    cell = free.copy()
    cell.set_cell([7.0] * 3)
    cell.pbc = True
    calculator = TorchMDNet2Calculator(small)
    for starts in ([cell], [cell, free, cell]):
        for start, outcome in zip(starts, torchmdnet2.relax(small, starts, fmax=0.002), strict=True):
            (found,) = outcome.structures
            found.calc = calculator
            assert found.info["converged"] and np.abs(found.get_forces()).max() <= 0.003
            assert found.info["energy"] == pytest.approx(found.get_potential_energy(), abs=1e-4)
            assert (found.cell.array == start.cell.array).all() and (found.pbc == start.pbc).all()


def test_a_mirror_image_is_no_other_conformer():
    pytest.importorskip("rdkit")
    from torchmdnet2.streams.conformers import Preparation, Ranking

    (record,) = Preparation(1)([Record(0, smiles="CC(C)CO")])
    (one,) = record.starts
    one.info |= {"energy": 0.0, "converged": True, "bonds_changed": 0}
    other, turned = one.copy(), one.copy()
    other.positions[:, 0] *= -1
    turned.rotate_dihedral(0, 1, 3, 4, 90, indices=[4, 12, 13, 14])  # oxygen and the hydrogens behind
    kept = Ranking()([one, other, turned], record.molfile)
    assert len(kept) == 2 and kept[0] is one and kept[1] is turned


def test_scores_state_the_charge_that_charges_of_atoms_state(small):
    atoms = Atoms("OH", [[0, 0, 0], [0, 0, 0.97]])
    atoms.set_initial_charges([-1, 0])
    found = torchmdnet2.score(small, [atoms])[0].structures[0]
    assert found.info["charge"] == -1


def test_conformers_with_a_ring_turned_over_are_the_same():
    """The single and double bonds of an aromatic ring do not tell its two sides apart."""
    chem = pytest.importorskip("rdkit.Chem")
    from rdkit.Chem import AllChem

    mol = chem.AddHs(chem.MolFromSmiles("OC(C)c1ccccc1"))
    AllChem.EmbedMolecule(mol, randomSeed=1)
    first = Atoms([a.GetSymbol() for a in mol.GetAtoms()], mol.GetConformer().GetPositions())
    first.info.update(energy=0.0, bonds_changed=0, converged=True)
    turned = first.copy()
    ring = [3, 4, 5, 6, 7, 8]
    pairs = {ring[k]: ring[-k % 6] for k in range(6)}
    hydrogen = {k: mol.GetAtomWithIdx(k).GetNeighbors()[-1].GetIdx() for k in ring[1:]}
    for one, other in list(pairs.items()):
        if one in hydrogen:
            pairs[hydrogen[one]] = hydrogen[other]
    for one, other in pairs.items():
        turned.positions[one] = first.positions[other]
    assert len(torchmdnet2.streams.Ranking()([first, turned], chem.MolToMolBlock(mol))) == 1
