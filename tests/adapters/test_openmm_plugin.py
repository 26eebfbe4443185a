"""The compiled plugin for OpenMM on the Reference platform: the same numbers, errors and life as without it (R27)."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import os
import pwd
import re
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

openmm = pytest.importorskip("openmm")

from ase.build import molecule  # noqa: E402
from openmm_cases import KJ_MOL, boxed, context_of, ethanol, evaluate, ml_system, system_of, topology_of  # noqa: E402
from test_openmm import (  # noqa: E402, F401
    test_box_changes_are_seen,
    test_constant_energy,
    test_equals_potential_and_ase,
    test_float32_network,
    test_forces_are_the_gradient_of_the_energy,
    test_minimiser,
    test_subset,
)
from test_openmm_files import (  # noqa: E402, F401
    test_positions_that_are_not_finite,
    test_results_that_are_not_finite,
    test_xml_round_trip_holds_no_weights,
    test_xml_with_a_replaced_or_missing_file,
)

from torchmdnet2 import System  # noqa: E402
from torchmdnet2.adapters import openmm_plugin as adapter  # noqa: E402
from torchmdnet2.adapters.openmm import TorchMDNet2Energy, create_force  # noqa: E402
from torchmdnet2.errors import MissingBackend  # noqa: E402

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not sys.platform.startswith("linux"), reason="needs g++ on Linux"
)


create = adapter.DirectCalls


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return adapter.build_plugin(tmp_path_factory.mktemp("plugin") / "plugin.so")


@pytest.fixture
def none_accepted():
    """For tests in which the plugin serves no Context."""


@pytest.fixture(autouse=True)
def plugin(request, built, monkeypatch):
    """Contexts on the host's platforms use the plugin during a test, unless it disconnects it."""
    accepted = []

    def counted(force, call):
        accepted.append(call.particles)
        return create(force, call)

    monkeypatch.setattr(adapter, "DirectCalls", counted)
    monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", str(built))
    for platform in ("Reference", "CPU"):
        adapter.use_plugin(platform)
    yield
    gc.collect()  # contexts in the tracebacks of expected errors
    assert not adapter._DIRECT, "a deleted Context left something"
    disconnect()
    assert bool(accepted) != ("none_accepted" in request.fixturenames), f"{len(accepted)} Contexts used the plugin"


def disconnect():
    adapter._LOADED[-1].torchmdnet2_connect(None, None, None)
    adapter._LOADED.clear()


def direct() -> int:
    """Number of living Contexts that were evaluated through the plugin."""
    gc.collect()
    return len(adapter._DIRECT)


