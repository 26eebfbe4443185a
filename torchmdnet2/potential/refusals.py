"""Checks of structures that a potential refuses to evaluate, and their error messages.

Shapes: N atoms, E directed edges, B structures.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.stated import ROUNDING
from ..errors import StructureWarning, UnknownElement, UntrainedCharge, UntrainedChargeWarning
from ..neighbors import NeighborList
from ..system import System

__all__ = [
    "SYMBOLS",
    "is_cramped",
    "refuse_charge",
    "refuse_elements",
    "refuse_neighbors",
    "refuse_odd_electrons",
    "refuse_precision",
    "refuse_spin",
    "rename",
    "require_flag",
    "require_potential",
    "require_stress",
    "require_system",
    "warn_of_units",
]  # fmt: skip


SYMBOLS = (
    "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr "
    "Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt "
    "Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv "
    "Ts Og"
).split()


def rename(error: Exception, name: str) -> None:
    """Put the user's name of a structure into an error that was raised for this structure alone."""
    words = str(error)
    error.args = (words.replace("structure 0", name, 1) if words.startswith("structure 0") else f"{name}: {words}",)


def require_potential(potential: Any) -> Any:
    """Return a Potential; raise TypeError with a remedy for anything else."""
    if isinstance(potential, str | os.PathLike):
        raise TypeError(f"a Potential is needed, got the path of a file: give torchmdnet2.load({str(potential)!r})")
    if not hasattr(potential, "representation"):
        raise TypeError(f"a Potential is needed, got {type(potential).__name__}")
    return potential


def require_flag(value: Any, name: str, others: str = "") -> bool:
    """Return True or False; raise ValueError for anything else, such as "yes", which Python would take for True.

    Args:
        value: what was given; also 0 and 1, and a single boolean of NumPy or PyTorch.
        name: of the argument, for the message.
        others: what else is allowed, for the message, as "'auto', ".
    """
    if value is True or value is False:  # at each step of a simulation
        return value
    single = value.item() if isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0 else value
    if not isinstance(single, int) or single not in (0, 1):
        raise ValueError(f"{name} must be {others}True or False, got {value!r}")
    return bool(single)


def require_system(system: Any) -> System:
    """Return a System; raise TypeError with a remedy for anything else."""
    if not isinstance(system, System):
        remedy = "System.from_ase(atoms)" if hasattr(system, "get_positions") else "System(z=…, pos=…)"
        raise TypeError(f"a potential evaluates a torchmdnet2.System, got {type(system).__name__}: give {remedy}")
    return system


def require_stress(system: System) -> None:
    """Raise ValueError unless every structure has a cell with a volume."""
    flat = system.detach().volume == 0
    if bool(flat.any()):
        raise ValueError(f"structure {int(flat.nonzero()[0, 0])} has no cell with a volume, so it has no stress")


