"""D2 against its formula written out, D3 against tad-dftd3, and the shipped checks."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec

import pytest
import torch
from ase.build import bulk, molecule

from torchmdnet2 import Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import MissingBackend
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.priors import D2, D3
from torchmdnet2.testing import check_prior, example_systems
from torchmdnet2.units import BOHR, HARTREE

SYSTEMS = example_systems((1, 6, 8), 5.0)
PBE0 = {"s8": 1.2177, "a1": 0.4145, "a2": 4.8593}
# C6 in J nm⁶/mol and R0 in Å from the paper, for the elements tested here
PAPER = {1: (0.14, 1.001), 6: (1.75, 1.452), 8: (0.70, 1.342), 14: (9.23, 1.716), 18: (4.61, 1.595), 54: (29.99, 1.881)}


def energy(prior, system: System) -> float:
    prior.check(system)
    return float(prior(system, pair_list(system, prior.cutoff)).sum())


def d2_by_hand(system: System, s6: float) -> float:
    """Grimme 2006, Eqs. 11–13, in J/mol and nm, then in eV (1 eV = 96485.33212 J/mol)."""
    total = 0.0
    for i in range(system.num_atoms):
        for j in range(i):
            (c_i, r_i), (c_j, r_j) = PAPER[int(system.z[i])], PAPER[int(system.z[j])]
            d = math.dist(system.pos[i].tolist(), system.pos[j].tolist())
            total -= s6 * math.sqrt(c_i * c_j) / (d / 10) ** 6 / (1 + math.exp(-20 * (d / (r_i + r_j) - 1)))
    return total / 96485.33212


@pytest.mark.parametrize("numbers", [[6, 8, 1, 1], [14, 18, 54, 1]])
def test_d2_against_the_formula(numbers):
    pos = torch.tensor([[0.0, 0, 0], [3.1, 0.2, 0], [0.4, 3.9, 0.1], [1.0, 1.0, 4.2]], dtype=torch.float64)
    system = System(z=torch.tensor(numbers), pos=pos)
    assert energy(D2(s6=0.75), system) == pytest.approx(d2_by_hand(system, 0.75), rel=1e-9)


def test_w8_d2_honours_the_cell():
    """W8: two argon atoms across the boundary of a cell attract each other as they do inside."""
    cell = 30 * torch.eye(3, dtype=torch.float64)
    pos = torch.tensor([[0.0, 0, 0], [26.2, 0, 0]], dtype=torch.float64)
    z = torch.tensor([18, 18])
    inside = energy(D2(), System(z=z, pos=torch.tensor([[0.0, 0, 0], [3.8, 0, 0]], dtype=torch.float64)))
    assert energy(D2(), System(z=z, pos=pos, cell=cell)) == pytest.approx(inside, rel=1e-10)
    assert energy(D2(), System(z=z, pos=pos)) == 0


@pytest.mark.parametrize("prior", [D2(cutoff=6.0), D3([1, 6, 8], **PBE0, cutoff=6.0)], ids=["D2", "D3"])
@pytest.mark.parametrize("names", [("molecule", "triclinic cell"), ("tiny cell", "slab")])
def test_conformance(prior, names):
    check_prior(prior, [SYSTEMS[name] for name in names])


@pytest.mark.parametrize("name", ["CH3CH2OH", "C6H6", "SiH4", "CH3SH", "bicyclobutane", "ClF3", "LiF"])
def test_d3_against_tad_dftd3(name):
    """Energy to 1e-9 relative, forces to 1e-9 eV/Å."""
    oracle = pytest.importorskip("tad_dftd3")
    atoms = molecule(name)
    z, pos = torch.tensor(atoms.numbers), torch.tensor(atoms.positions, requires_grad=True)
    parameters = {k: torch.tensor(v, dtype=torch.float64) for k, v in {"s6": 1.0, "s9": 0.0, **PBE0}.items()}
    theirs = oracle.dftd3(z, pos / BOHR, parameters).sum() * HARTREE
    system = System(z=z, pos=pos)
    prior = D3(sorted(set(z.tolist())), **PBE0)
    ours = prior(system, pair_list(system, prior.cutoff)).sum()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-9)
    f_theirs, f_ours = (torch.autograd.grad(e, pos)[0] for e in (theirs, ours))
    assert float((f_theirs - f_ours).abs().max()) <= 1e-9


def test_d3_of_a_crystal_is_that_of_a_piece_around_an_atom():
    """Periodic argon: the atom's energy equals half its interactions in a cluster cut out of the crystal."""
    pytest.importorskip("tad_dftd3")
    crystal = bulk("Ar", "fcc", a=5.3)
    prior = D3([18], **PBE0, cutoff=9.0, switch_width=1.0)
    periodic = energy(prior, System.from_ase(crystal))
    # coordination of the neighbors needs a second shell of the cutoff's width
    cluster = crystal * (11, 11, 11)
    centre = 5 * 121 + 5 * 11 + 5
    cluster.set_pbc(False)
    cluster.set_cell(None)
    middle = cluster.positions[centre]
    keep = ((cluster.positions - middle) ** 2).sum(1) < 18.5**2
    index = int(keep[:centre].sum())
    system = System.from_ase(cluster[keep])
    atoms = prior(system, pair_list(system, prior.cutoff))
    assert float(atoms[index]) == pytest.approx(periodic, rel=1e-9)


