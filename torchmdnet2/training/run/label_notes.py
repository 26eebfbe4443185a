"""Notes on labels that cannot be right: signs and units that contradict each other, zeros, lost digits, duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...data import Statistics, statistics
from ...data.label_checks import Agreement, Usual, agreement, stress_agreement
from ...data.pair_regression import Factor, Regression, regression
from ...data.plausible import bond_scale, resolution, spread_out, stress_size, zeros
from ..steps.batches import Frames
from .fine_tuning import first_names, reference_energies

if TYPE_CHECKING:
    from .setup import Setup

__all__ = ["label_notes"]

_EVIDENCE = 8.0  # logarithm of the ratio of likelihoods
_PRECISE = 0.97  # correlation of similar frames, or share of the forces: the factor is known within a third
_PLAIN = 1e-3  # eV, by which energies of one structure may differ
_FAR = 30.0  # eV per atom, from single atoms
_STRESS = 5.0  # eV/Å³: 800 GPa
_BONDS = (0.65, 1.6)  # nearest distance over the sum of the covalent radii

_FORCES = {"kcal/mol": 23.06, "kJ/mol": 96.49, "1/bohr": 1 / 1.8897, "hartree": 1 / 27.211, "hartree/bohr": 1 / 51.422,
           "Ry/bohr": 1 / 25.711, "1/nm": 10.0}  # fmt: skip
_STRESSES = {"GPa": 160.22, "kbar": 1602.2, "bar": 1.6022e6, "Pa": 1.6022e11, "hartree/bohr³": 1 / 183.63}


def label_notes(setup: Setup) -> Iterator[str]:
    """What the labels of the training frames contradict, in words."""
    frames, known = setup.frames["train"], setup.statistics["train"]
    yield from _sizes(frames, known)
    yield from _other_labels(frames, known)
    yield from _references(setup)
    indices, usual = frames.indices, Usual(known)
    far = np.union1d(usual.forces(known), usual.energies(known))
    if len(far):  # reported separately
        indices = np.delete(indices, far)
        known = statistics(frames.data, indices)
    found = list(_contradictions(frames, indices, known))
    yield from found
    if not any(note.startswith("stresses") for note in found):
        yield from _stress_size(frames, setup.statistics["train"])


def _contradictions(frames: Frames, indices: np.ndarray, known: Statistics) -> Iterator[str]:
    """Forces that are not the negative gradients of the energies, stress that is not their derivative."""
    if "forces" not in known.labelled:
        return
    near = agreement(frames.data, indices, known)
    fitted = regression(frames.data, indices, known)
    said, scale = None, 1.0
    if fitted is not None and not _right(near):
        said = _energy_fault(fitted, known.sizes)
        scale = 1.0 if said is None else fitted.energy.value
    if said is not None and fitted is not None:
        yield (
            f"{said} Found with a pair potential that was fitted to the forces of {fitted.frames} training frames; "
            "see data.keys and data.units"
        )
    elif near is not None and near.fault is not None:
        scale = near.slope
        yield f"comparing similar training frames, {near.fault} See data.keys and data.units"
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


def _right(near: Agreement | None) -> bool:
    """Whether similar frames say clearly that forces and energies belong together."""
    return near is not None and near.correlation > 0.9 and 0.67 < near.slope < 1.5


def _energy_fault(fitted: Regression, sizes: np.ndarray) -> str | None:
    """What is wrong with energies that are a factor times what the forces predict; None where it cannot be told."""
    factor, whole, precise = fitted.energy, fitted.per_atom, fitted.explained > _PRECISE
    if whole.gain - factor.gain > _EVIDENCE and 0.5 < whole.value < 2:
        return (
            "energies look like energies per atom: times the number of atoms, they fit the forces. data.keys.energy "
            "must name the energy of the whole frame: are the units right?"
        )
    if factor.gain < _EVIDENCE:
        return None
    if factor.value < 0 and factor.positive > _EVIDENCE:
        return "forces have the wrong sign for the energies: are they gradients, or of another convention?"
    if (factor.close if precise else factor.near) < _EVIDENCE or factor.value < 0:
        return None
    said = f"changes of the energy are {factor.value:.2g} times those that forces make: are the units right?"
    if 0.6 < factor.value * sizes.mean() < 1.6:
        said += " Or are they energies per atom?"
    return said + (_meant(1 / factor.value, _FORCES) if precise else "")


def _meant(ratio: float, units: dict[str, float]) -> str:
    """A unit that would explain that labels are too large by a ratio."""
    name, known = min(units.items(), key=lambda item: abs(np.log(ratio / item[1])))
    return f" The ratio is that of {name}." if abs(np.log(ratio / known)) < 0.2 else ""


def _stress_fault(found: dict[str, Factor], scale: float) -> str | None:
    """The same of stresses: order of six numbers, sign, unit.

    Args:
        found: order of the components -> factor over what forces make.
        scale: what the factor should be: that of the energies.
    """
    plain = found.get("")
    if plain is None:
        return None
    best, factor = max(found.items(), key=lambda item: item[1].gain)
    if best and factor.gain - plain.gain > _EVIDENCE:
        return (
            f"the off-diagonal stress components are in another order than xx yy zz yz xz xy: they fit {best}. Write "
            "the stress as 3×3 or 9 numbers."
        )
    value = plain.value / scale
    if plain.gain < _EVIDENCE or 0.4 < value < 2.5:
        return None
    times = abs(value)
    if value > 0 and plain.near > _EVIDENCE:
        return f"stresses are {times:.3g} times what forces make: are the units right?{_meant(times, _STRESSES)}"
    if value < 0 and plain.gain > _EVIDENCE:
        size = f", and {times:.2g} times the size" if not 0.2 < times < 5 else ""
        virial = " A virial is read with data.keys.virial." if times > 5 else ""
        return f"stresses have the wrong sign{size}; tensile stress is positive.{virial} Are the units right?"
    return None


def _sizes(frames: Frames, known: Statistics) -> Iterator[str]:
    """Exact zeros, energies without digits, bonds of an impossible length."""
    chosen = spread_out(known)
    batch = frames.data.batch(frames.indices[chosen])
    found = zeros(batch, known, chosen)
    many = f"of {found.looked} training frames looked at"
    if len(found.frames):
        listed = first_names([frames.name(int(k)) for k in found.frames])
        yield f"forces are exactly 0 on all atoms in {len(found.frames)} {many}: {listed}. Write NaN for none"
    elif found.atoms > max(2, 1e-3 * batch.system.num_atoms):
        yield (
            f"forces are exactly 0 on {found.atoms} of {batch.system.num_atoms} atoms {many}: were they frozen? Label "
            "them without constraints, or with NaN"
        )
    if len(found.energies):
        listed = first_names([frames.name(int(k)) for k in found.energies])
        yield f"energies are exactly 0 in {len(found.energies)} training frames: {listed}. Write NaN for none"
    if len(found.stresses):
        listed = first_names([frames.name(int(k)) for k in found.stresses])
        yield f"stresses are exactly 0 in {len(found.stresses)} {many}: {listed}. Write NaN for none"
    step = resolution(known)
    if step is not None:
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


def _stress_size(frames: Frames, known: Statistics) -> Iterator[str]:
    """Stresses of an impossible size."""
    stress = stress_size(frames.data.batch(frames.indices[spread_out(known)]))
    if stress is not None and stress > _STRESS:
        yield (
            f"stresses are about {stress:.3g} eV/Å³, which is {160.2 * stress:.3g} GPa: are the units right? Set "
            "data.units.stress, as in GPa or kbar"
        )


def _other_labels(frames: Frames, known: Statistics) -> Iterator[str]:
    """Frames with the structure of another one and another energy."""
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
    """Reference energies that are of another method, or of none."""
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