def refuse_precision(dtype: torch.dtype, what: str = "a potential") -> None:
    """Refuse weights or positions of 16 bits, whose three digits would give energies with errors of tenths of eV."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{what} in {str(dtype).removeprefix('torch.')}: only float32 and float64 have the digits that energies "
            "and forces need; use .float() or .double()"
        )


def refuse_spin(system: System, reads_spin: bool, closed_shell: bool = False) -> None:
    """Refuse a spin state that the model would ignore; the lowest one, multiplicity 1 or 2, is assumed.

    Every model refuses a multiplicity that the number of electrons excludes, since the charge or an H atom is wrong.

    Args:
        system: B structures.
        reads_spin: True for a model whose energy depends on the spin.
        closed_shell: True for a model that was trained on closed shells only.
    """
    if not bool(system.spin.any()):
        return
    high = system.spin > 2
    if not reads_spin and bool(high.any()):
        first = int(high.nonzero()[0, 0])
        known = "was trained on closed shells only" if closed_shell else "knows only the lowest spin state"
        that = "the closed shell, if the molecule has such a state" if closed_shell else "that one"
        raise ValueError(
            f"structure {first} has spin multiplicity {int(system.spin[first])}, and this model {known}; leave spin at "
            f"0 (and initial magnetic moments out) to evaluate {that}"
        )
    electrons = system.electrons
    impossible = (system.spin > 0) & ((electrons + system.spin) % 2 == 0)
    if bool(impossible.any()):
        first = int(impossible.nonzero()[0, 0])
        raise ValueError(
            f"structure {first} has spin multiplicity {int(system.spin[first])}, which its {float(electrons[first]):g} "
            f"electrons (total charge {float(system.charge[first]):g}) exclude: one of the charge, the multiplicity "
            "(2S+1) and the H atoms is wrong"
        )


def refuse_charge(system: System, trained: Sequence[float] | None, reads: bool, model: str, allow: bool) -> None:
    """Refuse a total charge that the model was not trained on or does not see.

    A model that does not see the charge gives the same numbers for all charges. It knows the common charge of its
    training structures, or 0 if they differ.

    Args:
        system: B structures.
        trained: charges of the training in e; None: not stated.
        reads: True if the model sees the charge.
        model: name of the model, for the message.
        allow: warn instead.

    Raises:
        UntrainedCharge: a charge is refused; the message names the structure.
    """
    known = trained
    if not reads and (trained is None or len(trained) > 1):
        known = [0.0] if trained is None or 0 in trained else []
    if known is None:
        return
    charge = system.charge.detach()
    unknown = torch.ones_like(charge, dtype=torch.bool)
    for value in known:
        unknown &= (charge - value).abs() > ROUNDING
    if not bool(unknown.any()):
        return
    first = int(unknown.nonzero()[0, 0])
    value = float(charge[first])
    words = f"the total charge {value:g}, "
    if trained is not None and value not in trained:
        listed = ", ".join(f"{q:g}" for q in trained)
        words += f"and this model was trained on structures of charge {listed} only"
    else:
        words += f"which this model ({model}) does not use: its results are the same for all"
    _refuse(first, words, allow)


def refuse_odd_electrons(system: System, allow: bool, protons: torch.Tensor | None = None) -> None:
    """Refuse structures that have an unpaired electron, for a model of closed shells.

    Args:
        system: B structures.
        allow: warn instead.
        protons: [B] sums of the atomic numbers, if the system does not hold all atoms.

    Raises:
        UntrainedCharge: the number of electrons is odd; the message names the structure.
    """
    charge = system.charge.detach()
    electrons = system.electrons if protons is None else protons - charge
    odd = electrons.round() % 2 == 1
    if bool(odd.any()):
        first = int(odd.nonzero()[0, 0])
        words = (
            f"an odd number of electrons, {float(electrons[first]):g} with the total charge {float(charge[first]):g}, "
            "and this model was trained on closed shells only: check the charge and the H atoms"
        )
        _refuse(first, words, allow)


def _refuse(first: int, words: str, allow: bool) -> None:
    """Raise UntrainedCharge about a structure, or warn."""
    if allow:
        warnings.warn(f"a structure has {words}; it is evaluated nevertheless", UntrainedChargeWarning, stacklevel=3)
        return
    raise UntrainedCharge(
        f"structure {first} has {words}; allow_untrained_charge=True where the model is opened (on the command line "
        "--allow-untrained-charge) evaluates it nevertheless"
    )


def refuse_elements(z: torch.Tensor, known: torch.Tensor, trained: Sequence[int], name: Callable[[int], str]) -> None:
    """Refuse atoms whose element the model was not trained on.

    Args:
        z: [N] atomic numbers.
        known: booleans by atomic number.
        trained: atomic numbers, for the message.
        name: function that returns the name of an atom from its index, for the message.

    Raises:
        UnknownElement: an element is unknown; the message names the first atom.
    """
    top = known.shape[0]
    unknown = ~known[z.clamp(0, top - 1)] | (z < 0) | (z >= top)
    if bool(unknown.any()):
        atom = int(unknown.nonzero()[0, 0])
        number = int(z[atom])
        found = f"{SYMBOLS[number]} (Z = {number})" if 0 < number < len(SYMBOLS) else f"Z = {number}"
        listed = ", ".join(SYMBOLS[e] if e < len(SYMBOLS) else str(e) for e in trained)
        raise UnknownElement(
            f"{name(atom)} is {found}, and this model knows only {listed}: take one that knows it "
            "(`torchmdnet2 models`), or train one"
        )


_CRAMPED = 0.35  # Å; bonds are 0.74 Å or longer
_ONE_PLACE = 0.01  # Å; adapters check elements and charge with all atoms at one place


def warn_of_units(system: System, names: Sequence[object] = ()) -> None:
    """Warn of positions that cannot be in Å: each of three atoms or more has another one within half of any bond.

    The first 64 atoms of the first structure are compared with its first 1,024. names: of the structures.
    """
    nearest = _nearest(system)
    if bool(_all_cramped(nearest)):
        name = names[0] if names else "structure 0"
        warnings.warn(
            f"each atom of {name} is within {float(nearest.max()):.2f} Å of another one, and positions are in Å: "
            "if these are in nm, multiply positions and cell by 10",
            StructureWarning,
            stacklevel=2,
        )


def is_cramped(system: System) -> Tensor:
    """Return whether `warn_of_units` would warn, [] on the device."""
    return _all_cramped(_nearest(system))


def _nearest(system: System) -> Tensor:
    """Return distances of nearest neighbors, of the first 64 atoms of the first structure; infinite for two or less."""
    pos = (system.pos if system.num_systems == 1 else system.pos[system.batch == 0])[:1024]
    if len(pos) < 3:
        return pos.new_full((1,), torch.inf)
    distances = torch.cdist(pos[:64], pos, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.fill_diagonal_(torch.inf).min(1).values


def _all_cramped(nearest: Tensor) -> Tensor:
    return ((nearest < _CRAMPED) & (nearest > _ONE_PLACE)).all()


def refuse_neighbors(neighbors: NeighborList, system: System, cutoff: float) -> None:
    """Refuse a list that lacks edges of this system."""
    if neighbors.half:
        raise ValueError("neighbors: the model needs both directions of each pair, and this list has one (half=True)")
    if neighbors.cutoff < cutoff:
        raise ValueError(f"neighbors: the model's cutoff is {cutoff} Å, and this list ends at {neighbors.cutoff} Å")
    if len(neighbors.row_ptr) != system.num_atoms + 1:
        raise ValueError(f"neighbors: a list of {len(neighbors.row_ptr) - 1} atoms, not of {system.num_atoms}")
