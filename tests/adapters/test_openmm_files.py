"""The OpenMM force: XML, pickles, and what it refuses (bars R11, R27)."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from ase import Atoms

openmm = pytest.importorskip("openmm")
from openmm_cases import KJ_MOL, boxed, context_of, ethanol, evaluate, ml_system, topology_of  # noqa: E402

from torchmdnet2 import System  # noqa: E402
from torchmdnet2.adapters.openmm import add_force, create_force  # noqa: E402
from torchmdnet2.checkpoint import save  # noqa: E402
from torchmdnet2.errors import BadCheckpoint, BadData, UnknownElement  # noqa: E402


@pytest.mark.parametrize("subset", [None, [0, 1, 2]])
def test_xml_round_trip_holds_no_weights(model_file, subset):
    atoms = boxed("triclinic")
    system = ml_system(model_file, atoms, subset, charge=1, dtype="float64")
    xml = openmm.XmlSerializer.serialize(system)
    # 2 hexadecimal digits per byte of the pickle
    assert len(xml) < 8000 < model_file.stat().st_size
    back = openmm.XmlSerializer.deserialize(xml)
    assert back.usesPeriodicBoundaryConditions()
    first, second = (evaluate(context_of(s, atoms)) for s in (system, back))
    assert first[0] == second[0] and np.array_equal(first[1], second[1])
    assert openmm.XmlSerializer.serialize(back) == xml


def test_pickle_is_plain_data(model_file):
    from torchmdnet2.adapters.model import open_model
    from torchmdnet2.adapters.openmm import TorchMDNet2Energy

    potential, source = open_model(model_file)
    options = {"numbers": (1, 8), "particles": None, "periodic": False, "charge": 0, "spin": 0}
    call = TorchMDNet2Energy(source, {**options, "device": "cpu", "dtype": "float64"}, potential)
    data = pickle.dumps(call)
    assert len(data) < 1000 and str(model_file).encode() in data and source.sha256.encode() in data
    assert b"torch\n" not in data and b"numpy" not in data and b"Potential" not in data


def test_xml_with_a_replaced_or_missing_file(potential, tmp_path):
    path = tmp_path / "model.tmn"
    save(potential, path)
    xml = openmm.XmlSerializer.serialize(ml_system(path, ethanol()))
    save(potential, path, metadata={"trained": "again"})
    with pytest.raises(openmm.OpenMMException, match=r"model\.tmn.*BadCheckpoint.*was replaced"):
        evaluate(context_of(openmm.XmlSerializer.deserialize(xml), ethanol()))
    path.unlink()
    with pytest.raises(openmm.OpenMMException, match="no such model file"):
        evaluate(context_of(openmm.XmlSerializer.deserialize(xml), ethanol()))


def test_model_in_memory(potential):
    system = ml_system(potential, ethanol())
    expected = float(potential(System.from_ase(ethanol())).energy.detach()) * KJ_MOL
    assert evaluate(context_of(system, ethanol()))[0] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(openmm.OpenMMException, match="serialize"):
        openmm.XmlSerializer.serialize(system)


def test_bad_input(model_file, tmp_path):
    with pytest.raises(UnknownElement, match=r"atom 9 is Ar.*H, C, O"):
        ml_system(model_file, ethanol() + Atoms("Ar"))
    for subset, words in ([[0, 99], "99"], [[1, 1], "twice"], [[], "no atoms"], [[-1], "-1"]):
        with pytest.raises(BadData, match=words):
            ml_system(model_file, ethanol(), subset)
    topology = topology_of(ethanol())
    topology.addAtom("EP", None, next(topology.residues()))
    with pytest.raises(BadData, match=r"atom 9 \(EP\) has no element"):
        create_force(model_file, topology)
    create_force(model_file, topology, range(9))
    for particles, subset in ((3, None), (3, [0, 1]), (10, None)):
        system = openmm.System()
        for _ in range(particles):
            system.addParticle(1.0)
        with pytest.raises(BadData, match=f"the System has {particles} particles, but the topology 9 atoms"):
            add_force(system, model_file, topology_of(ethanol()), subset)
    with pytest.raises(FileNotFoundError):
        create_force(tmp_path / "none.tmn", topology_of(ethanol()))
    (tmp_path / "junk.tmn").write_bytes(b"junk")
    with pytest.raises(BadCheckpoint):
        create_force(tmp_path / "junk.tmn", topology_of(ethanol()))


@pytest.mark.parametrize("subset, particle", [(None, 4), ([8, 4, 0], 4)])
def test_positions_that_are_not_finite(model_file, subset, particle):
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms, subset), atoms)
    atoms.positions[particle, 2] = np.nan
    context.setPositions(atoms.positions / 10)
    with pytest.raises(openmm.OpenMMException, match=f"tiny.tmn.*particle {particle} .*not finite"):
        evaluate(context)


@pytest.mark.parametrize("subset, particle", [(None, "0 .C."), ([8, 4, 0], "8 .H.")])
def test_results_that_are_not_finite(potential, subset, particle):
    broken = copy.deepcopy(potential)
    broken.energy_scale = float("inf")
    with pytest.raises(openmm.OpenMMException, match=f"is not finite at particle {particle}"):
        evaluate(context_of(ml_system(broken, ethanol(), subset), ethanol()))
