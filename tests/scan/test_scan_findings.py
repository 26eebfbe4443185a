"""Planted faults are found, sound potentials pass."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from planted import DEPTH, LENGTH, OH, morse, potential, repulsion, smooth

from torchmdnet2.errors import BadConfig, BadData, MissingBackend
from torchmdnet2.scan import CalculatorSurface, ModelSurface, Samples, findings, scan_molecule
from torchmdnet2.scan.findings import KINDS, find_faults
from torchmdnet2.scan.paths import Line
from torchmdnet2.scan.surfaces import Curve, _by_name, open_reference
from torchmdnet2.system import System


def scan(energy, atoms=OH, kinds=("bond",), cutoff=5.0, dtype="float64", **more):
    return scan_molecule(potential(energy, cutoff), atoms, kinds, dtype=dtype, **more)


def kinds_of(report):
    return [finding.kind for _, finding in report.findings]


def test_a_morse_bond_passes():
    report = scan(morse)
    (curve,) = report.curves
    assert report.passed and curve.path.name == "O0–H1"
    x = LENGTH * np.array([0.6, 0.8, 1.5])
    expected = DEPTH * (1 - np.exp(-2 * (x - LENGTH))) ** 2
    np.testing.assert_allclose([curve.at(m) for m in (0.6, 0.8, 1.5)], expected, rtol=1e-9)
    slope = np.gradient(curve.model.energy, curve.model.values, edge_order=2)
    np.testing.assert_allclose(-curve.model.force[1:-1], slope[1:-1], atol=0.05)
    assert max(curve.jumps.values(), default=0) < 1e-6


def gauss(d, center, width):
    return torch.exp(-(((d - center) / width) ** 2))


PLANTED = {
    "attraction": (lambda d: morse(d) - 1500 * (0.74 - d).clamp(min=0) ** 3, ["wall"]),
    "no wall": (lambda d: morse(d.clamp(min=0.75)), ["wall", "force jump"]),
    "hole": (lambda d: morse(d) - 40 * gauss(d, 0.55, 0.08), ["wall", "hole"]),
    "another minimum": (lambda d: morse(d) - 1.0 * gauss(d, 1.7, 0.1), ["extra minimum"]),
    "falls again": (lambda d: morse(d) - 12 * (d - 1.5).clamp(min=0) ** 3, ["extra minimum"]),
    "kink": (lambda d: morse(d) + 0.005 * (d - 1.234).abs(), ["force jump"]),
    "bend": (lambda d: morse(d) + 2 * (d - 1.234).clamp(min=0) ** 2, ["curvature jump"]),
    "step": (lambda d: morse(d) + torch.where(d > 1.234, 0.002, 0.0), ["energy jump"]),
    "not a number": (lambda d: morse(d) / (d > 0.7), ["not finite"]),
    "sharp, but smooth": (lambda d: morse(d) + 1e-4 * gauss(d, 1.3, 0.01), []),
    "sharper, but smooth": (lambda d: morse(d) + 1e-4 * torch.tanh((d - 1.3) / 0.002), []),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults(fault):
    energy, expected = PLANTED[fault]
    report = scan(energy)
    assert kinds_of(report) == expected
    if fault in ("kink", "bend", "step"):
        (_, finding) = report.findings[0]
        size = {"kink": 0.01, "bend": 4.0, "step": 0.002}[fault]
        assert finding.value == pytest.approx(1.234, abs=1e-5) and finding.size == pytest.approx(size, rel=1e-3)
        assert f"{finding.size:.2g}" in finding.text and "1.27× (1.23 Å)" in finding.text
    if "wall" in expected:
        words = "does not repel below 0.77× (0.75 Å)" if fault == "no wall" else "attracts below 0."
        assert report.findings[0][1].text.startswith(words)
    if fault == "hole":
        (_, hole) = report.findings[-1]
        assert hole.value < 0.68 and "hole of" in hole.text


def test_curvature_is_looked_at_in_float64_only():
    energy, _ = PLANTED["bend"]
    single = scan_molecule(potential(energy), OH, ["bond"], dtype="float32")
    assert single.passed and single.curves[0].jumps["curvature jump"] == 0
    energy, _ = PLANTED["kink"]
    assert kinds_of(scan_molecule(potential(energy), OH, ["bond"], dtype="float32")) == ["force jump"]


def test_rounding_is_no_jump(monkeypatch):
    """Noise of the size of float32 is refined, and is gone in float64; a true kink of such a surface stays."""
    doubled = ModelSurface.in_float64
    true = {"smooth": (morse, []), "kink": (PLANTED["kink"][0], ["force jump"])}
    for energy, expected in true.values():
        asked = []

        def exact(self):
            asked.append(self.precise)
            return ModelSurface(potential(energy))

        def noisy(d):
            noise = 2e-4 * torch.sin(1.2345e7 * d.detach())
            return energy(d) + torch.where((d - 1.5).abs() < 0.03, noise, 0.0)

        monkeypatch.setattr(ModelSurface, "in_float64", exact)
        report = scan(noisy, dtype="float32")
        assert (kinds_of(report), asked) == (expected, [False])
    monkeypatch.setattr(ModelSurface, "in_float64", doubled)
    surface = ModelSurface(potential(morse).float(), dtype=None)
    exact_surface = surface.in_float64()
    assert not surface.precise and exact_surface.precise and exact_surface.in_float64() is exact_surface
    assert surface.members[0].dtype == torch.float32


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_scan_keeps_what_it_has(after, monkeypatch):
    """Ctrl-C during the curves, and during the search for jumps; before the first curve it ends the scan."""
    water, calls, call = molecule("H2O"), [], ModelSurface.__call__

    def stop(self, requests, progress=None):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(requests)
        return call(self, requests, progress)

    monkeypatch.setattr(ModelSurface, "__call__", stop)
    if not after:
        with pytest.raises(KeyboardInterrupt):
            scan(morse, water, ["contact"], 4.0)
        return
    report = scan(morse, water, ["contact"], 4.0)
    assert len(report.curves) == after and not report.complete and not report.passed
    assert f"interrupted: the report has {after} of 3 curves" in report.notes[-1]
    assert any(finding.kind == "extra minimum" for _, finding in report.findings)


def test_progress():
    """Stages, and the time left where lines are printed now and then."""
    import io

    from rich.console import Console

    from torchmdnet2.scan import surfaces as progress

    text = io.StringIO()
    shown = progress.ScanProgress(Console(file=text, width=200))
    with pytest.MonkeyPatch.context() as patch, shown:
        clock = iter(range(0, 1000, 20))
        patch.setattr(progress.time, "perf_counter", lambda: next(clock))
        shown.begin("3 curves", 300)
        shown.advance(100)
        shown.advance(200)
    assert text.getvalue().splitlines() == ["3 curves: 300 structures", "3 curves: 100 of 300 structures, 40 s left"]
    live = io.StringIO()
    with progress.ScanProgress(Console(file=live, width=200, force_terminal=True)) as shown:
        shown.begin("jumps", 10)
        shown.advance(10)
    assert "10/10 structures" in live.getvalue()


def test_contacts():
    """Repulsion passes; a cut-off that is not smooth, attraction and wells that only bonds have do not."""
    water = molecule("H2O")

    def found(energy):
        report = scan(energy, water, ["contact"], 4.0)
        assert [curve.path.name for curve in report.curves] == ["H…H", "H…O", "O…O"]
        return set(kinds_of(report))

    assert found(lambda d: repulsion(d) * smooth(d, 4.0)) == set()
    assert found(lambda d: (repulsion(d) - 0.2 * gauss(d, 2.6, 0.5)) * smooth(d, 4.0)) == set()  # as hydrogen bonds
    assert found(lambda d: repulsion(d) + 0.01) == {"energy jump"}
    assert found(lambda d: repulsion(d) * smooth(d, 4.0) + 0.01 * (4.0 - d)) == {"force jump"}
    assert "extra minimum" in found(lambda d: morse(d) * smooth(d, 4.0))
    assert "wall" in found(lambda d: repulsion(d) * smooth(d, 4.0) - 900 * (0.9 - d).clamp(min=0) ** 3)


def test_a_wall_names_where_it_is_soft():
    """A contact may attract in an interval, and repel again at smaller distances."""
    x = np.linspace(0.5, 1.5, 101)
    path = Line("contact", "a", (0, 1), None, 1.0, 1.0, x, np.zeros((2, 3)))

    def words(soft, force=-2.0):
        (finding,) = findings._wall(path, Samples(x, np.zeros(101), np.where(soft, force, 5.0)))
        return finding.text

    assert words(x < 0.6) == "attracts below 0.59× (0.59 Å), by up to 2 eV/Å"
    inside = (x > 0.695) & (x < 0.755)
    assert words(inside) == "attracts between 0.70× (0.70 Å) and 0.75× (0.75 Å), by up to 2 eV/Å"
    assert words(inside, 0.0) == "does not repel between 0.70× (0.70 Å) and 0.75× (0.75 Å)"
    both = words(inside | (abs(x - 0.6) < 1e-3) | (x < 0.515))
    assert both.startswith("attracts below 0.51× (0.51 Å) and at 0.60× (0.60 Å) and between 0.70× (0.70 Å) and 0.75×")
    assert not list(findings._wall(path, Samples(x, np.zeros(101), np.where(x > 0.8, -2.0, 5.0))))


def test_torsions():
    ethane = molecule("C2H6")
    report = scan(lambda d: repulsion(d) * smooth(d, 5.0), ethane, ["torsion"])
    (curve,) = report.curves
    assert report.passed and curve.path.kind == "torsion"
    energy = curve.relative()
    third = len(energy[:-1]) // 3
    np.testing.assert_allclose(energy[:-1], np.roll(energy[:-1], third), atol=2e-4)
    report = scan(lambda d: repulsion(d) * smooth(d, 5.0) - 2 * gauss(d, 2.7, 0.05), ethane, ["torsion"])
    assert "hole" in kinds_of(report)
    report = scan(lambda d: repulsion(d) * smooth(d, 5.0) + 0.3 * torch.cos(60 * d), ethane, ["torsion"])
    assert "extra minimum" in kinds_of(report)


def line(energy, force):
    path = Line("bond", "a", (0, 1), None, 1.0, 1.0, np.linspace(0.6, 2, 141), np.zeros((2, 3)))
    return path, Samples(path.values, energy(path.values), force(path.values))


def test_forces_that_are_no_gradient():
    x0 = LENGTH / 0.97

    def energy(x):
        return 5 * (1 - np.exp(-2 * (x - x0))) ** 2

    def force(x):
        return -20 * (1 - np.exp(-2 * (x - x0))) * np.exp(-2 * (x - x0))

    assert not find_faults(*line(energy, force))
    (found,) = find_faults(*line(energy, lambda x: force(x) + 0.05))
    assert found.kind == "not conservative" and found.size == pytest.approx(0.05, rel=0.3)
    wrong = find_faults(*line(energy, lambda x: 1.02 * force(x)))
    assert [f.kind for f in wrong] == ["not conservative"]


def test_what_the_reference_has_too_is_no_fault():
    energy, _ = PLANTED["hole"]
    reference = ModelSurface(potential(energy))
    report = scan(energy, reference=reference)
    (curve,) = report.curves
    assert report.passed and {f.kind for f in curve.excused} == {"wall", "hole"}
    assert len(curve.reference.values) == 29 and "the reference too" in report._page({})
    report = scan(energy, reference=ModelSurface(potential(morse)))
    assert set(kinds_of(report)) == {"wall", "hole", "reference"}
    report = scan(lambda d: 0.45 * morse(d), reference=ModelSurface(potential(morse)))
    texts = [finding.text for _, finding in report.findings]
    assert kinds_of(report) == ["reference"] * 2 and [text[7:16] for text in texts] == [" at 0.7×,", " at 1.5×,"]
    assert scan(lambda d: 0.65 * morse(d), reference=ModelSurface(potential(morse))).passed


def test_a_reference_that_does_not_converge_is_a_gap():
    from ase.calculators.lj import LennardJones

    class Fails(LennardJones):
        def calculate(self, atoms=None, *more, **named):
            if atoms.get_distance(0, 1) < 0.7:
                raise RuntimeError("no convergence")
            super().calculate(atoms, *more, **named)

    asked = []
    surface = CalculatorSurface("lj", lambda charge, spin: asked.append((charge, spin)) or Fails(sigma=0.86))
    report = scan(morse, OH.copy(), reference=surface, charge=-1)
    (curve,) = report.curves
    assert np.isnan(curve.reference.energy[:3]).all() and np.isfinite(curve.reference.energy[4:]).all()
    assert set(asked) == {(-1, 0)}
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("energy", "far"),
    [
        (morse, []),
        (lambda d: 1.3 * morse(d), []),
        (lambda d: 1.45 * morse(d), ["1.5×"]),
        (lambda d: 1.6 * morse(d), ["0.7×", "1.5×"]),
        (lambda d: 0.45 * morse(d), ["0.7×", "1.5×"]),
    ],
)
def test_energies_that_differ_from_the_reference(energy, far):
    """By more than a half at 0.7 times the length of a bond, or by 40 % at 1.5 times."""
    report = scan(energy, reference=ModelSurface(potential(morse)))
    assert kinds_of(report) == ["reference"] * len(far) and report.passed == (not far)
    for (_, finding), place in zip(report.findings, far, strict=True):
        assert f"eV at {place}, but the reference has" in finding.text


def test_the_charge_reaches_a_calculator_by_name_or_is_refused():
    cation = System(z=torch.tensor([8, 1]), pos=torch.eye(3)[:2], charge=torch.ones(1), spin=torch.tensor([3]))
    open_reference("lj").check(cation.replace(charge=torch.zeros(1), spin=torch.tensor([1])))
    with pytest.raises(BadConfig, match=r"the charge 1, which is not passed to the calculator 'lj' of ASE: give gfn"):
        open_reference("lj").check(cation)
    with pytest.raises(BadConfig, match="the multiplicity 3"):
        open_reference("mopac").check(cation)
    with pytest.raises(BadConfig, match="the charge -1"):
        scan(morse, OH.copy(), reference="lj", charge=-1)
    for name, expected in (("orca", {"charge": 1, "mult": 3}), ("psi4", {"charge": 1, "multiplicity": 3})):
        assert _by_name(name, lambda **given: given, 1, 3) == expected
    assert _by_name("qchem", lambda **given: given, 0, 0) == {"charge": 0}


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        ("tblite", "gfn2-xtb", r"--reference GFN2-xTB: tblite is not installed \(pip install tblite\)"),
        ("tblite", "GFN1-xTB", r"--reference GFN1-xTB: tblite is not installed"),
        ("asap3", "asap", "--reference asap: asap3 is not installed"),
    ],
)
def test_a_missing_package_of_a_reference_is_named(monkeypatch, package, name, words):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.ase", None)
    with pytest.raises(MissingBackend, match=words):
        open_reference(name)


def test_gfn2_xtb_as_reference():
    pytest.importorskip("tblite")
    hydrogen = Atoms("H2", [[0, 0, 0], [0, 0, 0.74]])
    report = scan(morse, hydrogen, reference="gfn2-xtb")
    (curve,) = report.curves
    assert report.reference == "GFN2-xTB" and np.isfinite(curve.reference.energy).all()
    assert curve.at(0.6, curve.reference) == pytest.approx(3.4, abs=1.5)
    force = np.gradient(curve.reference.energy, curve.reference.values)
    np.testing.assert_allclose(-force[10:-1], curve.reference.force[10:-1], atol=0.4)


def test_structures_that_cannot_be_scanned():
    with pytest.raises(BadData, match="no atoms"):
        scan(morse, Atoms())
    with pytest.raises(BadData, match="periodic"):
        scan(morse, Atoms("OH", OH.positions, cell=[9, 9, 9], pbc=True))
    with pytest.raises(BadConfig, match="'bonds' cannot be scanned"):
        scan(morse, kinds=["bonds"])
    with pytest.raises(BadConfig, match="'gfn3' is not a reference"):
        scan(morse, reference="gfn3")
    with pytest.raises(BadData, match="nothing to scan: no torsion"):
        scan(morse, kinds=["torsion"])
    alone = scan(lambda d: repulsion(d) * smooth(d, 5.0), Atoms("O"), ["bond", "contact"])
    assert [curve.path.name for curve in alone.curves] == ["O…O"] and alone.passed


def test_every_kind_of_jump_has_a_limit_and_curves_their_own_zero():
    assert set(KINDS) == {"energy jump", "force jump", "curvature jump"}
    (curve,) = scan(morse).curves
    assert isinstance(curve, Curve) and curve.relative().min() == 0
