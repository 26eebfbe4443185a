"""Times of the parts of a step in Evaluator.report(system)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton, run_checks
from kernels.pair_prior_cases import system

from torchmdnet2 import Evaluator, Potential
from torchmdnet2.engine.timings import Part, Stopwatch, Timing, describe_timings, measure
from torchmdnet2.potential.prior import Prior

SIZES = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0, "max_z": 10}
D2 = {"name": "d2", "cutoff": 6.0}
EWALD = {"name": "coulomb", "charges": "predicted", "method": "ewald", "cutoff": 5.0, "accuracy": 1e-4}
LINE = re.compile(r"^  (.+?)  +(.*?)  +(\d+\.\d+) ms +(\d+\.\d) %$")


def parts_of(report: str) -> dict[str, tuple[str, float]]:
    """Path and ms by name."""
    lines = report.split("times of a step with forces")[1].splitlines()[1:]
    found = [LINE.match(line) for line in lines]
    assert all(found), lines
    return {m[1]: (m[2], float(m[3])) for m in found if m}


def make(priors, **given) -> Potential:
    torch.manual_seed(0)
    return Potential.from_config({"model": SIZES, "priors": priors, "elements": [1, 6, 7, 8], **given}).eval()


def test_the_potential_itself():
    """Each search and each prior by itself, the network as the rest; priors may read predicted charges."""
    model, atoms = make([D2, EWALD], properties=[{"name": "charges"}]).double(), system(4, 1, 5.0)
    evaluator = Evaluator(model)
    assert "times" not in evaluator.report()
    report = evaluator.report(atoms, stress=True)
    assert "reference path" in report and "4 atoms in 1 structure" in report
    found = parts_of(report)
    searches = [f"neighbor search to {c} Å" for c in (4, 6, 5)]
    assert list(found) == [*searches, "D2", "Coulomb", "network, sums (the rest)", "whole step"]
    assert sum(ms for _, ms in list(found.values())[:-1]) >= 0.99 * found["whole step"][1]
    assert found["D2"][0] == "autograd"


class Well(Prior):
    """A user's prior, without kernels."""

    def forward(self, system, neighbors):
        time.sleep(0.01)
        return 0.01 * system.pos.double().square().sum(1)


def test_compiled_kernels():
    pytest.importorskip("numba")
    model, atoms = make([D2, {"name": "zbl", "cutoff": 3.0}]), system(4, 1, 5.0)
    model.priors.append(Well())
    evaluator = Evaluator(model)
    before = evaluator(atoms)
    report = evaluator.report(atoms)
    found = parts_of(report)
    assert report.startswith("compiled TensorNet kernels")
    searches = [f"neighbor search to {c} Å" for c in (4, 6)]
    assert list(found) == [*searches, "D2", "ZBL", "Well", "network", "whole step"]  # in the order of the step
    assert found["Well"][0] == "autograd" and found["Well"][1] >= 10 and found["ZBL"][0] == "kernels"
    assert torch.equal(evaluator(atoms).forces, before.forces)


def test_a_system_that_cannot_be_evaluated_is_refused():
    with pytest.raises(ValueError, match="atom 0 is"):
        Evaluator(make([])).report(system(4, 1, 5.0).replace(z=torch.full((4,), 9)))


def test_parts_are_measured():
    calls = []
    parts = [Part(name, "kernels", lambda name=name: (calls.append(name), time.sleep(0.01))) for name in "ab"]
    found = measure(parts, torch.device("cpu"))
    assert calls[:2] == ["a", "b"] and [t.name for t in found] == ["a", "b"]
    assert all(t.seconds >= 0.01 for t in found)


def test_a_stopwatch_counts_nothing_twice():
    """The outer part calls the inner one, whose time is its own."""

    class Step:
        def inner(self):
            time.sleep(0.02)

        def outer(self):
            time.sleep(0.01)
            self.inner()

    step, watch = Step(), Stopwatch()
    watch.watch(step, "inner", "inner", "x")
    watch.watch(step, "outer", "outer", "y")
    watch.rounds.append({})
    start = time.perf_counter()
    step.outer()
    taken = time.perf_counter() - start
    ((inner, outer),) = (times.values() for times in watch.rounds)
    assert inner >= 0.02 and outer >= 0.01 and inner + outer <= taken
    assert [t.name for t in watch.measure(step.outer)] == ["inner", "outer", "whole step"]


def test_lines():
    lines = describe_timings([Timing("D2", "kernels", 1e-4), Timing("whole step", "", 4e-4)], system(4, 1, 5.0))
    assert lines[1] == "  D2          kernels     0.1000 ms   25.0 %"


@needs_triton
@pytest.mark.slow
def test_steps_on_the_gpu():
    run_checks(Path(__file__).with_name("timings_checks.py"))
