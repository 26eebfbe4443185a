"""Fits before training: reference energies, energy scale, scales and shifts of properties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data import LABELS
from ...determined import Determined
from ...errors import BadConfig
from ...potential import SYMBOLS, Potential
from ...system import System
from ..config.build_potential import load_priors, with_baseline
from ..config.config import Config
from ..config.labels import DIPOLE_NORM, property_of
from ..steps.batches import Frames, in_order
from .subsets import Compositions

__all__ = [
    "determined_by",
    "energy_scale",
    "fit_references",
    "least_change",
    "of_priors",
    "potential_config",
]

_AT_ONCE = 256  # frames
_UNKNOWN = 100.0  # how much more an element without a known value may change


def potential_config(
    config: Config, frames: Frames, facts: dict[str, Any], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """The potential's configuration with what is fitted: reference energies, energy scale, property scales.

    Args:
        config: of the run.
        frames: those of training.
        facts: of `survey`; the energies in it are reduced by those of the physical priors.
        device: that evaluates the priors.
    """
    subtract_priors(config, frames, facts, device)
    priors = []
    references: dict[int, float] = {}
    determined: Determined | None = None
    for prior in map(with_baseline, config.priors):
        if prior["name"] == "atomref":
            if isinstance(prior["energies"], str):  # auto, fit; fine-tuning, which also knows keep, has its own way
                known = facts["isolated"] if prior["energies"] == "auto" else {}
                references = fit_references(facts, config.atom_filter, known)
                determined = determined_by(facts, config.atom_filter, known) if facts["energies"] else None
                prior = {**prior, "energies": {str(z): energy for z, energy in references.items()}}
            else:
                references = {int(z): energy for z, energy in (prior["energies"] or {}).items()}
                require_references(references, facts["elements"])
        priors.append(prior)
    return {
        **config.parts(),
        "properties": [fit_property(head, frames) for head in config.properties],
        "priors": priors,
        "energy_scale": energy_scale(config, facts, references),
        "elements": facts["elements"],
        "total_charges": facts["charges"],
        "compositions": None if determined is None else determined.stored(),
    }


def require_references(references: Mapping[int, float], elements: Sequence[int], reasons: str = "") -> None:
    """Raise BadConfig unless every element has a reference energy.

    Args:
        references: element -> eV.
        elements: those that need one.
        reasons: text after the names of the missing ones.
    """
    missing = [SYMBOLS[z] for z in elements if z not in references]
    if missing:
        raise BadConfig(f"priors: atomref.energies has no entry for {', '.join(missing)}{reasons}")


def subtract_priors(config: Config, frames: Frames, facts: dict[str, Any], device: torch.device | str = "cpu") -> None:
    """Take the energies of the physical priors off `facts["energies"]`: references are fitted to what remains.

    Reference energies and priors that need the network's charges are left out.
    """
    potential = of_priors(config, ("atomref",))
    if not potential.priors:
        return
    potential = potential.to(device)
    positions = facts["energy_positions"]
    with torch.no_grad():
        for part in in_order(len(positions), _AT_ONCE):
            system = frames.data.batch(frames.indices[[positions[k] for k in part]]).system.to(potential.device)
            energies = potential.prior_energies(system) * (system.z > config.atom_filter)
            sums = energies.new_zeros(len(part)).index_add_(0, system.batch, energies)
            for k, energy in zip(part, sums.tolist(), strict=True):
                facts["energies"][k] -= energy


def of_priors(config: Config, without: Sequence[str]) -> Potential:
    """A potential whose `prior_energies` are those of the configuration's priors that need no charges of the network.

    Args:
        config: of the run.
        without: names of priors to leave out.
    """
    others = [prior for prior in config.priors if prior["name"] not in without]
    with torch.random.fork_rng(devices=[]):
        made = [with_baseline(prior) for prior in others]
        potential = Potential.from_config({"head": None, "priors": made}, Potential(config.representation(), None))
    load_priors(potential, others, config.base())
    known = [prior for prior in potential.priors if not prior.uses_charges]
    potential.priors = torch.nn.ModuleList(known)  # type: ignore[assignment]
    return potential


def fit_references(
    facts: dict[str, Any], atom_filter: int = -1, known: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Energy of each element in eV by least squares over the training frames; see `least_change`.

    Args:
        facts: of `survey`.
        atom_filter: elements up to this one have no energy of their own and get 0.
        known: element -> eV of those that are not to be fitted.
    """
    references = dict.fromkeys(facts["elements"], 0.0)
    counted = [z for z in facts["elements"] if z > atom_filter]
    given = {z: energy for z, energy in (known or {}).items() if z in counted}
    free = [z for z in counted if z not in given]
    if facts["energies"] and free:
        rest = facts["energies"]
        if given:
            rest = [
                energy - sum(given.get(z, 0.0) * n for z, n in composition.items())
                for energy, composition in zip(rest, facts["compositions"], strict=True)
            ]
        references |= least_change(facts["compositions"], rest, free)
    return {**references, **given}


