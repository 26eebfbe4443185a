"""Selection of frames for labelling, and the files of frames and trajectories of a run."""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.files import atomic_write
from ..data import open_dataset
from ..data.structures import read_structures
from ..errors import BadConfig, BadData
from ..md.setup import plain_copy
from ..registry import Registry
from .labellers import Labels

if TYPE_CHECKING:
    from ase import Atoms


__all__ = [
    "SELECTIONS", "Choice", "Selection", "Trajectory", "frames_of", "keys_of", "labelled_frames", "labels_of",
    "make_selection", "read_frames", "read_trajectories", "seed_of", "structures", "unlabelled", "with_labels",
    "write_frames", "write_trajectories",
]  # fmt: skip


def write_frames(path: Path, frames: Sequence[Atoms]) -> None:
    """Write extended XYZ with positions rounded to 10⁻⁸ Å; the file appears when it is complete.

    All computations use frames that `read_frames` has read, so that a resumed run has the same numbers.
    """
    from ase.io import write

    text = io.StringIO()
    if frames:
        write(text, list(frames), format="extxyz")
    atomic_write(path, text.getvalue())


def read_frames(path: Path) -> list[Atoms]:
    """Read a file of `write_frames`, which may be empty."""
    from ase.io import read

    if not path.stat().st_size:
        return []
    return read(path, ":", format="extxyz")  # type: ignore[return-value]


def with_labels(atoms: Atoms, labels: Labels) -> Atoms:
    """Return a copy with labels and the same `info`."""
    from ase.calculators.singlepoint import SinglePointCalculator

    frame = atoms.copy()
    frame.set_constraint()  # forces are written unchanged
    frame.calc = SinglePointCalculator(frame, energy=labels.energy, forces=labels.forces)
    return frame


def labels_of(frame: Atoms) -> Labels:
    """Return the labels of a frame from `with_labels`."""
    assert frame.calc is not None
    return Labels(float(frame.calc.results["energy"]), np.asarray(frame.calc.results["forces"]))


def labelled_frames(
    path: str | list[str], keys: Mapping[str, str | None], units: Mapping[str, str | None]
) -> list[Atoms]:
    """Return frames of the user's data files, with their energies and forces in eV and Å.

    Raises:
        FileNotFoundError, BadData: as `open_dataset`, or a frame has no energy or no forces.
    """
    data = open_dataset(path, keys=keys, units=units)
    frames = []
    for k in range(len(data)):
        sample = data[k]
        (atoms,) = sample.system.to_ase()
        for name in ("energy", "forces"):
            if name not in sample.labels or not bool(sample.labels[name].isfinite().all()):
                raise BadData(
                    f"{data.name(k)}: the frame has no {name}; set start.labelled to false, to label all frames"
                )
        labels = Labels(float(sample.labels["energy"][0]), sample.labels["forces"].numpy())
        frames.append(with_labels(atoms, labels))
    return frames


def structures(path: str | list[str]) -> list[Atoms]:
    """Return frames of the user's files without labels.

    Raises:
        FileNotFoundError, BadData: a file is missing or cannot be read.
    """
    found: list[Atoms] = []
    for file in [path] if isinstance(path, str) else path:
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file")
        try:
            found += read_structures(file)
        except Exception as error:  # ASE's readers raise errors of any kind
            raise BadData(
                f"{file}: the file cannot be read as structures: {str(error) or type(error).__name__}"
            ) from error
    if not found:
        raise BadConfig(f"{path}: the file has no structures")
    return [plain_copy(atoms, None, None) for atoms in found]