def trajectory(system, atoms, integrator=None, steps=50):
    """Positions, velocities and energies every ten steps, and the last box."""
    context = context_of(system, atoms)
    if integrator is not None:
        context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
        context.setPositions(atoms.positions / 10)
    context.setVelocitiesToTemperature(300, 1)
    found = []
    for _ in range(steps // 10):
        context.getIntegrator().step(10)
        state = context.getState(getPositions=True, getVelocities=True, getEnergy=True)
        found += [state.getPositions(asNumpy=True)._value, state.getVelocities(asNumpy=True)._value]
        found += [state.getPotentialEnergy()._value, state.getPeriodicBoxVectors(asNumpy=True)._value]
    return found, context


CASES = {
    "vacuum": lambda model: (ml_system(model, ethanol()), ethanol(), None),
    "part": lambda model: (ml_system(model, ethanol(), [8, 2, 0, 1]), ethanol(), None),
    "box": lambda model: (ml_system(model, boxed("triclinic")), boxed("triclinic"), None),
    "barostat": lambda model: (with_barostat(ml_system(model, wide())), wide(), None),
    "groups": lambda model: (in_groups(model), ethanol(), openmm.MTSIntegrator(1e-3, [(1, 1), (0, 4)])),
}


def wide():
    atoms = ethanol()
    atoms.set_cell([8.0, 8.0, 8.0])
    atoms.pbc = True
    return atoms


def with_barostat(system):
    barostat = openmm.MonteCarloBarostat(1e3, 300, 1)
    barostat.setRandomNumberSeed(1)
    system.addForce(barostat)
    return system


def in_groups(model):
    system = ml_system(model, ethanol())
    system.getForce(0).setForceGroup(1)
    bonds = openmm.HarmonicBondForce()
    bonds.addBond(0, 1, 0.15, 1000.0)
    system.addForce(bonds)
    return system


@pytest.mark.parametrize("case", CASES)
def test_dynamics(model_file, case):
    """A run is the one without the plugin, and the forces are evaluated on addresses."""
    runs = []
    for used in (True, False):
        if not used:
            disconnect()
        run, context = trajectory(*CASES[case](model_file))
        assert direct() == used
        runs.append(run)
        del context
    adapter.use_plugin("Reference")
    for found, expected in zip(*runs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    if case == "barostat":
        assert abs(runs[0][-1][0, 0] - 0.8) > 1e-3, "the box did not change, which this test needs"


def test_the_callable_is_called_no_more(model_file, monkeypatch):
    monkeypatch.setattr(TorchMDNet2Energy, "__call__", None)
    passed, original = [], create._evaluate_on_host
    monkeypatch.setattr(create, "_evaluate_on_host", lambda calls: passed.append(original(calls)))
    context = context_of(ml_system(model_file, ethanol()), ethanol())
    context.getIntegrator().step(5)
    assert len(passed) == 1, "only the first evaluation passes through the host"


def test_other_python_forces_are_left_alone(none_accepted):
    system = openmm.System()
    system.addParticle(1.0)
    system.addForce(openmm.PythonForce(lambda state: (2.0, np.array([[1.0, 2.0, 3.0]]))))
    context = openmm.Context(system, openmm.VerletIntegrator(1e-3), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions([[0, 0, 0]])
    energy, forces = evaluate(context)
    assert energy == 2 and forces.tolist() == [[1, 2, 3]] and direct() == 0


def test_contexts_and_copies(potential, model_file):
    """Contexts of one System, of a copy, and one whose force was removed, in turn."""
    system, atoms = ml_system(model_file, ethanol()), ethanol()
    copied, empty = copy.deepcopy(system), copy.deepcopy(system)
    empty.removeForce(0)
    contexts = [context_of(s, atoms) for s in (system, system, copied, empty)]
    del system
    assert direct() == 0
    for seed in range(3):
        frames = [ethanol() for _ in contexts]
        for k, (context, frame) in enumerate(zip(contexts, frames, strict=True)):
            frame.rattle(0.05, seed=10 * seed + k)
            context.setPositions(frame.positions / 10)
        for context, frame in list(zip(contexts, frames, strict=True))[:3]:
            energy, forces = evaluate(context)
            expected = potential(System.from_ase(frame))
            assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, abs=1e-8)
            np.testing.assert_allclose(forces, expected.forces.numpy() * KJ_MOL * 10, atol=1e-7)
        assert evaluate(contexts[3])[0] == 0
        assert direct() == 3
    del contexts, context
    assert direct() == 0


def test_eight_threads(potential):
    """R29: Contexts of one System give what they give one after another."""
    frames = [ethanol() for _ in range(8)]
    for k, atoms in enumerate(frames):
        atoms.rattle(0.05, seed=k)
    system = ml_system(potential, frames[0])
    expected = [evaluate(context_of(system, atoms)) for atoms in frames]
    contexts = [context_of(system, atoms) for atoms in frames]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for (energy, forces), found in zip(expected, pool.map(evaluate, contexts), strict=True):
                assert found[0] == pytest.approx(energy, abs=1e-8)
                np.testing.assert_allclose(found[1], forces, atol=1e-7)


def test_buffers_are_freed_with_the_context(model_file):
    """At once, without a search for circles of references: they are on the GPU."""
    gc.disable()
    try:
        context = context_of(ml_system(model_file, ethanol()), ethanol())
        evaluate(context)
        (calls,) = map(weakref.ref, adapter._DIRECT.values())
        del context
        assert calls() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [True, False])
def test_a_context_whose_creation_fails_leaves_nothing(none_accepted, model_file, first):
    """Whether the model's force comes before the one that fails, or after it; also the model is freed."""
    gc.collect()
    before = set(adapter._OFFERED)
    system = ml_system(model_file, ethanol()) if first else system_of(ethanol())
    system.addForce(openmm.NonbondedForce())  # without the particles of the System
    if not first:
        system.addForce(create_force(model_file, topology_of(ethanol())))
    with pytest.raises(openmm.OpenMMException, match="exactly as many particles"):
        context_of(system, ethanol())
    assert direct() == 0 and len(set(adapter._OFFERED) - before) == 1
    del system
    gc.collect()
    assert not set(adapter._OFFERED) - before


def test_a_context_that_cannot_start(none_accepted, model_file, monkeypatch):
    """The reason is in the error, and the next evaluation tries again."""
    context = context_of(ml_system(model_file, ethanol()), ethanol())
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "DirectCalls", lambda force, call: (_ for _ in ()).throw(MemoryError("it is full")))
        for _ in range(2):
            with pytest.raises(openmm.OpenMMException, match=r"torchmdnet2 \(.*tiny.tmn\): MemoryError: it is full"):
                evaluate(context)
    assert direct() == 0
    monkeypatch.setattr(adapter, "DirectCalls", create)
    assert np.isfinite(evaluate(context)[0]) and direct() == 1


