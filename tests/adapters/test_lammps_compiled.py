"""Compiled kernels over the rows of a domain, ghosts being senders: float32 against the Potential in float64."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from lammps_cases import BOX, PRISM, THIN, scattered

from torchmdnet2 import Potential, System
from torchmdnet2.core.exchange import CopyExchange
from torchmdnet2.engine import domain as domain_check
from torchmdnet2.engine.backends import choose_domain, compiled_reason
from torchmdnet2.engine.cpu_step import CompiledDomain
from torchmdnet2.engine.domain import ReferenceDomain
from torchmdnet2.potential.determined import Determined

PRIORS = [
    {"name": "zbl", "cutoff": 2.0},
    {"name": "d2", "cutoff": 5.0},
    {"name": "atomref", "energies": {"1": -13.6, "8": -2041.3}},
    {"name": "coulomb", "charges": {"1": 0.2, "8": -0.3}, "method": "reaction_field", "cutoff": 4.5},
]
D3 = {"name": "d3", "elements": [1, 6, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 5.5, "switch_width": 1.0}


def make(priors=(), **model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = {"name": "tensornet", "hidden_channels": 32, "num_layers": 2, "num_rbf": 8, "cutoff": 4.0}
        return Potential.from_config(
            {"model": {**config, **model}, "elements": [1, 6, 8], "priors": list(priors)}
        ).eval()


def with_images(atoms, reach):
    """Positions and identifiers of the atoms and of their images within reach of the cell."""
    n, cell = len(atoms), atoms.cell.array
    shifts = [s for s in np.ndindex(7, 7, 7) if s != (3, 3, 3)]
    images = np.concatenate([atoms.positions + (np.array(s) - 3) @ cell for s in shifts])
    owner = np.tile(np.arange(n), len(shifts))
    near = np.linalg.norm(images[:, None] - atoms.positions, axis=2).min(1, initial=np.inf) < reach
    return np.concatenate([atoms.positions, images[near]]), owner[near]


def evaluate(domain, atoms):
    pos, owner = with_images(atoms, domain.cutoff + 1)
    ids = np.concatenate([np.arange(len(atoms)), owner])
    exchange = CopyExchange(len(atoms), torch.from_numpy(owner))
    domain.set_atoms(atoms.numbers[ids], ids, len(atoms), exchange)
    return domain(pos)


@pytest.mark.parametrize("cell", [BOX, PRISM, THIN], ids=["orthorhombic", "triclinic", "thin"])
@pytest.mark.parametrize("priors", [(), PRIORS, [D3]], ids=["alone", "pairs", "d3"])
def test_compiled_domain_is_the_potential(cell, priors):
    potential = make(priors)
    atoms = scattered(13 if cell is not THIN else 9, cell, True, 1)
    domain = choose_domain(potential, 0.0)
    assert isinstance(domain, CompiledDomain)
    found = evaluate(domain, atoms)
    expected = copy.deepcopy(potential).double()(System.from_ase(atoms), stress=True)
    assert np.abs(found.forces - expected.forces.numpy()).max() <= 2e-5
    assert np.abs(found.energies - expected.atom_energies.numpy()).max() <= 2e-5
    stress = found.virial.sum(0)[[0, 3, 4, 3, 1, 5, 4, 5, 2]].reshape(3, 3) / atoms.cell.volume
    assert np.abs(stress - expected.stress[0].numpy()).max() <= 1e-6
    assert float(expected.forces.abs().max()) > 0.01


def test_positions_that_move_between_lists():
    """Edges are kept while atoms move by less than half of the skin."""
    potential, atoms = make(PRIORS), scattered(20, BOX, True, 1)
    compiled, reference = (kind(p, 0.0) for kind, p in ((CompiledDomain, potential), (ReferenceDomain, potential)))
    pos, owner = with_images(atoms, compiled.cutoff + 1)
    ids = np.concatenate([np.arange(20), owner])
    for domain in (compiled, reference):
        domain.set_atoms(atoms.numbers[ids], ids, 20, CopyExchange(20, torch.from_numpy(owner)))
    random = np.random.default_rng(0)
    for _ in range(4):
        step = random.normal(scale=0.08, size=(20, 3))
        pos = pos + np.concatenate([step, step[owner]])
        difference = compiled(pos).forces - reference(pos).forces
        assert np.abs(difference).max() <= 5e-5


def test_no_atoms_and_one():
    potential = make()
    for number in (0, 1):
        atoms = scattered(number, BOX, False, 2)
        found = evaluate(choose_domain(potential, 0.0), atoms)
        assert found.forces.shape == (number, 3) and not found.energies.any()


def test_a_wrong_kernel_is_found_on_the_first_use(monkeypatch):
    domain = choose_domain(make(), 0.0)
    net = domain._model.nets[0]
    predict = net.predict

    def wrong(buffers, *given):
        predict(buffers, *given)
        buffers.energy *= 1.01

    monkeypatch.setattr(net, "predict", wrong)
    with pytest.raises(RuntimeError, match="does not agree with the reference"):
        evaluate(domain, scattered(20, BOX, True, 1))


@pytest.mark.filterwarnings("error::torchmdnet2.errors.UndeterminedEnergyWarning")
def test_clusters_are_checked_whatever_their_composition(monkeypatch):
    """The kernels' first use is compared on a cluster of atoms, which may hold half a molecule."""
    reference, odd = domain_check.reference, []

    def counting(potential, cluster, stress):
        odd.append(int(cluster.z.sum()) % 2)
        return reference(potential, cluster, stress)

    monkeypatch.setattr(domain_check, "reference", counting)
    potential = make()
    potential.closed_shell, potential.determined = True, Determined([{1: 2, 8: 1}])
    for size in range(1, 7):
        monkeypatch.setattr(domain_check, "_CHECKED", size)
        evaluate(choose_domain(potential, 0.0), scattered(20, BOX, True, 1))
    assert 0 < sum(odd) < len(odd) == 6


def test_what_has_no_kernels_runs_by_autograd():
    assert "float64" in compiled_reason(make().double())
    assert "GraphNetwork" in compiled_reason(make(name="graph_network"))
    assert isinstance(choose_domain(make().double(), 0.0), ReferenceDomain)


def test_a_gpu_without_triton_runs_by_autograd(monkeypatch):
    monkeypatch.setattr("torchmdnet2.engine.backends.fused_reason", lambda potential: "")
    monkeypatch.setitem(sys.modules, "torchmdnet2.engine.fused_domain", None)
    assert isinstance(choose_domain(make(), 0.0), ReferenceDomain)