def least_change(
    compositions: Sequence[dict[int, int]], energies: list[float], elements: list[int], known: Iterable[int] = ()
) -> dict[int, float]:
    """Element -> change in eV by least squares; the smallest one where the compositions do not tell elements apart.

    The size of a change is measured in units of Z^(7/3), as which total energies of atoms grow: of what one composition
    leaves, hydrogen gets little. Elements without a known value change first.

    Args:
        compositions: of the frames.
        energies: of the frames, less the energies that the known values give, eV.
        elements: that may change.
        known: those of them that have a value.
    """
    counts = torch.from_numpy(_table(compositions, elements))
    target = torch.tensor(energies, dtype=torch.float64)
    known = set(known)
    scale = torch.tensor([z ** (7 / 3) * (1.0 if z in known else _UNKNOWN) for z in elements], dtype=torch.float64)
    solution = torch.linalg.lstsq(counts * scale, target[:, None], driver="gelsd").solution[:, 0] * scale
    return dict(zip(elements, solution.tolist(), strict=True))


def determined_by(
    facts: dict[str, Any],
    atom_filter: int = -1,
    known: Iterable[int] = (),
    elements: Sequence[int] | None = None,
    before: Sequence[dict[int, int]] = (),
) -> Determined | None:
    """The compositions whose reference energies the training frames determine; None: those of all elements.

    Args:
        facts: of `survey`.
        atom_filter: elements up to this one have no energy of their own.
        known: elements whose energies are known without the frames.
        elements: of the model; None: of the frames.
        before: compositions whose energies are known without the frames.
    """
    counted = [z for z in elements or facts["elements"] if z > atom_filter]
    others = [*({z: 1} for z in known), *before]
    rows = np.concatenate([_table(facts["compositions"], counted), _table(others, counted)])
    found = Determined.of(rows, counted)
    return None if len(found.compositions) == len(counted) else found


def _table(compositions: Sequence[dict[int, int]], elements: Sequence[int]) -> NDArray[np.float64]:
    """[frames, elements] atoms."""
    if isinstance(compositions, Compositions):
        return compositions.table(elements)
    rows = [[c.get(z, 0) for z in elements] for c in compositions]
    return np.array(rows, dtype=np.float64).reshape(-1, len(elements))


def energy_scale(config: Config, facts: dict[str, Any], references: dict[int, float]) -> float:
    """eV per unit of the network: the rms of the forces (× 1 Å), or the spread of energies without references."""
    if config.training.energy_scale != "auto":
        return float(config.training.energy_scale)
    if facts["forces_rms"]:
        return facts["forces_rms"]
    rest = [
        (energy - sum(references.get(z, 0.0) * n for z, n in c.items())) / math.sqrt(max(1, sum(c.values())))
        for energy, c in zip(facts["energies"], facts["compositions"], strict=True)
    ]
    spread = float(torch.tensor(rest, dtype=torch.float64).std()) if len(rest) > 1 else 0.0
    return spread if spread > 0 else 1.0


# --- properties ------------------------------------------------------------------------------------------------------


def fit_property(head: dict[str, Any], frames: Frames) -> dict[str, Any]:
    """The head's configuration, `scale: fit` and `shift: fit` replaced by numbers.

    The shift is the mean of the labels, the scale their spread, divided by what a network of order one would make
    of it: √atoms for sums over atoms, the sum of squared distances for a spatial extent.
    """
    fitted = [key for key in ("scale", "shift") if head.get(key) == "fit"]
    if not fitted:
        return head
    values, sizes = _labels_of(head, frames)
    if values.numel() == 0:
        raise BadConfig(f"properties: '{head['name']}' cannot be fitted: no training frame has its label")
    shift = float(values.mean()) if head["name"] not in ("dipole", "vector") else 0.0
    spread = float((values - (shift if "shift" in fitted else 0.0)).square().mean().sqrt())
    scale = spread / float(sizes.mean())
    return {**head, **{key: {"scale": scale or 1.0, "shift": shift}[key] for key in fitted}}


def _labels_of(head: dict[str, Any], frames: Frames) -> tuple[Tensor, Tensor]:
    """The labels [n] of a head, and what a network of order one would give for them [n]."""
    names = {head.get("property", head["name"])} | ({DIPOLE_NORM} if head["name"] == "dipole" else set())
    values, sizes = [], []
    for part in in_order(len(frames), _AT_ONCE):
        sample = frames.data.batch(frames.indices[part])
        system, expected = sample.system, _sizes(head, sample.system)
        for label, value in sample.labels.items():
            if property_of(label) in names:
                rows = expected[system.batch] if LABELS[label].per_atom else expected
                known = torch.isfinite(value)
                values.append(value[known].double())
                sizes.append(rows.reshape(-1, *[1] * (value.ndim - 1)).expand_as(value)[known])
    return (torch.cat(values), torch.cat(sizes)) if values else (torch.zeros(0), torch.zeros(0))


def _sizes(head: dict[str, Any], system: System) -> Tensor:
    """What a network of order one would give for each structure, [B]."""
    count = system.atom_counts.double()
    if head["name"] == "spatial_extent":
        centre = count.new_zeros(len(count), 3).index_add_(0, system.batch, system.pos) / count[:, None]
        square = (system.pos - centre[system.batch]).square().sum(1)
        return count.new_zeros(len(count)).index_add_(0, system.batch, square).clamp(min=1.0)
    summed = head["name"] == "dipole" or (head.get("per") == "system" and head.get("reduce") == "sum")
    return count.sqrt() if summed else torch.ones_like(count)
