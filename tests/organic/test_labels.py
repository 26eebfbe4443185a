"""scripts/organic/label.py: dynamics, and labels by a teacher that is a formula."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from organic_world import KEYS, OPTIONS, molecules, springs

from torchmdnet2.data import open_dataset
from torchmdnet2.data.labels import GROUP


def test_labels_are_those_of_the_teacher(scripts, tmp_path):
    """What training reads is what the teacher says of those positions; the first frame is the geometry itself."""
    shards, label, teacher = scripts("shards"), scripts("label"), springs(scripts)
    given = molecules(scripts)
    shards.write_shard(tmp_path / "train-x-0000.npz", given[:3])
    shards.write_shard(tmp_path / "train-y-0000.npz", given[3:])
    shards.write_shard(tmp_path / "test-x-0000.npz", given[:1])
    jobs = label.jobs_of(tmp_path, 1, 0)  # one structure of 32 atoms, four of up to 8
    assert jobs[0].name == "test-003-0000"  # first
    assert {job.name: len(job.geometries) for job in jobs[1:]} == {
        "train-002-0000": 1,
        "train-003-0000": 3,
        "train-003-0001": 3,
    }
    targets = [tmp_path / f"{name}.h5" for name in ("train-002-0000", "train-003-0000", "train-003-0001")]
    for target in targets:
        (job,) = (job for job in jobs if job.name == target.stem)
        assert label.label_job(job, target, label.Sampler(teacher, None, OPTIONS)) == 3 * len(job.geometries)
    data = open_dataset(targets, keys=KEYS)
    assert len(data) == 21 and [float(data[k].system.charge) for k in (0, 20)] == [-1, 0]
    kinds = [data.name(k).split("'")[1] for k in range(21)]
    assert (kinds.count("x"), kinds.count("y")) == (9, 12)
    for sample in (data[k] for k in range(21)):
        system = sample.system
        found = teacher.label(system.z[None], system.pos[None], system.charge)
        assert abs(float(sample.labels["energy"] - found.energy)) < 1e-5
        assert float((sample.labels["forces"] - found.forces[0]).abs().max()) < 1e-5
        assert abs(float(sample.labels["charges"].sum() - system.charge)) < 1e-6
    first = next(shards.read_shard(tmp_path / "train-x-0000.npz")).positions
    whole = [data[k].system.pos.numpy() for k in range(21) if data[k].system.num_atoms == 3]
    assert len(whole) == 18 and any(np.abs(positions - first).max() < 1e-5 for positions in whole)
    numbers = open_dataset(targets, keys={**KEYS, GROUP: "group"})
    groups = [float(numbers[k].labels[GROUP]) for k in range(21)]
    assert len(set(groups)) == 7 and all(groups.count(group) == 3 for group in groups)  # a geometry and its frames
    again = tmp_path / "again.h5"
    label.label_job(next(job for job in jobs if job.name == targets[0].stem), again, sampler_of(label, teacher))
    other = open_dataset(again, keys=KEYS)
    assert all(torch.equal(data[k].system.pos, other[k].system.pos) for k in range(3))


def sampler_of(label, teacher):
    return label.Sampler(teacher, None, OPTIONS)


def test_groups_are_of_one_molecule_and_kind(scripts):
    label, (water, *_, ion) = scripts("label"), molecules(scripts)
    rows = [(water, "conformers")] * 6 + [(water, "strained"), (ion, "conformers"), (water, "turned")]
    found = list(label.groups_of(rows))
    assert len(set(found[:5])) == 1 and found[5] != found[0]  # at most five geometries
    assert found[8] == found[5]  # conformers, too
    assert len({found[0], found[5], found[6], found[7]}) == 4


def test_dynamics_has_the_temperatures(scripts):
    """Springs of 300 K have kT/2 for each of their modes, within the error of the mean."""
    label, shards = scripts("label"), scripts("shards")
    pair = shards.Geometry("HH", np.array([1, 1]), np.array([[0.0, 0, 0], [1.0, 0, 0]]), 0)
    options = argparse.Namespace(**{**vars(OPTIONS), "frames": 6, "every": 100, "batch": 4000})
    sampler = label.Sampler(springs(scripts), None, options)
    frames = list(sampler.frames([pair] * 2000, (300.0,), 1))[2:]
    energies = torch.cat([labels.energy for _, labels, _ in frames])
    kT = 300 * label.BOLTZMANN
    assert abs(float(energies.mean()) / (kT / 2) - 1) < 0.06, float(energies.mean())


def test_what_is_left_out(scripts, tmp_path):
    """Frames with huge forces or with two atoms at one place are counted and left out; the others are not touched."""
    shards, label, teacher = scripts("shards"), scripts("label"), springs(scripts)
    given = molecules(scripts)
    wild = given[0]._replace(positions=given[0].positions * 20)
    near = given[0]._replace(positions=given[0].positions * [1, 0.1, 0.1])
    for name, geometries in (("with", [given[1], wild, near]), ("alone", [given[1]])):
        shards.write_shard(tmp_path / f"{name}.npz", geometries)
        sampler = label.Sampler(teacher, None, argparse.Namespace(**{**vars(OPTIONS), "frames": 0}))
        geometries = list(shards.read_shard(tmp_path / f"{name}.npz"))
        job = label.Job(name, geometries, ["x"] * len(geometries))
        assert label.label_job(job, tmp_path / f"{name}.h5", sampler) == 1
        assert all(sampler.left_out[reason] == (name == "with") for reason in ("large forces", "atoms at one place"))


@pytest.mark.parametrize("subset", ["train", "test"])
def test_a_student_drives_training_frames(scripts, tmp_path, subset):
    """Where it drives: larger steps, frames where it is most wrong, and a structure that runs away is stopped."""
    label, teacher, given = scripts("label"), springs(scripts), molecules(scripts)[:6]

    class Student:
        description, sha256, calls = "student", "0", 0

        def forces(self, numbers, positions, charge):
            self.calls += 1
            forces = teacher.forces(numbers, positions, charge)
            forces[:3] *= 1.5
            forces[5] = float("nan")
            return forces

    student = Student()
    options = argparse.Namespace(**{**vars(OPTIONS), "frames": 4, "every": 4, "timestep": 1.0})
    sampler = label.Sampler(teacher, student, options)
    job = label.Job(f"{subset}-003-0000", given, ["x"] * 6)
    count = label.label_job(job, tmp_path / "a.h5", sampler)
    if subset == "test":  # by the teacher, at most three frames, whatever the seed
        assert student.calls == 0 and count == 6 * (1 + label.HELD_OUT_FRAMES)
        options.seed = 5
        label.label_job(job, tmp_path / "b.h5", sampler)
        one, other = (open_dataset(tmp_path / f"{name}.h5", keys=KEYS) for name in "ab")
        assert all(torch.equal(one[k].system.pos, other[k].system.pos) for k in range(count))
    else:
        assert student.calls == 1 + 4 * 2 and sampler.left_out["ran away"] == 4
        assert count == 6 + 4 * 3 and sampler.left_out["student is right"] == 4 * 2
        options.student_every = 8
        student.calls = 0
        label.label_job(job, tmp_path / "b.h5", sampler)
        assert student.calls == 1 + 4 * 4


@pytest.mark.parametrize("subset", ["train", "test"])
def test_a_larger_spread_is_for_training_only(scripts, tmp_path, subset):
    label, teacher = scripts("label"), springs(scripts)
    certain = teacher.label
    teacher.label = lambda *given: certain(*given)._replace(spread=torch.full((len(given[0]),), 2.0))
    options = argparse.Namespace(**{**vars(OPTIONS), "largest_spread": 3.0})
    sampler = label.Sampler(teacher, None, options)
    job = label.Job(f"{subset}-003-0000", molecules(scripts)[:6], ["x"] * 6)
    count = label.label_job(job, tmp_path / "a.h5", sampler)
    assert (count, sampler.left_out["teacher is uncertain"]) == ((18, 0) if subset == "train" else (0, 18))


def test_kinds_that_come_first(scripts, tmp_path):
    """They are in the first jobs of training, filled up with others of their size; nothing is lost or doubled."""
    shards, label = scripts("shards"), scripts("label")
    given = molecules(scripts)
    shards.write_shard(tmp_path / "train-x-0000.npz", [*given[:6] * 8, *given[6:] * 8])
    shards.write_shard(tmp_path / "train-y-0000.npz", given[:5])
    shards.write_shard(tmp_path / "test-y-0000.npz", given[:1])
    jobs = label.jobs_of(tmp_path, 1, 0, ["y"])  # four to a job
    assert jobs[0].name.startswith("test")
    assert [job.kinds.count("y") for job in jobs[1:3]] in ([4, 1], [1, 4], [3, 2], [2, 3])
    assert all(len(job.kinds) in (3, 4) for job in jobs[1:]) and not any("y" in job.kinds for job in jobs[3:])
    names = [g.name for job in jobs for g in job.geometries]
    assert len(names) == len(set(names)) == 48 + 8 + 5 + 1
    without = label.jobs_of(tmp_path, 1, 0)
    assert any("y" in job.kinds for job in without[3:])  # otherwise this shows nothing
    assert [g.name for g in without[0].geometries] == [g.name for g in jobs[0].geometries]


@pytest.mark.parametrize("limit", [("--minutes", 0), ("--most-frames", 2)])
def test_labels_end_after_the_first_file(scripts, monkeypatch, tmp_path, limit):
    """Compiling kernels may take longer than all of the time: one file is made in any case, and then no other."""
    shards, label, teacher = scripts("shards"), scripts("label"), springs(scripts)
    teacher.sha256 = "0"
    shards.write_shard(tmp_path / "train-x-0000.npz", molecules(scripts))
    monkeypatch.setattr(label, "AIMNet2", lambda file, device: teacher)
    words = ["label.py", tmp_path, tmp_path / "labels", "--aimnet2", "t.jpt", "--batch", 1, "--frames", 1, "--every", 1]
    monkeypatch.setattr("sys.argv", [str(word) for word in [*words, *limit]])
    label.main()
    assert len(list((tmp_path / "labels").glob("*.h5"))) == 1
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    label.main()
    assert len(list((tmp_path / "labels").glob("*.h5"))) == 3


def test_gfn2_agrees_with_ase(scripts):
    pytest.importorskip("tblite")
    from ase import Atoms
    from tblite.ase import TBLite

    geometry = molecules(scripts)[-1]
    found = (
        scripts("teachers")
        .GFN2()
        .label(torch.as_tensor(geometry.numbers)[None], torch.as_tensor(geometry.positions)[None], torch.tensor([-1.0]))
    )
    atoms = Atoms(geometry.numbers, geometry.positions, calculator=TBLite(method="GFN2-xTB", verbosity=0, charge=-1))
    assert abs(float(found.energy) - atoms.get_potential_energy()) < 1e-5
    assert np.abs(found.forces[0].numpy() - atoms.get_forces()).max() < 1e-5
