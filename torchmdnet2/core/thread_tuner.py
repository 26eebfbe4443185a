"""Choose the number of threads for compiled kernels: one or all, whichever is faster at the moment.

What decides is not the work alone. Threads that share out a step wait for each other at the end of every kernel, and
when other programs hold the cores, each of these waits can take as long as the operating system leaves them there:
nine atoms then take a hundred times longer on two threads than on one. So both are timed. Results do not depend on it.
"""

from __future__ import annotations

__all__ = ["ThreadChoice", "ThreadTuner", "amount_of_work"]


SMALL = 100_000
"""Work that one thread does in a third of a millisecond, with the pauses between kernels as long: always one thread."""

LARGE = 300_000_000
"""Work that takes one thread a second: always all of them, as trying one would take too long."""

_TRIALS = 0.02  # of the time may go into trying the slower one again
_WEIGHT = 0.1  # of a new time in the running mean


def amount_of_work(atoms: int, edges: int, channels: int, layers: int) -> int:
    """Return the work of one step, in units of about 3 ns of one thread: matrices act on atoms, filters on edges."""
    return channels * layers * (channels * atoms + 2 * edges)


class ThreadTuner:
    """Compares one thread with all of them, for work of one size.

    Args:
        most: all of them, at least 2.

    Attributes:
        threads: for the next run.
    """

    def __init__(self, most: int):
        self.threads = most
        self._numbers = (1, most)
        self._known: dict[int, float] = {}  # seconds per unit of work
        self._trial = 2  # runs left of a trial; the first may compile, or find cold caches, and does not count
        self._since = 0.0  # seconds per unit of work, since the last trial

    def took(self, cost: float) -> None:
        """Report the time of the last run, in seconds per unit of work."""
        known, threads = self._known, self.threads
        if self._trial:
            self._trial -= 1
            if self._trial:
                return
            known[threads] = cost
            self._since = 0.0
            self.threads = min(known, key=known.__getitem__)
        else:
            known[threads] += _WEIGHT * (cost - known[threads])
            self._since += cost
        other = self._numbers[self.threads == self._numbers[0]]
        if other not in known or known[other] < known[self.threads] or self._since * _TRIALS > 2 * known[other]:
            self.threads, self._trial = other, 2


class ThreadChoice:
    """A tuner for each size of work."""

    def __init__(self) -> None:
        self._tuners: dict[tuple[int, int, bool], ThreadTuner] = {}

    def __call__(self, work: int, most: int, forces: bool) -> ThreadTuner | int:
        """Return the tuner, which gives the number of threads and must be given the time; or the number, if it is
        fixed.

        Args:
            work: `amount_of_work`.
            most: threads that there are.
            forces: whether they are computed.
        """
        if most < 2 or work < SMALL:
            return 1
        if work > LARGE:
            return most
        key = work.bit_length(), most, forces
        if key not in self._tuners:
            self._tuners[key] = ThreadTuner(most)
        return self._tuners[key]