def test_errors_name_the_particle_and_the_run_goes_on(model_file):
    """After the first evaluation, which checks everything."""
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms)
    before = evaluate(context)
    for _ in range(2):
        broken = ethanol()
        broken.positions[5, 1] = np.inf
        context.setPositions(broken.positions / 10)
        with pytest.raises(openmm.OpenMMException, match=r"torchmdnet2 .*tiny.tmn.*: ValueError: .*particle 5 \(H\)"):
            evaluate(context)
        broken.positions[5] = broken.positions[4]
        context.setPositions(broken.positions / 10)
        with pytest.raises(openmm.OpenMMException, match=r"atom 4 and atom 5 are at the same place"):
            evaluate(context)
        context.setPositions(atoms.positions / 10)
        after = evaluate(context)
        assert after[0] == pytest.approx(before[0], abs=1e-9)
        np.testing.assert_allclose(after[1], before[1], atol=1e-8)


def test_energy_alone(potential, model_file):
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms)
    for seed in range(3):
        context.setPositions(atoms.positions / 10)
        expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
        assert context.getState(getEnergy=True).getPotentialEnergy()._value == pytest.approx(expected, abs=1e-8)
        atoms.rattle(0.05, seed=seed)


def test_a_step_without_room_for_its_edges_is_repeated(model_file, monkeypatch):
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms)
    expected = evaluate(context)
    (calls,) = adapter._DIRECT.values()
    good, replays, replay = iter([False, False, True]), [], calls._bound.replay
    monkeypatch.setattr(calls._bound, "check", lambda: next(good))
    monkeypatch.setattr(calls._bound, "replay", lambda: replays.append(replay()))
    context.setPositions(atoms.positions / 10)
    energy, forces = evaluate(context)
    assert len(replays) == 3 and energy == pytest.approx(expected[0], abs=1e-9)
    np.testing.assert_allclose(forces, expected[1], atol=1e-8)


def test_refusals_are_stated_and_nothing_is_lost(none_accepted, potential, model_file, caplog):
    """OpenMM's own kernel serves what the plugin does not."""
    caplog.set_level(logging.WARNING, "torchmdnet2.openmm")
    atoms = boxed("orthorhombic")
    outside = ml_system(model_file, atoms, periodic=False)
    outside.addForce(openmm.HarmonicBondForce())
    outside.getForce(1).setUsesPeriodicBoundaryConditions(True)
    context = context_of(outside, atoms)
    assert "pass through the host: the System has a box that the force does not use" in caplog.text
    atoms.pbc = False
    expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
    assert evaluate(context)[0] == pytest.approx(expected, rel=1e-9)
    alone = molecule("H2O", cell=[9.0, 9.0, 9.0], pbc=True)
    assert evaluate(context_of(ml_system(model_file, alone, isolated=True), alone))[1].any()
    assert "this platform does not make molecules whole" in caplog.text
    fewer = ml_system(model_file, ethanol())
    fewer.getForce(0).setParticles([0, 1])
    with pytest.raises(openmm.OpenMMException):
        evaluate(context_of(fewer, ethanol()))
    assert "does not have the particles of the model" in caplog.text
    assert direct() == 0