def without_tad_dftd3(monkeypatch):
    for name in ("tad_dftd3", "tad_dftd3.data", "tad_dftd3.reference"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_model_file_carries_the_reference_values(tmp_path, monkeypatch):
    """Saved with tad-dftd3, loaded without; a new prior of its elements takes them from there."""
    pytest.importorskip("tad_dftd3")
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_rbf": 4, "max_z": 30},
        "priors": [{"name": "d3", "elements": [1, 6, 8, 29], **PBE0}, {"name": "d2", "cutoff": 8.0}],
        "elements": [1, 6, 8],
    }
    potential = Potential.from_config(config).double()
    save(potential, tmp_path / "model.tmn")
    without_tad_dftd3(monkeypatch)
    again = load(tmp_path / "model.tmn")
    assert torch.equal(again(SYSTEMS["molecule"]).energy, potential(SYSTEMS["molecule"]).energy)
    new = D3([8, 29, 1], **PBE0)
    with pytest.raises(MissingBackend, match=r"values of Cu: pip install 'torchmdnet2\[d3\]'"):
        energy(new, SYSTEMS["molecule"])
    new.adopt_values(again.priors[1])
    with pytest.raises(MissingBackend):
        new.require_values()
    new.adopt_values(again.priors[0])
    molecule = SYSTEMS["molecule"]
    assert energy(new, molecule.replace(z=molecule.z.clone().fill_(29))) < 0


def test_values_of_the_shipped_elements_need_no_package(monkeypatch):
    """Those of `organic`, in any order, are exactly the package's own."""
    elements = [53, 1, 8, 6, 16]
    with_package = D3([*elements, 18], **PBE0) if find_spec("tad_dftd3") else None  # argon: from the package
    without_tad_dftd3(monkeypatch)
    prior = D3(elements, **PBE0)
    prior.require_values()
    if with_package is not None:
        kept = [with_package.elements.index(z) for z in prior.elements]
        assert torch.equal(with_package.c6[kept][:, kept], prior.c6)
        for name in ("coordination", "radii", "moments"):
            assert torch.equal(getattr(with_package, name)[kept], getattr(prior, name))


def test_errors():
    heavy = System(z=torch.tensor([79, 79]), pos=torch.tensor([[0.0, 0, 0], [3, 0, 0]]))
    with pytest.raises(ValueError, match="xenon"):
        energy(D2(), heavy)
    with pytest.raises(ValueError, match="switch_width"):
        D2(cutoff=3.0, switch_width=4.0)
    with pytest.raises(ValueError, match="switch_width must be between 0 and the cutoff"):
        D3([1], **PBE0, cutoff=3.0, switch_width=3.0)
    with pytest.raises(ValueError, match="variant must be 'published' or 'aimnet2', got 'd4'"):
        D3([1], **PBE0, variant="d4")
    with pytest.raises(ValueError, match="103"):
        D3([0], **PBE0)
    with pytest.raises(ValueError, match="Z = 79"):
        energy(D3([1], **PBE0), heavy)