def spread_over(frames: Sequence[Any], count: int | None) -> list[Any]:
    """Return a number of evenly spread frames; None returns all."""
    if count is None or count >= len(frames):
        return list(frames)
    return [frames[k * len(frames) // count] for k in range(count)]


# --- Seeds of a round, which are derived from the seed of the run ---


def seed_of(seed: int, what: str, *numbers: int) -> int:
    """Return a seed below 2⁵⁶ for one purpose, as in seed_of(0, "training", round, member)."""
    words = " ".join(map(str, (seed, what, *numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "little")


# --- Trajectories of a round: positions of each replica, spread of the committee, reason of a break ---

_PLAIN = ("temperature", "replica", "member", "start", "broken_at", "reason")


@dataclass(eq=False)
class Trajectory:
    """K frames of one replica of n atoms, all from before it broke.

    Attributes:
        temperature: temperature of the bath in K.
        replica, member, start: number of the replica, of its model, and of the frame from which it started.
        broken_at: time of the break in ps; None if it stayed whole.
        reason: reason of the break.
        time: [K] ps, ascending.
        pos: [K, n, 3] Å, not wrapped into the cell.
        regular: [K] True for frames at equal intervals; the others are the last ones before a break.
        spread: [K] eV/Å, standard deviation of the members' forces on the atom where it is largest.
    """

    temperature: float
    replica: int
    member: int
    start: int
    broken_at: float | None
    reason: str
    time: NDArray[np.float64]
    pos: NDArray[np.float64]
    regular: NDArray[np.bool_]
    spread: NDArray[np.float64]

    @property
    def whole(self) -> bool:
        return self.broken_at is None


def write_trajectories(path: Path, runs: Sequence[Trajectory]) -> None:
    """Write all replicas at one temperature as .npz; the file appears when it is complete."""
    arrays: dict[str, Any] = {
        f"{name}_{k}": value for k, run in enumerate(runs) for name, value in _arrays(run).items()
    }
    facts = [{name: value for name, value in vars(run).items() if name in _PLAIN} for run in runs]
    buffer = io.BytesIO()
    np.savez(buffer, facts=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8), **arrays)
    atomic_write(path, buffer.getvalue())


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read what `write_trajectories` wrote, to the bit."""
    with np.load(path, allow_pickle=False) as file:
        facts = json.loads(file["facts"].tobytes())
        names = ("time", "pos", "regular", "spread")
        return [Trajectory(**own, **{name: file[f"{name}_{k}"] for name in names}) for k, own in enumerate(facts)]


def _arrays(run: Trajectory) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(run).items() if name not in _PLAIN}


# --- Selection of the frames to label. Each method is a class that is registered under a name ---
#
# Frames above the upper limit of the spread or after a break are not selected, since the dynamics that led to them are
# wrong. Compare Y. Zhang et al., Comput. Phys. Commun. 253, 107206 (2020) (DP-GEN).

SELECTIONS: Registry[Any] = Registry("selection")


class Choice(NamedTuple):
    """A selected frame: its replica, its number in the replica, and the reason."""

    run: Trajectory
    frame: int
    reason: str


class Selection(ABC):
    """Base class of methods to select frames."""

    @abstractmethod
    def __call__(self, runs: Sequence[Trajectory], count: int, rng: np.random.Generator) -> list[Choice]:
        """Select frames.

        Args:
            runs: all replicas at all temperatures, without frames that are labelled already.
            count: largest number of frames.
            rng: source of random numbers.
        """


def make_selection(section: Mapping[str, Any]) -> Selection:
    """Return the selection of {"name": …, arguments}."""
    arguments = dict(section)
    return SELECTIONS[arguments.pop("name")](**arguments)


@SELECTIONS.register("disagreement")
class Disagreement(Selection):
    """Selects the last trusted frame of each broken replica, then frames in which the members disagree most.

    Args:
        lowest: eV/Å; frames with a smaller spread are not selected, except before a break.
        highest: eV/Å; a replica is trusted until its spread first exceeds this value.
        apart: least time between two frames of a replica, ps.
    """

    def __init__(self, lowest: float = 0.1, highest: float = 2.0, apart: float = 0.1):
        if not 0 <= lowest < highest or apart < 0:
            raise BadConfig(f"selection: lowest ({lowest}) must be below highest ({highest}), and apart not negative")
        self.lowest, self.highest, self.apart = lowest, highest, apart

    def __call__(self, runs: Sequence[Trajectory], count: int, rng: np.random.Generator) -> list[Choice]:
        ends: list[tuple[float, int, Choice]] = []
        rest: list[tuple[float, int, Choice]] = []
        for number, run in enumerate(runs):
            trusted = self._trusted(run)
            if not run.whole and trusted:
                ends.append((float(run.broken_at or 0.0), number, Choice(run, trusted - 1, f"broken: {run.reason}")))
            rest += [
                (-float(run.spread[k]), number, Choice(run, k, "disagreement"))
                for k in np.flatnonzero(run.spread[:trusted] >= self.lowest).tolist()
            ]
        chosen: list[Choice] = []
        for *_, choice in [*sorted(ends, key=lambda c: c[:2]), *sorted(rest, key=lambda c: c[:2])]:
            if len(chosen) == count:
                break
            if not any(self._near(choice, other) for other in chosen):
                chosen.append(choice)
        return chosen

    def _trusted(self, run: Trajectory) -> int:
        """Return the number of trusted frames of a replica. The first one is always trusted, since it was given."""
        beyond = np.flatnonzero(run.spread[1:] > self.highest)
        return int(beyond[0]) + 1 if len(beyond) else len(run.time)

    def _near(self, a: Choice, b: Choice) -> bool:
        between = abs(a.run.time[a.frame] - b.run.time[b.frame])
        return a.run is b.run and (a.frame == b.frame or bool(between < self.apart - 1e-9))


@SELECTIONS.register("random")
class Random(Selection):
    """Selects frames of the same dynamics at random with equal probability, for comparison."""

    def __call__(self, runs: Sequence[Trajectory], count: int, rng: np.random.Generator) -> list[Choice]:
        every = [Choice(run, k, "random") for run in runs for k in np.flatnonzero(run.regular).tolist()]
        drawn = rng.permutation(len(every))[:count]
        return [every[k] for k in drawn.tolist()]


# --- Selected frames with their origin ---


def frames_of(choices: Sequence[Choice], starts: Sequence[Atoms], number: int) -> list[Atoms]:
    """Return selected frames; `info` holds round, reason, spread (eV/Å), temperature (K), time (ps), replica, start.

    Args:
        choices: the selection.
        starts: the structures from which the replicas started.
        number: number of the round in which they will be labelled.
    """
    frames = []
    for run, k, reason in choices:
        atoms = starts[run.start].copy()
        atoms.calc = None
        atoms.set_positions(run.pos[k], apply_constraint=False)
        kept = {name: atoms.info[name] for name in ("charge", "spin") if name in atoms.info}
        atoms.info = {
            **kept, "round": number, "reason": reason, "spread": float(run.spread[k]),
            "temperature_K": run.temperature, "time_ps": float(run.time[k]), "replica": run.replica,
            "start": run.start,
        }  # fmt: skip
        frames.append(atoms)
    return frames


def keys_of(frames: Iterable[Atoms]) -> set[bytes]:
    """Return keys that identify frames: elements and positions, rounded to 10⁻⁶ Å."""
    return {_key(atoms.numbers, atoms.positions) for atoms in frames}


def unlabelled(runs: Sequence[Trajectory], starts: Sequence[Atoms], known: set[bytes]) -> list[Trajectory]:
    """Return the replicas without frames that are labelled already, such as many starts."""
    left = []
    for run in runs:
        numbers = starts[run.start].numbers
        new = np.array([_key(numbers, pos) not in known for pos in run.pos], dtype=bool)
        facts = {name: value for name, value in vars(run).items() if not isinstance(value, np.ndarray)}
        arrays = {name: value[new] for name, value in vars(run).items() if isinstance(value, np.ndarray)}
        left.append(Trajectory(**facts, **arrays))
    return left


def _key(numbers: NDArray[np.int64], pos: NDArray[np.float64]) -> bytes:
    return numbers.astype(np.int64).tobytes() + (np.round(pos, 6) + 0.0).tobytes()  # + 0.0: no negative zeros
