"""How many threads a step of the compiled kernels takes is decided by times, which are given here."""

from __future__ import annotations

import pytest

from torchmdnet2.core.compiling_cpu import LARGE, SMALL, ThreadChoice, ThreadTuner
from torchmdnet2.kernels.interfaces import amount_of_work


def run(race: ThreadTuner, cost: dict[int, float], times: int) -> list[int]:
    """Threads of each of some runs that cost what is said."""
    taken = []
    for _ in range(times):
        taken.append(race.threads)
        race.took(cost[race.threads])
    return taken


def test_small_work_takes_one_thread_and_large_work_all() -> None:
    choose = ThreadChoice()
    assert choose(SMALL - 1, 8, True) == 1
    assert choose(LARGE + 1, 8, True) == 8
    assert choose(10 * SMALL, 1, True) == 1
    assert amount_of_work(9, 70, 32, 1) < SMALL < amount_of_work(166, 5430, 128, 2) < LARGE


@pytest.mark.parametrize("cost", [{1: 1.0, 4: 0.5}, {1: 1.0, 4: 30.0}], ids=["all is faster", "one is faster"])
def test_the_faster_one_is_taken(cost: dict[int, float]) -> None:
    race = ThreadChoice()(10 * SMALL, 4, True)
    assert isinstance(race, ThreadTuner)
    race.took(60.0)  # the first run compiles
    faster = min(cost, key=cost.__getitem__)
    taken = run(race, cost, 5000)
    assert set(taken[:3]) == {1, 4}
    slower = [k for k in taken[3:] if k != faster]
    assert slower, "the slower one is never tried again"
    assert len(slower) * (cost[5 - faster]) < 0.03 * sum(cost[k] for k in taken)


def test_a_change_is_noticed() -> None:
    race = ThreadTuner(2)
    idle, busy = {1: 1.0, 2: 0.6}, {1: 1.1, 2: 50.0}
    assert run(race, idle, 50)[-1] == 2
    assert run(race, busy, 10)[-5:] == [1] * 5
    assert run(race, idle, 10_000)[-5:] == [2] * 5


def test_sizes_race_on_their_own() -> None:
    choose = ThreadChoice()
    assert choose(10 * SMALL, 2, True) is choose(10 * SMALL + 1, 2, True)
    assert choose(10 * SMALL, 2, True) is not choose(100 * SMALL, 2, True)
    assert choose(10 * SMALL, 2, True) is not choose(10 * SMALL, 2, False)
