"""Notes before a training on its data: repeated frames, leaks, labels that contradict each other, odd units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...data import CachedDataset, ConcatDataset, Dataset, HDF5Dataset, Statistics, statistics
from ...data.label_checks import (
    Agreement,
    Usual,
    agreement,
    bond_scale,
    net_force,
    resolution,
    shifted,
    spread_out,
    stress_agreement,
    stress_size,
    turned,
    zeros,
)
from ...data.pair_regression import EVIDENCE, ORDERS, PLAIN, VASP, Factor, Regression, regression
from ...neighbors.frames import EdgeMemory
from ...potential.potential import SYMBOLS
from ..config.sections import epoch_of
from ..steps.batches import Frames
from .fine_tuning import first_names, reference_energies
from .levels import shared_notes
from .references import singles
from .subsets import files_of

if TYPE_CHECKING:
    from .setup import Setup


__all__ = ["closest_pair", "data_notes", "label_notes"]


_OFF = 0.1  # eV
_CLOSE = 0.6  # Å; the bond of H₂ is 0.74 Å
_EDGES = 20_000_000  # looked at for close atoms, at most

_STATES = {"charge": r"charge(?!s)|^q$|^fparam$", "spin": r"spin(?!s)|multiplicity|(^|_)mult(_|$)"}
"""Key -> pattern of other names for it."""


def data_notes(setup: Setup, total_steps: int) -> list[str]:
    """Return notes about settings and data that are allowed and look like mistakes.

    Args:
        setup: of the run.
        total_steps: of the training.
    """
    names = setup.potential.level_names
    parts = [(f"{name}: ", _of_level(setup, k)) for k, name in enumerate(names)] if names else [("", setup)]
    return [
        *(f"{name}{note}" for name, part in parts if part is not None for note in _notes_of_labels(part)),
        *_leaks(setup),
        *shared_notes(setup.frames["train"], setup.statistics["train"], names, setup.config.levels),
        *_doubts(setup),
        *_unread(setup),
        *_settings(setup, total_steps),
    ]


def _notes_of_labels(setup: Setup) -> list[str]:
    """Return notes about frames and labels of one level of theory."""
    return [
        *_repetitions(setup),
        *label_notes(setup),
        *_standing_out(setup),
        *_close_atoms(setup),
        *_single_atoms(setup),
        *_ignored(setup),
        *_groups(setup),
    ]


def _of_level(setup: Setup, level: int) -> Setup | None:
    """Return the part of a run at one level of theory; None without training frames."""
    frames = {}
    for name, part in setup.frames.items():  # each once: a source with a share repeats some
        distinct, _ = part.once
        frames[name] = distinct.of(distinct.levels == level)
    frames = {name: part for name, part in frames.items() if len(part)}
    if "train" not in frames:
        return None
    return replace(
        setup,
        potential=setup.potential.at_level(setup.potential.level_names[level]),
        frames=frames,
        statistics={name: statistics(part.data, part.indices) for name, part in frames.items()},
    )


def _repetitions(setup: Setup) -> Iterator[str]:
    """Yield a note about structures that are in the training set twice."""
    drawn = setup.frames["train"]
    _, first = np.unique(drawn.indices, return_index=True)  # a bootstrap draws some of them repeatedly
    train = setup.statistics["train"].keys[np.sort(first)]
    again = len(train) - len(np.unique(train))
    if again:
        yield f"{again} of {len(train)} training frames repeat the structure of another one"


def _leaks(setup: Setup) -> Iterator[str]:
    """Yield notes about structures that are in two subsets, at one level of theory or at two."""
    levels = setup.potential.level_names or [""]
    remedy = "; files for validation and test of each source avoid that" if setup.config.data.sources else ""
    seen: dict[str, Frames] = {"training": setup.frames["train"]}
    for name in ("validation", "test"):
        if name not in setup.frames:
            continue
        frames, keys = setup.frames[name], setup.statistics[name].keys
        for k, level in enumerate(levels):
            of_level = np.flatnonzero(frames.levels == k) if level else np.arange(len(frames))
            for other, known in seen.items():
                theirs = setup.statistics["train" if other == "training" else other].keys
                found = of_level[np.isin(keys[of_level], theirs)]
                if not len(found):
                    continue
                there = ""
                if level:
                    at = np.unique(known.levels[np.isin(theirs, keys[found])])
                    there = f" of {', '.join(levels[j] for j in at)}"
                yield (
                    f"{f'{level}: ' if level else ''}{len(found)} of {len(of_level)} {name} frames have the same "
                    f"structure as {other} frames{there} (the first: {frames.name(int(found[0]))}): their errors say "
                    f"little about new structures{remedy}"
                )
        seen[name] = frames


def _groups(setup: Setup) -> Iterator[str]:
    """Yield notes about relative energies that are trained and not validated, and about groups that are divided."""
    train, frames = setup.frames["train"], setup.frames.get("validation")
    trained = setup.config.training.loss.relative_energy > 0 and train.has_groups
    largest, batch = int(np.bincount(train.once[0].groups).max()), setup.config.training.batch_size
    if trained and setup.config.training.max_atoms is None and largest > batch:
        yield (
            f"groups have up to {largest} training frames, and training.batch_size is {batch}: they are divided, and "
            "the loss takes energies relative to the mean of a part. A larger batch keeps them whole"
        )
    if trained and frames is not None and not frames.has_groups:
        yield (
            "no two validation frames are of one group: the validation loss has no relative energies; "
            "data.validation names a file of whole groups"
        )
    for name, other in setup.frames.items():
        split = name != "train" and other.data is train.data
        if split and (count := int(np.isin(np.unique(other.group_entries), train.group_entries).sum())):
            yield (
                f"{count} groups of {name} frames have training frames, too, because there are too few groups to split "
                "them: errors say little about other groups"
            )


def _standing_out(setup: Setup) -> Iterator[str]:
    """Yield notes about frames with labels that are far from those of the training frames."""
    usual = Usual(setup.statistics["train"])
    for name, found in setup.statistics.items():
        frames, what = setup.frames[name], "training" if name == "train" else name
        far = usual.forces(found)
        if len(far):
            rms = np.sqrt(found.force_square[far] / found.force_count[far])
            listed = first_names([f"{frames.name(int(k))} ({value:.3g})" for k, value in zip(far, rms, strict=True)])
            yield (
                f"{what} frames have far larger forces than the others: {listed}; rms in eV/Å, where the median "
                f"training frame has {usual.median_force:.3g}. Are these labels right?"
            )
        far = usual.energies(found)
        if len(far):
            listed = first_names([frames.name(int(k)) for k in far])
            yield f"{what} frames have energies far from those of their atoms elsewhere: {listed}. Are they right?"


def _close_atoms(setup: Setup) -> Iterator[str]:
    """Yield notes about atoms that are closer than any bond, or at one place."""
    for name, frames in setup.frames.items():
        most = int(_EDGES / max(1.0, float(frames.edges.mean())))
        distance, where = closest_pair(frames, max(1, most))
        if distance < _CLOSE:
            what = "training" if name == "train" else name
            yield (
                f"{what} frames have atoms {distance:.3f} Å from each other, in {where}: closer than any bond. Is "
                "data.units.length right, or that frame?"
            )


def _doubts(setup: Setup) -> Iterator[str]:
    """Yield notes about entries of the files that put their labels in doubt."""
    for part in dict.fromkeys(part for frames in setup.frames.values() for part in _parts(frames.data)):
        yield from getattr(part, "doubts", ())


def _unread(setup: Setup) -> Iterator[str]:
    """Yield notes about entries of the files that look like a charge or a spin and are not read, if none is read."""
    config = setup.config.data
    if config.dataset is not None:
        return
    read: dict[str, set[str]] = {}  # by file: a source may have its own keys
    for section in config.parts:
        own = {key for key in section.keys.model_dump().values() if isinstance(key, str)}
        for name, frames in setup.frames.items():
            for file in files_of(section, name, frames.data):
                read.setdefault(file, set()).update(own)
    everything = set().union(*read.values())
    for part in dict.fromkeys(part for frames in setup.frames.values() for part in _parts(frames.data)):
        for key, pattern in _STATES.items():
            known = read.get(str(getattr(part, "path", "")), everything)
            found = sorted(getattr(part, "available", ()))
            names = [n for n in found if re.search(pattern, n.lower()) and n not in known]
            if names and not getattr(part, "counts", {}).get(key):
                meaning = "0 in all frames" if key == "charge" else "1 (a singlet) in all frames"
                yield (
                    f"{', '.join(map(repr, names))} in {getattr(part, 'path', 'the data')} is not read, and the "
                    f"{'total charge' if key == 'charge' else 'spin multiplicity'} is taken as {meaning}; if it says "
                    f"otherwise, set data.keys.{key}: {names[0]}"
                )


def _parts(data: Dataset) -> Sequence[Dataset]:
    """Return the files of a data set."""
    return [file for part in data.datasets for file in _parts(part)] if isinstance(data, ConcatDataset) else [data]


def _single_atoms(setup: Setup) -> Iterator[str]:
    """Yield notes about single atoms whose energies the model cannot learn: it gives them exactly their reference
    energies."""
    if "energy" not in setup.asked:
        return
    references, frames = reference_energies(setup.potential), setup.frames["train"]
    wrong: dict[int, tuple[float, str]] = {}
    for z, energy, where, fault in singles(frames.data, frames.indices):
        error = references.get(z, 0.0) - energy
        if fault is None and abs(error) > max(_OFF, abs(wrong.get(z, (0.0, ""))[0])):
            wrong[z] = error, where
    if wrong:
        listed = ", ".join(f"{SYMBOLS[z]} {error:+.2f} eV ({where})" for z, (error, where) in sorted(wrong.items()))
        yield (
            "single atoms have exactly the reference energies of the model, which differ from the labels of training "
            f"frames: {listed}. Take the labels, with priors: [{{name: atomref, energies: isolated}}], or leave these "
            "frames out"
        )


def _ignored(setup: Setup) -> Iterator[str]:
    """Yield notes about total charges or spins that differ and that the model does not use; charges that it is not
    trained on."""
    found, potential = setup.statistics["train"], setup.potential
    seen = {"charge": potential.reads_charge, "spin": potential.representation.reads_spin}
    for name, values in (("charge", found.charges), ("spin", found.spins)):
        if len(values) > 1 and not seen[name]:
            what = "total charges" if name == "charge" else "spin multiplicities"
            listed, model = first_names([str(v) for v in values]), setup.config.model["name"]
            yield f"training frames have the {what} {listed}, which {model} does not use"
    if found.impossible_spins:
        yield (
            f"{found.impossible_spins} training frames have a spin multiplicity that their number of electrons "
            "excludes: is their total charge missing, or is the entry a number of unpaired electrons (2S)? See "
            "data.keys.charge and data.keys.spin"
        )
    for subset in ("validation", "test"):
        if subset in setup.statistics and potential.total_charges is not None:
            new = [str(q) for q in setup.statistics[subset].charges if q not in potential.total_charges]
            if new:
                yield f"{subset} frames have the total charges {first_names(new)}, which no training frame has"
        if subset in setup.statistics and potential.closed_shell and setup.statistics[subset].odd_electrons:
            count = setup.statistics[subset].odd_electrons
            yield f"{count} {subset} frames have an odd number of electrons, which no training frame has"


def _settings(setup: Setup, total_steps: int) -> Iterator[str]:
    training = setup.config.training
    if training.warmup_steps >= total_steps:
        yield (
            f"training.warmup_steps is {training.warmup_steps}, and there are {total_steps} steps in all: the learning "
            "rate never reaches training.lr"
        )
    for key, stage in (("swa", training.swa), ("loss.schedule", training.loss.schedule)):
        if stage is not None and epoch_of(stage.start, training.max_epochs) >= training.max_epochs:
            yield (
                f"training.{key}.start is {stage.start}, and there are {training.max_epochs} epochs, counted from 0: "
                "the stage never starts"
            )
    if training.loss.relative_energy == 0 and any(part.keys.group for part in setup.config.data.parts):
        yield (
            "data.keys.group keeps groups whole in a random split; relative energies in a group have no weight in the "
            "loss: set training.loss.relative_energy to train them"
        )
    frames = setup.frames["train"]
    if training.max_atoms is None and training.max_edges is None and training.batch_size > len(frames):
        size = training.batch_size
        yield f"training.batch_size is {size}, and there are {len(frames)} training frames: 1 step per epoch"
    slow = isinstance(frames.data, HDF5Dataset) or (isinstance(frames.data, CachedDataset) and _searches(frames))
    if setup.config.data.num_workers and not slow:
        yield ("data.num_workers has no benefit: the frames are already in memory. Set it to 0")


def _searches(frames: Frames) -> bool:
    return isinstance(frames.lists, EdgeMemory)


def closest_pair(frames: Frames, most: int = 2000) -> tuple[float, str]:
    """Return the smallest distance between two atoms, Å, and the frame that it is in.

    Args:
        frames: at most `most` of them, evenly spread, are searched.

    Returns:
        (inf, "") if no two atoms are within the cutoff.
    """
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), most)).astype(int))
    least, where = float("inf"), ""
    for part in np.array_split(chosen, -(-len(chosen) // 64)):
        batch = frames.batch(part)
        distances = batch.neighbors.distances(batch.sample.system)
        if len(distances) and float(distances.min()) < least:
            edge = int(distances.argmin())
            owner = int(batch.sample.system.batch[batch.neighbors.edge_index[0, edge]])
            least, where = float(distances[edge]), frames.name(int(part[owner]))
    return least, where


# --- Notes on labels that cannot be right: contradicting signs and units, zeros, lost digits, duplicates ---

_SIMILAR = 0.9  # correlation of similar frames: their factor is known within a third
_PRECISE = 0.87  # share of the forces: the factor of right labels was within 0.58 and 1.12
_SCATTER = "not correlated"  # words of notes about noise
_FREEDOM, _NO_RELATION = 40, 4.0  # numbers compared; right labels had 24 and more, in the logarithm of likelihoods
_DESCRIBED = 0.3  # of the variance of the forces by a pair potential: less, and they are not of these structures
_SMALL = 0.1  # eV/Å, rms of forces that may be noise of relaxed structures
_PLAIN = 1e-3  # eV, by which energies of one structure may differ
_FAR = 30.0  # eV per atom, from single atoms
_STRESS = 5.0  # eV/Å³: 800 GPa
_MOST_TURNED = 0.7  # of the frames, if some are turned; atoms with another sign turn nearly all
_NET, _NET_PER_ATOM = 0.05, 0.02  # sum of the forces over their size; eV/Å, above that of coarse grids
_APART = 0.45  # logarithm of the ratio of factors that cannot be distinguished
_BONDS = (0.65, 1.6)  # nearest distance over the sum of the covalent radii

_ENERGIES = {
    "energies in kcal/mol": 23.06, "energies in kJ/mol": 96.49, "energies in hartree": 1 / 27.211,
    "energies in Ry": 1 / 13.606, "forces in kcal/mol/Å": 1 / 23.06, "forces in kJ/mol/Å": 1 / 96.49,
    "forces in kJ/mol/nm": 1 / 964.9, "forces in eV/nm": 0.1, "forces in eV/bohr": 1.8897,
    "forces in hartree/Å": 27.211, "forces in hartree/bohr": 51.422, "forces in Ry/bohr": 25.711,
}  # fmt: skip
"""Unit, if the other labels are in eV and Å -> changes of the energy over those that follow from the forces."""

_STRESSES = {"GPa": 160.22, "kbar": 1602.2, "bar": 1.6022e6, "Pa": 1.6022e11, "hartree/bohr³": 1 / 183.63}


def label_notes(setup: Setup) -> Iterator[str]:
    """Yield notes about contradictions between labels of the training frames."""
    frames, known = setup.frames["train"], setup.statistics["train"]
    sizes = list(_sizes(frames, known))
    yield from sizes
    yield from _other_labels(frames, known)
    yield from _references(setup)
    indices, usual = frames.indices, Usual(known)
    far = np.union1d(usual.forces(known), usual.energies(known))
    if len(far):  # reported separately
        indices = np.delete(indices, far)
        known = statistics(frames.data, indices)
    found = list(_contradictions(frames, indices, known))
    sums, (torque, share) = list(_sums(setup)), _torque(setup)
    if torque:  # it says what is wrong, where others say that something is; signs and units of frames make no torque
        less = [_SCATTER, "opposite to that of the others", "were mixed"]
        less += ["that of the other atoms"] * (share < _MOST_TURNED) + ["belong together?"] * (not sums)
        found = [note for note in found if not any(words in note for words in less)]
    clear = any("fits them much better" in note for note in found) or any("energies are exactly 0" in n for n in sizes)
    if clear or any("above those of the others" in note for note in sums):
        found = [note for note in found if _SCATTER not in note]
    if not clear:  # which says more
        found += [*sums, *torque]
    yield from found
    if not any(note.startswith("stresses") for note in found):
        yield from _stress_size(frames, setup.statistics["train"])


def _contradictions(frames: Frames, indices: np.ndarray, known: Statistics) -> Iterator[str]:
    """Yield notes about forces that are not the negative gradients of the energies, stress that is not their
    derivative."""
    if "forces" not in known.labelled:
        return
    near = agreement(frames.data, indices, known)
    fitted = regression(frames.data, indices, known)
    said, scale = None, 1.0
    if fitted is not None and fitted.cell is not None:
        yield (
            f"the cell of {len(fitted.frames)} checked training frames looks wrong: a pair potential fits them much "
            f"better {fitted.cell}. Do positions, lattice vectors (rows) and periodicity belong together, in one unit?"
        )
        return
    if fitted is not None:
        yield from _of_some(frames, indices, fitted)
        if fitted.forces is not None or fitted.energies is not None:
            near = None  # it compares the labels with their fault
    if fitted is not None and fitted.energy is not None and not _right(near):
        said = _energy_fault(fitted, fitted.energy, known.sizes, near)
        scale = 1.0 if said is None or _SCATTER in said else fitted.energy.value
    if said is not None and fitted is not None:
        yield (
            f"{said} Found with a pair potential that was fitted to the forces of {len(fitted.frames)} training "
            "frames; see data.keys and data.units"
        )
    elif (
        near is not None
        and near.fault is not None
        and (not _agree(fitted) or abs(near.correlation) > _SIMILAR or _SCATTER in near.fault)
    ):
        scale = near.slope if _SCATTER not in near.fault else 1.0
        meant = _meant(scale, _ENERGIES) if "times those" in near.fault else ""
        yield f"comparing similar training frames, {near.fault}{meant} See data.keys and data.units"
    if "stress" not in known.labelled:
        return
    near = stress_agreement(frames.data, indices, known)
    said = None
    if fitted is not None and fitted.stress:
        said = _stress_fault(fitted.stress, scale)
    if said is not None:
        yield f"{said} Found with a pair potential that was fitted to the forces; see data.keys and data.units"
    elif near is not None and near.fault is not None and scale == 1.0:  # with wrong forces it means nothing
        yield f"comparing similar training frames, {near.fault} See data.keys and data.units"


def _agree(fitted: Regression | None) -> bool:
    """Return whether the pair potential says clearly that forces and energies belong together."""
    factor = None if fitted is None else fitted.energy
    return factor is not None and factor.gain > EVIDENCE > factor.near and factor.value > 0


def _right(near: Agreement | None) -> bool:
    """Return whether similar frames say clearly that forces and energies belong together."""
    return near is not None and near.correlation > 0.9 and 0.69 < near.slope < 1.45


def _of_some(frames: Frames, indices: np.ndarray, fitted: Regression) -> Iterator[str]:
    """Yield notes about forces with other axes or of other frames, and about some labels that differ from the
    others."""
    for what, fault in (("forces", fitted.forces), ("energies", fitted.energies)):
        if fault is None:
            continue
        atoms = len(fault.having) != len(fitted.frames)
        where = "" if atoms else f" (the first: {frames.data.name(int(indices[fitted.frames[fault.having.argmax()]]))})"
        yield (
            f"{what} of {fault.having.sum()} of {len(fault.having)} checked training {'atoms' if atoms else 'frames'} "
            f"{fault.name}{where}: a pair potential fits them much better then. Correct the file"
        )
    if fitted.explained < _DESCRIBED and fitted.size > _SMALL:
        yield (
            f"a pair potential describes {max(0.0, fitted.explained):.0%} of the forces of {len(fitted.frames)} "
            "training frames, where 70 % and more is usual: do forces, positions and elements belong together?"
        )


def _energy_fault(fitted: Regression, factor: Factor, sizes: np.ndarray, near: Agreement | None) -> str | None:
    """Return the fault of energies that are a factor times those that the forces predict; None if it is not clear.

    The factor of similar frames is used where it is known, since it is nearer to the right one.
    """
    precise, whole = fitted.explained > _PRECISE, fitted.per_atom
    if whole is None:
        return None
    if whole.beats(factor):
        return (
            "energies look like energies per atom: times the number of atoms, they fit the forces. data.keys.energy "
            "must name the energy of the whole frame: are the units right?"
        )
    if precise and fitted.freedom >= _FREEDOM and factor.gain < _NO_RELATION:
        return (
            "energies and forces are not correlated: are the energies of one method, one electronic state, converged, "
            "and of these structures?"
        )
    if factor.gain < EVIDENCE:
        return None
    if factor.value < 0 and factor.positive > EVIDENCE:
        return "forces have the wrong sign for the energies: are they gradients, or do they follow another convention?"
    if (factor.close if precise else factor.near) < EVIDENCE or factor.value < 0:
        return None
    similar = near is not None and near.correlation > _SIMILAR
    value = near.slope if near is not None and similar else factor.value
    said = f"changes of the energy are {value:.2g} times those that follow from the forces: are the units right?"
    if 0.6 < value * sizes.mean() < 1.6:
        said += " Or are they energies per atom?"
    return said + (_meant(value, _ENERGIES) if precise or similar else "")


def _meant(factor: float, units: dict[str, float]) -> str:
    """Return the units that may explain a factor, nearest first: that of right labels is 0.6 to 1.1 by a pair
    potential."""
    apart = {name: abs(np.log(factor / known)) for name, known in units.items()}
    names = sorted((name for name in apart if apart[name] < _APART), key=apart.__getitem__)
    if len(names) < 2:
        return f" The ratio is that of {names[0]}." if names else ""
    listed = (f"{n} ({units[n]:.3g})" if units[n] >= 1 else f"{n} (1/{1 / units[n]:.3g})" for n in names)
    return f" Units with nearly this factor, nearest first: {', '.join(listed)}."


def _stress_fault(found: dict[str, Factor], scale: float) -> str | None:
    """Return the fault of stresses: order of six numbers, sign, unit.

    Args:
        found: order of the components -> factor over the stress that follows from the forces.
        scale: the expected factor, that of the energies.
    """
    plain = found.get(PLAIN)
    if plain is None:
        return None
    best, factor = max(found.items(), key=lambda item: item[1].gain)
    if best != PLAIN and factor.gain - plain.gain > EVIDENCE:
        if best not in ORDERS:
            return f"stresses {best}: they fit the forces much better then. Correct the file."
        vasp = ", as VASP's" if best == VASP else ""
        return (
            f"the off-diagonal stress components are in another order than xx yy zz yz xz xy: they fit {best}{vasp}. "
            "Write the stress as 3×3 or 9 numbers."
        )
    value = plain.value / scale
    if plain.gain < EVIDENCE or 0.4 < value < 2.5:
        return None
    times = abs(value)
    if value > 0 and plain.near > EVIDENCE:
        said = f"stresses are {times:.3g} times those that follow from the forces: are the units right?"
        return said + _meant(times, _STRESSES)
    if value < 0 and plain.gain > EVIDENCE:
        size = f", and {times:.2g} times the size" if not 0.2 < times < 5 else ""
        virial = " A virial is read with data.keys.virial." if times > 5 else ""
        return f"stresses have the wrong sign{size}; tensile stress is positive.{virial} Are the units right?"
    return None


def _sizes(frames: Frames, known: Statistics) -> Iterator[str]:
    """Yield notes about exact zeros, energies without digits, bonds of an impossible length."""
    chosen = spread_out(known)
    batch = frames.data.batch(frames.indices[chosen])
    found = zeros(batch, known, chosen)
    many = f"of {found.looked} checked training frames"
    if len(found.frames):
        listed = first_names([frames.name(int(k)) for k in found.frames])
        yield f"forces are exactly 0 on all atoms in {len(found.frames)} {many}: {listed}. Write NaN for none"
    elif found.atoms > max(2, 1e-3 * batch.system.num_atoms):
        yield (
            f"forces are exactly 0 on {found.atoms} of {batch.system.num_atoms} atoms {many}: were they frozen? Label "
            "them without constraints, or with NaN"
        )
    for axis, at in found.axes.items():
        if len(at) > max(2, 0.02 * found.looked):
            yield (
                f"the {axis} components of forces are exactly 0 on all atoms in {len(at)} {many}: "
                f"{first_names([frames.name(int(k)) for k in at])}. Was a column lost? Write NaN for none"
            )
    if len(found.energies):
        listed = first_names([frames.name(int(k)) for k in found.energies])
        yield f"energies are exactly 0 in {len(found.energies)} training frames: {listed}. Write NaN for none"
    if len(found.stresses):
        listed = first_names([frames.name(int(k)) for k in found.stresses])
        yield f"stresses are exactly 0 in {len(found.stresses)} {many}: {listed}. Write NaN for none"
    few = max(3, 0.02 * found.looked)
    if len(found.shears) > few:
        listed = first_names([frames.name(int(k)) for k in found.shears])
        yield (
            f"the off-diagonal stress components are exactly 0 in {len(found.shears)} {many}, whose structures are not "
            f"symmetric: {listed}. Write all components, or set data.keys.stress: null"
        )
    if len(found.same) > few:
        listed = first_names([frames.name(int(k)) for k in found.same])
        yield f"the same stress is in {len(found.same)} {many}, of different structures: {listed}. Correct the file"
    step = resolution(known)
    if step is not None and np.isinf(step):
        yield "the energy is the same in all training frames, of different structures. Correct the file"
    elif step is not None:
        yield (
            f"energies are multiples of {1e3 * step:.3g} meV: digits were lost, as in float32 or a rounded text. Write "
            "them again with all digits, or subtract energies of atoms before"
        )
    ratio = bond_scale(batch)
    if ratio is not None and not _BONDS[0] < ratio < _BONDS[1]:
        yield (
            f"nearest atoms are at {ratio:.2g} times the sum of their covalent radii, and should be near 1: is "
            "data.units.length right? A bohr is 0.529 Å"
        )


def _sums(setup: Setup) -> Iterator[str]:
    """Yield notes about energies that are shifted in some frames, and about forces that do not cancel."""
    frames, known = setup.frames["train"], setup.statistics["train"]
    chosen = spread_out(known)
    batch = frames.data.batch(frames.indices[chosen])
    found = shifted(batch, known, chosen)
    if found is not None:
        places, shift = found
        yield (
            f"energies of {len(places)} of {len(chosen)} checked training frames (the first: "
            f"{frames.name(int(places[0]))}) are {shift:.4g} eV above those of the others: are all of one method and "
            "one electronic state, with the same reference energies?"
        )
    net = net_force(batch)
    if net is not None and net[0] > _NET and net[1] > _NET_PER_ATOM:
        yield (
            f"forces do not cancel: their sum is {net[0]:.2g} times their size, {net[1]:.2g} eV/Å per atom, in the "
            "median frame, and 0 in the absence of a field and of fixed atoms. Is an offset in them, or were some "
            "atoms left out?"
        )


def _torque(setup: Setup) -> tuple[list[str], float]:
    """Return a note about forces that turn isolated molecules, if any, and the share of the frames with such forces.

    An entry that names a field explains them.
    """
    frames, known = setup.frames["train"], setup.statistics["train"]
    if any("field" in str(name).lower() for part in _parts(frames.data) for name in getattr(part, "available", ())):
        return [], 0.0
    chosen = spread_out(known)
    found = turned(frames.data.batch(frames.indices[chosen]), chosen)
    if found is None:
        return [], 0.0
    places, size = found
    note = (
        f"forces of {len(places)} of {len(chosen)} checked training frames (the first: {frames.name(int(places[0]))}) "
        f"turn the molecule: their torque Σ r × F is {size:.2g} times their size, and 0 without a field. Do they "
        "belong to another orientation than the positions, as Gaussian's to the input orientation, or to another "
        "structure? Take both from one, or compute with nosymm"
    )
    return [note], len(places) / len(chosen)


def _stress_size(frames: Frames, known: Statistics) -> Iterator[str]:
    """Note about stresses of an impossible size."""
    stress = stress_size(frames.data.batch(frames.indices[spread_out(known)]))
    if stress is not None and stress > _STRESS:
        yield (
            f"stresses are about {stress:.3g} eV/Å³, which is {160.2 * stress:.3g} GPa: are the units right? Set "
            "data.units.stress, as in GPa or kbar"
        )


def _other_labels(frames: Frames, known: Statistics) -> Iterator[str]:
    """Note about frames with the structure of another frame and another energy."""
    _, first, number = np.unique(known.keys, return_index=True, return_inverse=True)
    difference = np.abs(known.energies - known.energies[first][number.reshape(-1)])
    differ = np.flatnonzero((frames.indices != frames.indices[first][number.reshape(-1)]) & (difference > _PLAIN))
    if len(differ):
        worst = differ[difference[differ].argmax()]
        yield (
            f"{len(differ)} training frames have the structure of another one and another energy, by up to "
            f"{difference[worst]:.3g} eV ({frames.name(int(worst))} and "
            f"{frames.name(int(first[number.reshape(-1)[worst]]))}): they cannot both be learned"
        )


def _references(setup: Setup) -> Iterator[str]:
    """Note about reference energies of another method."""
    known, references = setup.statistics["train"], reference_energies(setup.potential)
    chosen = ~np.isnan(known.energies) & (known.sizes > 1)
    if "energy" not in setup.asked or not references or not chosen.any():
        return
    alone = known.counts @ np.array([references.get(z, 0.0) for z in known.elements])
    bound = float(np.median(((known.energies - alone) / known.sizes)[chosen]))
    if abs(bound) > _FAR:
        yield (
            f"energies are {bound:+.3g} eV per atom from the reference energies of the model, and bonds make less than "
            "10: are these of another method or unit? Set priors: [{name: atomref, energies: fit}]"
        )