def test_a_call_has_the_layout_of_the_plugin(none_accepted):
    """Names and types, in the sequence of the source."""
    source = adapter._CPP.read_text()
    body = re.sub(r"//.*", "", source[source.index("struct Call {") + 13 : source.index("typedef int (*Begin)")])
    found = []
    for declared in body.split("};")[0].split(";"):
        kind, _, names = declared.strip().replace("const ", "").replace("(*evaluate)()", "evaluate").partition(" ")
        kind = "void*" if "evaluate" in names else kind
        found += [(re.sub("([A-Z])", r"_\1", name.strip()).lower(), kind) for name in names.split(",") if name]
    types = {"void*": ctypes.c_void_p, "char*": ctypes.c_char_p, "int": ctypes.c_int, "double": ctypes.c_double}
    expected = [(name, types[kind]) for name, kind in found if name != "box[9]"]
    fields = list(adapter._Call._fields_)
    assert fields.pop([name for name, _ in found].index("box[9]")) == ("box", ctypes.c_double * 9)
    assert fields == expected


def test_python_may_end_before_a_context(none_accepted, built, model_file):
    """A Context that lives in a module outlives what the plugin calls."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from openmm_cases import *
from torchmdnet2.adapters import openmm_plugin as adapter
adapter.use_plugin("Reference")
context = context_of(ml_system({str(model_file)!r}, ethanol()), ethanol())
context.getIntegrator().step(3)
assert adapter._DIRECT
import builtins
builtins.kept = context
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_builds_that_fail(none_accepted, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingBackend, match="no compiler no-such-compiler: install g"):
        adapter.build_plugin(tmp_path / "plugin.so")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(openmm.version, "openmm_library_path", str(tmp_path / "lib"))
    with pytest.raises(MissingBackend, match="OpenMM's headers are not in"):
        adapter.build_plugin(tmp_path / "plugin.so")
    monkeypatch.undo()
    monkeypatch.setattr(adapter, "_CPP", tmp_path / "wrong.cpp")
    (tmp_path / "wrong.cpp").write_text("this is no program")
    with pytest.raises(RuntimeError, match=r"cannot be compiled: g(.|\n)*error"):
        adapter.build_plugin(tmp_path / "plugin.so")
    assert not (tmp_path / "plugin.so").exists()
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"wrong.cpp/plugin.so cannot be written \(.*\): call build_plugin\(path\) with"):
        adapter.build_plugin(tmp_path / "wrong.cpp" / "plugin.so")


def test_plugins_that_do_not_fit(none_accepted, built, monkeypatch, tmp_path):
    monkeypatch.setattr(adapter, "_plugin_key", lambda: "OpenMM 9.0, 0123")
    with pytest.raises(RuntimeError, match=r"built for OpenMM 8.*, but this is OpenMM 9\.0, 0123: call build_plugin"):
        adapter.use_plugin("Reference")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", "")
    with pytest.raises(RuntimeError, match=r"there is no .*torchmdnet2.OpenMM-9\.0-0123-.*so: build the plugin"):
        adapter.use_plugin("Reference")
    (tmp_path / "text.so").write_text("text")
    monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", str(tmp_path / "text.so"))
    with pytest.raises(RuntimeError, match=r"text\.so cannot be loaded"):
        adapter.use_plugin("Reference")
    monkeypatch.undo()
    monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", str(built))
    with pytest.raises(RuntimeError, match="the plugin has nothing for the platform OpenCL: give one of CUDA, CPU"):
        adapter.use_plugin("OpenCL")
    library = SimpleNamespace(
        torchmdnet2_key=lambda: adapter._plugin_key().encode(), torchmdnet2_register=lambda platform: 0
    )
    with monkeypatch.context() as patch:
        patch.setattr(adapter.ctypes, "CDLL", lambda path: library)
        with pytest.raises(RuntimeError, match="platform Reference has no PythonForce here: install OpenMM"):
            adapter.use_plugin("Reference")
    monkeypatch.setattr(openmm.Platform, "getNumPlatforms", lambda: 0)
    with pytest.raises(RuntimeError, match="OpenMM has no platform CUDA here"):
        adapter.use_plugin()


def test_cached_builds_are_found(none_accepted, built, monkeypatch, tmp_path, caplog):
    """Where the plugin is built, forces on a GPU load it, and say why they cannot use it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHMDNET2_OPENMM_PLUGIN")
    caplog.set_level(logging.WARNING, "torchmdnet2.openmm")
    adapter._use_built_plugin()
    assert not caplog.records
    path = adapter._cached_plugin()
    path.parent.mkdir(mode=0o700)
    shutil.copy(built, path)
    monkeypatch.setattr(adapter, "share_context", lambda: (_ for _ in ()).throw(RuntimeError("no context")))
    monkeypatch.setattr(openmm.Platform, "getName", lambda self: "CUDA")
    adapter._use_built_plugin()
    assert "positions and forces pass through the host: no context" in caplog.text
    caplog.clear()
    monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", "")
    adapter._use_built_plugin()
    assert not caplog.records, "an empty variable turns it off"


