"""OpenMM: springs for multiple time steps, and one CUDA context for OpenMM and PyTorch."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from ase.build import molecule

openmm = pytest.importorskip("openmm")

from openmm_cases import boxed, evaluate, system_of, topology_of  # noqa: E402

from torchmdnet2 import load  # noqa: E402
from torchmdnet2.adapters.openmm import TorchMDNet2Energy, add_force, share_context  # noqa: E402
from torchmdnet2.adapters.openmm_plugin import _on_cuda  # noqa: E402
from torchmdnet2.errors import BadData  # noqa: E402
from torchmdnet2.md.springs import Springs, SpringStep, add_springs  # noqa: E402
from torchmdnet2.system import System  # noqa: E402
from torchmdnet2.units import KJ_MOL  # noqa: E402


def context_with(atoms, start=None, integrator=None, part=None, model="organic-small"):
    """A Context with the model, and with springs if they get a start."""
    system, topology = system_of(atoms), topology_of(atoms)
    add_force(system, model, topology, part)
    if start is not None:
        add_springs(system, model, topology, start.positions / 10, part)
    integrator = integrator or openmm.VerletIntegrator(1e-3)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(atoms.positions / 10)
    return context


def moved(atoms, width=0.05):
    """A copy with other positions, in which bonds differ by more than the reach of a spring if the width is large."""
    atoms = atoms.copy()
    atoms.rattle(width, seed=2)
    return atoms


@pytest.mark.parametrize("part", [None, [8, 2, 3, 0, 1, 4, 5, 6, 7]], ids=["all", "a part"])
@pytest.mark.parametrize("kind", ["vacuum", "box"])
def test_springs_do_not_change_energy_and_forces(kind, part):
    start = molecule("CH3CH2OH")
    if kind == "box":
        start.set_cell([12.0, 13.0, 14.0])
        start.pbc = True
    atoms = moved(start)
    if kind == "box":
        atoms.wrap()
        assert np.ptp(atoms.positions, axis=0).max() > 6, "the molecule is not torn apart, which this test needs"
    found, expected = (evaluate(context_with(atoms, given, part=part)) for given in (start, None))
    assert found[0] == pytest.approx(expected[0], abs=1e-7)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-7)


@pytest.mark.parametrize("width", [0.05, 0.4])
def test_springs_are_those_of_our_own_integrator(width):
    start = molecule("CH3CH2OH")
    springs = Springs(System.from_ase(start))
    springs.fit(load("organic-small"))
    atoms = moved(start, width)
    expected = SpringStep(springs, System.from_ase(atoms)).forces.numpy()
    state = context_with(atoms, start).getState(getForces=True, groups={1})
    found = state.getForces(asNumpy=True)._value * KJ_MOL / 10
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_multiple_time_steps_keep_the_energy(monkeypatch):
    """Steps of 2 fs: with springs the total energy varies by 0.3 meV per atom at most, without by far more."""
    calls, original = [], TorchMDNet2Energy.__call__
    monkeypatch.setattr(TorchMDNet2Energy, "__call__", lambda self, state: calls.append(0) or original(self, state))
    start = molecule("CH3CH2OH")
    spread = {}
    for name, integrator in (
        ("springs", openmm.MTSIntegrator(0.002, [(0, 1), (1, 4)])),
        ("plain", openmm.VerletIntegrator(0.002)),
    ):
        context = context_with(start, start if name == "springs" else None, integrator)
        openmm.LocalEnergyMinimizer.minimize(context, maxIterations=100)
        context.setVelocitiesToTemperature(300, 1)
        energies = []
        for _ in range(100):
            integrator.step(1)
            state = context.getState(getEnergy=True)
            energies.append((state.getPotentialEnergy() + state.getKineticEnergy())._value * KJ_MOL / len(start))
        spread[name] = np.std(energies)
        calls.clear()
        integrator.step(20)
        assert len(calls) in (20, 21), "the model is evaluated once in a step"
    assert spread["springs"] < 3e-4
    assert spread["plain"] > 4 * spread["springs"]


def test_springs_need_a_box_for_nearest_images():
    atoms = boxed("orthorhombic")
    with pytest.raises(BadData, match="box must be wider"):
        context_with(atoms, atoms)


def test_springs_across_the_faces_of_a_box():
    atoms = molecule("H2", cell=[12, 12, 12], pbc=True)
    atoms.positions -= atoms.positions.mean(0)
    atoms.wrap()
    assert atoms.get_distance(0, 1) > 10
    add_springs(system_of(atoms), "organic-small", topology_of(atoms), atoms.positions / 10)


def test_positions_for_springs_in_all_forms():
    """With any unit of length, as a whole or of each atom, and as vectors of OpenMM: the same springs."""
    atoms, found = molecule("CH3CH2OH"), []
    vectors = [openmm.Vec3(*row) for row in atoms.positions / 10]
    for given in (
        atoms.positions / 10, atoms.positions * openmm.unit.angstrom, vectors * openmm.unit.nanometer, vectors,
        [vector * openmm.unit.nanometer for vector in vectors],
    ):  # fmt: skip
        system = system_of(atoms)
        add_springs(system, "organic-small", topology_of(atoms), given)
        found.append([system.getForce(k).getBondParameters(0)[-1][0] for k in (0, 2)])
    np.testing.assert_allclose(found, [found[0]] * 5, rtol=1e-12)


def test_springs_refuse_what_does_not_fit():
    atoms = molecule("CH3CH2OH")
    system, topology, positions = system_of(atoms), topology_of(atoms), atoms.positions / 10
    example = r"give modeller\.positions, or with the unit, as in atoms\.positions \* openmm\.unit\.angstrom"
    with pytest.raises(
        BadData, match=rf"positions of all 9 atoms of the topology are needed, \[9, 3\], got 8 × 3 numbers; {example}"
    ):
        add_springs(system, "organic-small", topology, positions[:8])
    with pytest.raises(BadData, match="atom 0 has one that is not finite"):
        add_springs(system, "organic-small", topology, positions * np.nan)
    with pytest.raises(BadData, match=rf"no two atoms are closer than 3 Å, .*plain numbers are nm, so {example}"):
        add_springs(system, "organic-small", topology, atoms.positions)
    for wrong in (positions * openmm.unit.picosecond, "start.xyz", None, 3.0, [[0, 0], [0, 0, 0]], atoms):
        with pytest.raises(BadData, match=rf"positions: lengths \[N, 3\] are needed; {example}"):
            add_springs(system, "organic-small", topology, wrong)
    with pytest.raises(ValueError, match="different force groups"):
        add_springs(system, "organic-small", topology, positions, groups=(1, 1))
    with pytest.raises(BadData, match="the System has 3 particles, but the topology 9 atoms"):
        add_springs(system_of(molecule("H2O")), "organic-small", topology, positions)
    next(topology.atoms()).element = None
    with pytest.raises(BadData, match="has no element"):
        add_springs(system, "organic-small", topology, positions)
    assert system.getNumForces() == 0
    add_springs(system, "organic-small", topology_of(atoms), positions)
    forces = system.getNumForces()
    with pytest.raises(BadData, match="these atoms of the System have springs already"):
        add_springs(system, "organic-small", topology_of(atoms), positions)
    assert system.getNumForces() == forces


DRIVER = """
static int created, retained, pushed, destroyed, own, primary;
int cuCtxCreate_v4(void **c, void *p, unsigned f, int d) { created++; *c = &own; return 0; }
int cuCtxDestroy_v2(void *c) { destroyed++; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { retained += 1 + 10 * d; *c = &primary; return 0; }
int cuCtxPushCurrent_v2(void *c) { pushed++; return c == &primary ? 0 : 7; }
void counts(int *o) { o[0] = created; o[1] = retained; o[2] = pushed; o[3] = destroyed; }
"""
PLUGIN = """
int cuCtxCreate_v4(void **, void *, unsigned, int);
int cuCtxDestroy_v2(void *);
int make(void **c, int device) { return cuCtxCreate_v4(c, 0, 8, device); }
int (*destroy)(void *) = cuCtxDestroy_v2;  // a pointer, which is another kind of relocation than a call
int end(void *c) { return cuCtxDestroy_v2(c); }
"""
SCRIPT = """
import ctypes
from torchmdnet2.adapters.openmm import share_context
driver, plugin = (ctypes.CDLL(f"./{name}", mode=ctypes.RTLD_GLOBAL) for name in ("libcuda.so.1", "libOpenMMCUDA.so"))
def counts():
    found = (ctypes.c_int * 4)()
    driver.counts(found)
    return list(found)
def make(device):
    context = ctypes.c_void_p()
    assert plugin.make(ctypes.byref(context), device) == 0
    return context
end = lambda context: plugin.end(context) == 0
early = make(0)
assert end(make(0)) and counts() == [2, 0, 0, 1]
share_context()
assert end(make(0)) and counts() == [2, 1, 1, 1], "shared ones are not destroyed"
assert end(early) and counts() == [2, 1, 1, 2], "those from before are"
share_context()
assert end(make(2)) and counts() == [2, 22, 2, 2]
"""


@pytest.mark.skipif(shutil.which("gcc") is None or not sys.platform.startswith("linux"), reason="needs gcc on Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a real driver is there")
@pytest.mark.parametrize("flags", ["-Wl,-z,lazy", "-fno-plt -Wl,-z,now -Wl,-z,relro"], ids=["lazy", "read-only"])
def test_share_context_redirects_the_plugin(flags, tmp_path):
    """With a driver and a plugin that only count calls."""
    for name, source, options in (
        ("libcuda.so.1", DRIVER, "-Wl,-soname,libcuda.so.1"),
        ("libOpenMMCUDA.so", PLUGIN, f"-L. -l:libcuda.so.1 {flags}"),
    ):
        (tmp_path / "source.c").write_text(source)
        command = ["gcc", "-shared", "-fPIC", "source.c", "-o", name, *options.split()]
        subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="OpenMM's CUDA platform may be there")
def test_share_context_without_a_cuda_platform():
    with pytest.raises(RuntimeError, match="CUDA platform is not loaded"):
        share_context()


@pytest.mark.parametrize(
    "what", [("libc_ver", ("", "")), ("machine", "riscv64")], ids=["Windows, macOS, musl", "processor"]
)
def test_share_context_on_other_systems(what, monkeypatch):
    monkeypatch.setattr(f"platform.{what[0]}", lambda: what[1])
    with pytest.raises(RuntimeError, match="Linux with glibc only"):
        share_context()


def test_contexts_on_cuda_are_found(monkeypatch):
    context = context_with(molecule("H2O"))
    assert not any(map(_on_cuda, gc.get_objects()))
    monkeypatch.setattr(openmm.Platform, "getName", lambda self: "CUDA")
    assert any(one is context and _on_cuda(one) for one in gc.get_objects())
    assert not _on_cuda(openmm.Context) and not _on_cuda(openmm.Context.__new__(openmm.Context))
