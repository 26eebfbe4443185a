import math
import pickle

import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.data import ConcatDataset, InMemoryDataset, Sample, Subset, check_sample, collate
from torchmdnet2.errors import BadData

from .frames import METHANE, make_mixture, make_sample, same


def test_memory_gives_back_what_it_was_given():
    samples = make_mixture()
    data = InMemoryDataset(samples, [f"a.xyz, frame {k}" for k in range(len(samples))])
    assert len(data) == len(samples)
    for k, sample in enumerate(data):
        assert same(sample, samples[k])
        assert sample.labels.keys() == samples[k].labels.keys()  # absent, not NaN
        assert sample.system.pos.dtype == torch.float64
    assert data.name(3) == data.name(-3) == "a.xyz, frame 3"
    assert same(data[-1], samples[-1])
    with pytest.raises(IndexError, match="6 frames"):
        data[6]


def test_memory_is_not_changed_through_its_samples():
    data = InMemoryDataset([make_sample()])
    data[0].system.pos.zero_()
    data[0].labels["forces"].zero_()
    assert same(data[0], make_sample())
    assert data[0].system.pos.untyped_storage().nbytes() == 3 * 3 * 8  # a worker would send the whole storage


def test_every_sample_has_one_name():
    with pytest.raises(ValueError, match="there are 2 samples and 1 names"):
        InMemoryDataset([make_sample(), make_sample()], ["first"])


def test_memory_survives_pickling():
    data = InMemoryDataset(make_mixture())
    assert all(same(a, b) for a, b in zip(pickle.loads(pickle.dumps(data)), data, strict=True))


def test_subset_and_concatenation():
    samples = make_mixture()
    parts = ConcatDataset([InMemoryDataset(samples[:1], ["x"]), InMemoryDataset([]), InMemoryDataset(samples[1:])])
    assert len(parts) == 6
    assert all(same(a, b) for a, b in zip(parts, samples, strict=True))
    assert same(parts[-1], samples[-1])
    assert (parts.name(0), parts.name(1), parts.name(5)) == ("x", "frame 0", "frame 4")
    subset = Subset(parts, [4, 0])
    assert len(subset) == 2 and same(subset[0], samples[4]) and same(subset[1], samples[0])
    assert subset.name(1) == "x"
    with pytest.raises(IndexError):
        Subset(parts, [6])


def test_collate_fills_absent_labels_with_nan():
    samples = make_mixture()
    batch = collate(samples)
    sizes = [s.system.num_atoms for s in samples]
    assert batch.system.num_systems == 6
    assert batch.system.batch.tolist() == [b for b, n in enumerate(sizes) for _ in range(n)]
    assert batch.system.charge.tolist() == [0, -1, 0, 0, 0, 0] and batch.system.spin.tolist() == [0, 2, 0, 0, 0, 0]
    assert {k: tuple(v.shape) for k, v in batch.labels.items()} == {
        "energy": (6,),
        "forces": (24, 3),
        "stress": (6, 3, 3),
        "dipole": (6, 3),
        "charges": (24,),
    }
    assert torch.isnan(batch.labels["energy"]).tolist() == [False] * 5 + [True]
    known = ~torch.isnan(batch.labels["forces"]).any(1)
    assert known.tolist() == [True] * 3 + [False] * 3 + [True] * 15 + [False] * 3
    assert torch.equal(batch.labels["stress"][4], samples[4].labels["stress"][0])


def test_collate_leaves_out_labels_that_nobody_has():
    assert collate([make_sample(labels=("energy",)), make_sample(labels=())]).labels.keys() == {"energy"}
    with pytest.raises(ValueError, match="at least one"):
        collate([])


def test_collate_of_batches_is_collate_of_all():
    samples = make_mixture()
    nested = collate([collate(samples[:2]), collate(samples[2:])])
    flat = collate(samples)
    assert same(nested, flat) and torch.equal(nested.system.batch, flat.system.batch)


def test_energies_stay_in_float64():
    sample = make_sample(labels=("energy", "forces")).to("cpu", torch.float32)
    assert sample.labels["energy"].dtype == torch.float64
    assert torch.equal(sample.labels["energy"], make_sample().labels["energy"])
    assert sample.labels["forces"].dtype == sample.system.pos.dtype == torch.float32


# --- faults ----------------------------------------------------------------------------------------------------------


def broken(**changes) -> Sample:
    sample = make_sample(labels=())
    labels = changes.pop("labels", {})
    return Sample(sample.system.replace(**changes), labels)


NAN_POSITION = torch.tensor([[0.0, 0, 0], [0, math.nan, 0], [1, 1, 1]], dtype=torch.float64)
CELL = torch.eye(3, dtype=torch.float64)[None] * 5
FLAT = torch.tensor([[[5.0, 0, 0], [0, 5, 0], [5, 5, 0]]], dtype=torch.float64)
ASYMMETRIC = torch.tensor([[[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]]], dtype=torch.float64)

FAULTS = [
    (broken(pos=NAN_POSITION), "atom 1: its position is not finite"),
    (broken(z=torch.tensor([8, 0, 1])), "the atomic number of atom 1 is 0"),
    (broken(z=torch.tensor([8, 1, 119])), "the atomic number of atom 2 is 119"),
    (broken(charge=torch.tensor([0.5], dtype=torch.float64)), "charge must be a whole number, got 0.5"),
    (broken(charge=torch.tensor([math.nan], dtype=torch.float64)), "charge is not finite"),
    (broken(charge=torch.tensor([10_001.0]).double()), "charge must be a whole number up to 10,000, got 10001"),
    (broken(spin=torch.tensor([-1])), "spin multiplicity is negative"),
    (broken(pbc=torch.ones(1, 3, dtype=torch.bool)), "periodic along a lattice vector that is zero"),
    (broken(pbc=torch.ones(1, 3, dtype=torch.bool), cell=CELL / 51), "a lattice vector is shorter than 0.1 Å"),
    (broken(cell=CELL * math.nan), "its cell is not finite"),
    (broken(pbc=torch.ones(1, 3, dtype=torch.bool), cell=FLAT), "linearly dependent"),
    (broken(labels={"energy": torch.tensor([math.inf])}), "energy is infinite"),
    (broken(labels={"energy": torch.tensor(1.0)}), r"energy has the shape \(\)"),
    (broken(labels={"forces": torch.zeros(4, 3)}), r"forces has the shape \(4, 3\), but 3 atoms need \(3, 3\)"),
    (
        broken(labels={"forces": torch.tensor([[0, 0, 0], [0, 0, -math.inf], [0, 0, 0]])}),
        "forces of atom 1 is infinite",
    ),
    (broken(labels={"force": torch.zeros(3, 3)}), "unknown label 'force', did you mean 'forces'"),
    (broken(labels={"stress": torch.eye(3)[None]}), "the frame has a stress but no cell"),
    (broken(cell=CELL, labels={"stress": ASYMMETRIC}), "not symmetric"),
    (Sample(System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3))), "at least one atom"),
    (collate([make_sample(), make_sample(METHANE)]), "one structure"),
]


@pytest.mark.parametrize(("sample", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_faults_are_named(sample, message):
    with pytest.raises(BadData, match=r"^here: .*" + message):
        check_sample(sample, "here")
    with pytest.raises(BadData, match="frame 1: "):
        InMemoryDataset([make_sample(), sample])


def test_nan_labels_are_no_fault():
    forces = torch.full((3, 3), math.nan)
    check_sample(broken(labels={"forces": forces, "energy": torch.tensor([math.nan])}), "here")
    check_sample(broken(labels={"stress": torch.full((1, 3, 3), math.nan)}), "here")