@pytest.mark.parametrize("place", ["library", "folder"])
@pytest.mark.parametrize("fault", ["group", "others", "owner"])
def test_libraries_that_others_could_have_written(none_accepted, monkeypatch, tmp_path, caplog, place, fault):
    """They are refused before they are loaded, which runs code. Links are followed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHMDNET2_OPENMM_PLUGIN")
    (tmp_path / "cache").mkdir()
    (tmp_path / "linked").mkdir(mode=0o700)
    (tmp_path / "cache" / "torchmdnet2").symlink_to("../linked")
    path = tmp_path / "linked" / adapter._cached_plugin().name
    path.touch(mode=0o644)
    changed, mode, owner = path if place == "library" else path.parent, 0o700, os.getuid()
    if fault == "owner":  # only root can give files away
        owner, real = 12345, Path.stat
        monkeypatch.setattr(Path, "stat", lambda self, **given: with_owner(real(self, **given), self == changed))
    else:
        mode |= 0o020 if fault == "group" else 0o002
    changed.chmod(mode)
    loaded = []
    with monkeypatch.context() as patch:
        patch.setattr(adapter.ctypes, "CDLL", loaded.append)
        with pytest.raises(RuntimeError) as error:
            adapter.use_plugin("Reference")
    expected = f"others could have written {changed} (owner: uid {owner}, mode {mode:o}): call build_plugin() again, or"
    assert expected in str(error.value) and not loaded
    caplog.set_level(logging.WARNING, "torchmdnet2.openmm")
    adapter._use_built_plugin()
    assert expected in caplog.text


def with_owner(status, changed):
    values = list(status)
    values[4] = 12345 if changed else values[4]  # st_uid
    return os.stat_result(values)


def test_cached_builds_are_closed_and_replace_earlier_ones(model_file, monkeypatch, tmp_path):
    """Whatever the umask and the mode of the folder were; and they are used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHMDNET2_OPENMM_PLUGIN")
    monkeypatch.setenv("CXX", "env LANG=C g++")
    path = adapter._cached_plugin()
    path.parent.mkdir()
    path.parent.chmod(0o777)
    checksum = adapter._plugin_key()[-16:]
    names = [path.name.replace(*change) for change in ((checksum, 16 * "0"), ("OpenMM-", "OpenMM-9"), (".so", "-9.so"))]
    for name in names:
        (path.parent / name).touch()
    before = os.umask(0o002)
    try:
        assert adapter.build_plugin() == path
    finally:
        os.umask(before)
    assert {file.name for file in path.parent.iterdir()} == {path.name, *names[1:]}
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o755
    disconnect()
    adapter.use_plugin("Reference")
    assert adapter._LOADED[-1]._name == str(path)
    evaluate(context_of(ml_system(model_file, ethanol()), ethanol()))


def test_names_of_libraries(none_accepted, built, monkeypatch, tmp_path):
    """Relative ones, which the loader would search elsewhere; in the home folder; links, which a build replaces."""
    disconnect()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    Path("c++").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp ' + f'"{built}" "$2"\n')
    Path("c++").chmod(0o755)
    for name in ("plugin.so", "~/other/plugin.so"):
        monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", name)
        assert adapter.build_plugin(name) == Path(name).expanduser().resolve()
        adapter.use_plugin("Reference")
        assert adapter._LOADED[-1]._name == str(Path(name).expanduser().resolve())
        disconnect()
    assert not Path("~").exists()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert adapter.build_plugin().parent.stat().st_mode & 0o777 == 0o700
    Path("precious").write_text("text")
    adapter._cached_plugin().unlink()
    adapter._cached_plugin().symlink_to(tmp_path / "precious")
    assert not adapter.build_plugin().is_symlink() and Path("precious").read_text() == "text"
    adapter.use_plugin("Reference")


@pytest.mark.parametrize("missing", ["name of the home folder", "permission", "source"])
def test_a_cache_that_cannot_be_looked_at_holds_no_plugin(none_accepted, monkeypatch, tmp_path, caplog, missing):
    """Forces on a GPU are created as if nothing had been built."""
    monkeypatch.delenv("TORCHMDNET2_OPENMM_PLUGIN")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if missing == "name of the home folder":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        error, look = RuntimeError, Path.home
    elif missing == "permission":
        monkeypatch.setattr(Path, "is_file", refuse)  # what it does in the folder of another user
        error, look = PermissionError, adapter._cached_plugin().is_file
    else:
        monkeypatch.setattr(adapter, "_CPP", tmp_path / "missing.cpp")
        error, look = FileNotFoundError, adapter._cached_plugin
    with pytest.raises(error):
        look()
    caplog.set_level(logging.WARNING, "torchmdnet2.openmm")
    TorchMDNet2Energy(None, {"numbers": (1,), "periodic": False, "device": "cuda"})
    assert not caplog.records


def test_a_named_library_that_cannot_be_looked_at(none_accepted, monkeypatch, caplog):
    monkeypatch.setattr(Path, "is_file", refuse)
    caplog.set_level(logging.WARNING, "torchmdnet2.openmm")
    adapter._use_built_plugin()
    assert "pass through the host: not permitted" in caplog.text


def refuse(self):
    raise PermissionError("not permitted")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_inference_mode(potential, dtype, mode):
    """Modes of autograd change nothing, also if a Context is created in one."""
    system, atoms = ml_system(potential, boxed("triclinic"), dtype=dtype), boxed("triclinic")
    expected = evaluate(context_of(system, atoms))
    with mode():
        context = context_of(system, atoms)
        for _ in range(3):
            context.setPositions(atoms.positions / 10)
            energy, forces = evaluate(context)
            assert direct() == 1
            assert energy == pytest.approx(expected[0], abs=1e-8)
            np.testing.assert_allclose(forces, expected[1], rtol=0, atol=1e-7)


def test_cpu_platform(model_file):
    """It shares the data of the Reference platform, also beside a force with a kernel for it."""
    system = ml_system(model_file, ethanol())
    bonds = openmm.HarmonicBondForce()
    bonds.addBond(0, 1, 0.15, 1000.0)
    system.addForce(bonds)
    runs = []
    for used in (True, False):
        if not used:
            disconnect()
        context = context_of(system, ethanol(), "CPU")
        for _ in range(3):
            context.getIntegrator().step(5)
            assert direct() == used
            runs.append(evaluate(context))
        del context
    adapter.use_plugin("Reference")
    for found, expected in zip(runs[:3], runs[3:], strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-8)
        np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-7)
