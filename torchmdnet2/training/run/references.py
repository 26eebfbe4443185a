"""Fits before training: reference energies, energy scale, scales and shifts of properties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray
from torch import Tensor

from ...data import LABELS, Dataset, open_dataset
from ...errors import BadConfig
from ...neighbors import neighbor_list
from ...potential.determined import Determined
from ...potential.potential import SYMBOLS, Potential
from ...priors.pair_potential import ATTRACTIVE, REPULSIVE, radial_functions
from ...system import System
from ..config.build_potential import load_priors, with_baseline
from ..config.config import Config
from ..config.sections import DIPOLE_NORM, label_units, property_of
from ..steps.batches import Frames, in_order, require_known
from .subsets import Compositions, periodic_heights

__all__ = [
    "FITS", "SingleAtoms", "atom_files", "determined_by", "energy_scale", "fit_pair_potential", "fit_references",
    "least_change", "of_priors", "potential_config", "reference_notes", "single_atoms", "singles", "trusted",
    "with_isolated", "with_pair_fit",
]  # fmt: skip


_AT_ONCE = 256  # frames
_UNKNOWN = 100.0  # how much more an element without a known value may change


def potential_config(
    config: Config, frames: Frames, facts: dict[str, Any], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the potential's configuration with fitted values: reference energies, energy scale, property scales.

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
                if facts["energies"]:
                    determined = determined_by(facts, config.atom_filter, known)
                elif config.head is not None:  # forces alone
                    determined = Determined([])
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
        reasons: text that follows the names of the missing ones.
    """
    missing = [SYMBOLS[z] for z in elements if z not in references]
    if missing:
        raise BadConfig(f"priors: atomref.energies has no entry for {', '.join(missing)}{reasons}")


def subtract_priors(config: Config, frames: Frames, facts: dict[str, Any], device: torch.device | str = "cpu") -> None:
    """Subtract the energies of the physical priors from `facts["energies"]`; reference energies are fitted to the rest.

    Reference energies and priors that need the network's charges are left out.
    """
    potential = of_priors(config, ("atomref",))
    if not potential.priors:
        return
    potential = potential.to(device)
    positions = facts["energy_positions"]
    with torch.no_grad():
        for part in in_order(len(positions), _AT_ONCE):
            items = [positions[k] for k in part]
            system = frames.data.batch(frames.indices[items]).system.to(potential.device)
            try:
                energies = potential.prior_energies(system) * (system.z > config.atom_filter)
            except ValueError:
                require_known(potential, frames, items)  # names the frame
                raise
            sums = energies.new_zeros(len(part)).index_add_(0, system.batch, energies)
            for k, energy in zip(part, sums.tolist(), strict=True):
                facts["energies"][k] -= energy


def of_priors(config: Config, without: Sequence[str]) -> Potential:
    """Return a potential whose `prior_energies` are those of the configured priors that need no charges of the network.

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
    """Fit the energy of each element in eV by least squares over the training frames; see `least_change`.

    Args:
        facts: of `survey`.
        atom_filter: elements up to this one have no energy and get 0.
        known: element -> eV of those that are not fitted.
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
    """Return element -> change in eV by least squares; the smallest one if the compositions do not determine it.

    The size of a change is measured in units of Z^(7/3), as total energies of atoms grow: hydrogen gets little of an
    undetermined change. Elements without a known value change first.

    Args:
        compositions: of the frames.
        energies: of the frames minus those of the known values, eV.
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
    """Return the compositions whose reference energies the training frames determine; None: those of all elements.

    Args:
        facts: of `survey`.
        atom_filter: elements up to this one have no energy.
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
    """Return the numbers of atoms, [frames, elements]."""
    if isinstance(compositions, Compositions):
        return compositions.table(elements)
    rows = [[c.get(z, 0) for z in elements] for c in compositions]
    return np.array(rows, dtype=np.float64).reshape(-1, len(elements))


def energy_scale(config: Config, facts: dict[str, Any], references: dict[int, float]) -> float:
    """Return eV per unit of the network: the rms of the forces (× 1 Å), or the spread of energies without
    references."""
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
    """Return the head's configuration, in which numbers replace `scale: fit` and `shift: fit`.

    The shift is the mean of the labels. The scale is their spread, divided by the property of a network of order one:
    √atoms for sums over atoms, the sum of squared distances for a spatial extent.
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
    """Return the labels [n] of a head, and their values [n] for a network of order one."""
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
    """Return the property of each structure for a network of order one, [B]."""
    count = system.atom_counts.double()
    if head["name"] == "spatial_extent":
        centre = count.new_zeros(len(count), 3).index_add_(0, system.batch, system.pos) / count[:, None]
        square = (system.pos - centre[system.batch]).square().sum(1)
        return count.new_zeros(len(count)).index_add_(0, system.batch, square).clamp(min=1.0)
    summed = head["name"] == "dipole" or (head.get("per") == "system" and head.get("reduce") == "sum")
    return count.sqrt() if summed else torch.ones_like(count)


# --- Reference energies from calculations of single atoms, in the training data or in a separate file ---

WORDS = ("auto", "fit", "keep", "isolated")
"""Words that `energies` of atomref may be, instead of a table or a file."""

_SAME = 1e-3  # eV
_FAR = 8.0  # Å, between a single atom and its images


@dataclass
class SingleAtoms:
    """Frames of a single atom, far from its images, which give reference energies.

    Attributes:
        energies: atomic number -> eV of the neutral ones.
        conflicts: atomic number -> text about two frames that differ by more than 1 meV.
        skipped: atomic number -> why a frame of this atom was not used, in words.
    """

    energies: dict[int, float] = field(default_factory=dict)
    conflicts: dict[int, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)


def atom_files(config: Config) -> list[str]:
    """Return files of single atoms that the priors name."""
    words = [prior["energies"] for prior in config.priors if prior["name"] == "atomref"]
    return [word for word in words if isinstance(word, str) and word not in WORDS]


def with_isolated(config: Config, data: Dataset, elements: Sequence[int]) -> tuple[Config, SingleAtoms | None]:
    """Return the configuration with tables instead of `energies: isolated` and `energies: FILE`.

    Args:
        config: of the run.
        data: its training data, with all subsets.
        elements: of the training frames.

    Returns:
        The configuration, and the single atoms among the data if `energies: auto` asks for them.

    Raises:
        BadConfig: an element has no single atom, or two energies.
        FileNotFoundError, BadData: the file cannot be read.
    """
    files, priors, among = atom_files(config), [], None
    for prior in config.priors:
        if prior["name"] == "atomref" and prior["energies"] == "auto" and config.data.keys.energy is not None:
            among = single_atoms(data)
        if prior["name"] == "atomref" and prior["energies"] in ("isolated", *files):
            source, name = data, "data.train"
            if prior["energies"] in files:
                keys = {"energy": config.data.keys.energy or "energy", "charge": config.data.keys.charge}
                units = label_units(config.data.units.model_dump(), {})
                name = prior["energies"]
                source = open_dataset(name, {k: v for k, v in keys.items() if v is not None}, units)
            table = _complete_table(source, name, elements)
            prior = {**prior, "energies": {str(z): energy for z, energy in table.items()}}
        priors.append(prior)
    return config.model_copy(update={"priors": priors}), among


def _complete_table(data: Dataset, name: str, elements: Sequence[int]) -> dict[int, float]:
    found = single_atoms(data)
    for conflict in found.conflicts.values():
        raise BadConfig(f"priors: atomref.energies: {conflict}; give a table")
    missing = [found.skipped[z] for z in elements if z in found.skipped and z not in found.energies]
    reasons = "".join(f"; {reason}" for reason in missing)
    if not found.energies:
        raise BadConfig(
            f"priors: atomref.energies: no frame of {name} is a single neutral atom with an energy{reasons}"
        )
    require_references(found.energies, elements, reasons)
    return found.energies


def trusted(atoms: SingleAtoms, elements: Sequence[int]) -> dict[int, float]:
    """Return atomic number -> eV of elements with one unique energy of a single atom."""
    return {z: energy for z, energy in atoms.energies.items() if z in elements and z not in atoms.conflicts}


def reference_notes(atoms: SingleAtoms, elements: Sequence[int]) -> Iterator[str]:
    """Yield notes about the single atoms that `energies: auto` uses; none if there are none."""
    known = trusted(atoms, elements)
    if known:
        rest = [SYMBOLS[z] for z in elements if z not in known]
        fitted = f"; {', '.join(rest)} by least squares" if rest else ""
        yield f"reference energies: single atoms of data.train for {', '.join(SYMBOLS[z] for z in known)}{fitted}"
    for z, conflict in atoms.conflicts.items():
        if z in elements:
            yield f"note: reference energies: {conflict}; that of {SYMBOLS[z]} is fitted. Give a table to choose one"
    for z, reason in atoms.skipped.items():
        if z in elements and z not in atoms.energies:
            yield f"note: reference energies: {reason}; that of {SYMBOLS[z]} is fitted"


def single_atoms(data: Dataset) -> SingleAtoms:
    """Return energies of the frames that are a single neutral atom.

    Args:
        data: frames with energies.
    """
    found = SingleAtoms()
    places: dict[int, str] = {}
    for z, energy, where, fault in singles(data):
        if fault is not None:
            found.skipped.setdefault(z, f"{where} is a single {SYMBOLS[z]}, but {fault}")
        elif z in places and abs(found.energies[z] - energy) > _SAME:
            found.conflicts[z] = f"{SYMBOLS[z]} has {found.energies[z]} eV in {places[z]} and {energy} eV in {where}"
        elif z not in places:
            found.energies[z], places[z] = energy, where
    found.energies = dict(sorted(found.energies.items()))
    return found


def singles(data: Dataset, frames: np.ndarray | None = None) -> Iterator[tuple[int, float, str, str | None]]:
    """Yield frames of one atom: its number, energy in eV, the frame's name, and why it is not used, or None.

    Args:
        data: the data set.
        frames: indices of those to search; None: all.
    """
    chosen = np.arange(len(data)) if frames is None else np.unique(frames)
    for index in chosen[data.sizes()[chosen] == 1].tolist():
        sample = data[index]
        charge = int(sample.system.charge[0])
        energy = float(sample.labels["energy"][0]) if "energy" in sample.labels else np.nan
        fault = None
        if charge != 0:
            fault = f"has the charge {charge:+d}"
        elif np.isnan(energy):
            fault = "has no energy"
        elif (nearest := _to_image(sample.system)) < _FAR:
            fault = f"its images are {nearest:.1f} Å away"
        yield int(sample.system.z[0]), energy, data.name(index), fault


def _to_image(system: System) -> float:
    """Return the distance to the next image, or less: the smallest height of the cell along its periodic vectors, Å."""
    return min(periodic_heights(system).tolist(), default=np.inf)


# --- Fit of the prior `pair_potential` to the forces of the training frames, before training ---

_FRAMES = 500  # that are fitted to, evenly spread
_FITTED_AT_ONCE = 32
_WALL = 0.8  # of the sum of the covalent radii: where every pair repels at least so much


class Fit(NamedTuple):
    """Constraints of a fitted pair potential.

    Args:
        attracts: of two atomic numbers: whether such atoms may attract each other.
        wall: eV/Å by which every pair repels at 0.8 times the sum of the covalent radii, at least.
        ridge: added to the scaled diagonal of the normal equations; the smallest makes the solution unique.
    """

    attracts: Callable[[int, int], bool]
    wall: float = 10.0
    ridge: float = 1e-9


FITS = {
    "fit": Fit(lambda one, two: True),
    "repulsion": Fit(lambda one, two: False),
    "heavy_attraction": Fit(lambda one, two: min(one, two) > 1, wall=20.0, ridge=1e-3),
}
"""`parameters` of the prior in a training configuration -> constraints of the fit."""


def with_pair_fit(config: Config, frames: Frames, elements: Sequence[int]) -> Config:
    """Return the configuration with fitted numbers instead of a name of `FITS` as `parameters`.

    Args:
        config: of the run.
        frames: those of training.
        elements: of the training frames.

    Raises:
        BadConfig: there are no forces for the fit.
    """
    if not any(prior["name"] == "pair_potential" and isinstance(prior["parameters"], str) for prior in config.priors):
        return config
    others = of_priors(config, ("atomref", "pair_potential"))
    priors = [
        {
            **prior,
            "parameters": fit_pair_potential(frames, elements, prior["cutoff"], prior["parameters"], others),
        }
        if prior["name"] == "pair_potential" and isinstance(prior["parameters"], str)
        else prior
        for prior in config.priors
    ]
    return config.model_copy(update={"priors": priors})


def fit_pair_potential(
    frames: Frames,
    elements: Sequence[int],
    cutoff: float,
    kind: str = "fit",
    others: Potential | None = None,
) -> dict[str, list[float]]:
    """Fit the coefficients of `PairPotential` by least squares of the forces, all of them at least 0.

    If the frames do not determine the repulsion (no pair of these elements that close, or attraction only), the
    steepest repulsion is raised until the pair repels enough at 0.8 times the sum of the covalent radii.

    Args:
        frames: labelled with forces.
        elements: atomic numbers.
        cutoff: Å.
        kind: one of `FITS`.
        others: potential whose priors are subtracted from the forces first.

    Returns:
        "C-H" -> K numbers, eV, of every pair of the elements.
    """
    fit = FITS[kind]
    pairs = list(itertools.combinations_with_replacement(sorted(elements), 2))
    repelling = torch.tensor([not fit.attracts(one, two) for one, two in pairs])
    number = torch.zeros(128, 128, dtype=torch.long)
    for p, (one, two) in enumerate(pairs):
        number[one, two] = number[two, one] = p
    signs = np.array([1.0] * len(REPULSIVE) + [-1.0] * len(ATTRACTIVE))
    size = len(pairs) * len(signs)
    gram, moment = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _FRAMES)).astype(int))
    labelled = 0
    for part in np.array_split(chosen, -(-len(chosen) // _FITTED_AT_ONCE)):
        sample = frames.data.batch(frames.indices[part])
        if "forces" not in sample.labels:
            continue
        forces = sample.labels["forces"].double()
        if others is not None:
            forces = forces - _forces_of_priors(others, sample.system)
        forces = forces.flatten()
        design = _design(sample.system, number, len(pairs), cutoff)
        design.view(len(design), len(pairs), -1)[:, repelling, len(REPULSIVE) :] = 0
        known = torch.isfinite(forces)
        labelled += int(known.sum())
        gram += design[known].T @ design[known]
        moment += design[known].T @ forces[known]
    if not labelled:
        raise BadConfig("priors: pair_potential.parameters: the fit needs forces, and no training frame has any")
    sign = np.tile(signs, len(pairs))
    found = _nonnegative(sign[:, None] * gram.numpy() * sign, sign * moment.numpy(), fit.ridge)
    return {
        f"{SYMBOLS[one]}-{SYMBOLS[two]}": _with_wall(
            values, float(covalent_radii[one] + covalent_radii[two]), fit.wall
        ).tolist()
        for (one, two), values in zip(pairs, found.reshape(len(pairs), len(signs)), strict=True)
    }


def _forces_of_priors(potential: Potential, system: System) -> Tensor:
    """Return forces of the priors, [N, 3] eV/Å."""
    pos = system.pos.detach().double().requires_grad_()
    with torch.enable_grad():
        energies = potential.prior_energies(system.replace(pos=pos)).sum() + 0 * pos.sum()
        return -torch.autograd.grad(energies, pos)[0]


def _design(system: System, number: Tensor, count: int, cutoff: float) -> Tensor:
    """Return forces of the functions of unit coefficient: [3 N, P K]."""
    neighbors = neighbor_list(system, cutoff)
    vectors = neighbors.vectors(system).double()
    d = vectors.norm(dim=1).requires_grad_()
    functions = radial_functions(d, cutoff)
    slopes = [torch.autograd.grad(f.sum(), d, retain_graph=True)[0] for f in functions.unbind(1)]
    pull = (vectors / d.detach()[:, None])[:, :, None] * torch.stack(slopes, 1)[:, None]  # [E, 3, K], on the receiver
    receiver, sender = neighbors.edge_index
    place = receiver * count + number[system.z[receiver], system.z[sender]]
    n, k = system.num_atoms, functions.shape[1]
    table = pull.new_zeros(n * count, 3, k).index_add_(0, place, pull)
    return table.view(n, count, 3, k).transpose(1, 2).reshape(3 * n, count * k)


def _with_wall(values: NDArray[np.float64], radii: float, wall: float) -> NDArray[np.float64]:
    """Return the coefficients, with enough of the steepest repulsion to repel by `wall` eV/Å at short distance.

    At shorter distances it then repels more, since all repulsive exponents are the larger ones.
    """
    exponents = np.array([*REPULSIVE, *ATTRACTIVE])
    slopes = exponents * np.exp(-exponents * (_WALL * radii - 1))  # of unit coefficients, eV/Å, downhill
    force = values @ (slopes * np.repeat([1, -1], [len(REPULSIVE), len(ATTRACTIVE)]))
    steepest = int(np.argmax(REPULSIVE))
    raised = values.copy()
    raised[steepest] += max(0.0, wall - force) / slopes[steepest]
    return raised


def _nonnegative(gram: NDArray[np.float64], moment: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    """Return x ≥ 0 that minimises ½ x·G x − m·x, where G is scaled to a unit diagonal; 0 for columns of zeros."""
    from scipy.optimize import nnls  # ASE needs SciPy

    used = gram.diagonal() > 0
    x = np.zeros(len(moment))
    if used.any():
        scale = np.sqrt(gram.diagonal()[used])
        lower = np.linalg.cholesky(gram[np.ix_(used, used)] / scale[:, None] / scale + ridge * np.eye(len(scale)))
        x[used] = nnls(lower.T, np.linalg.solve(lower, moment[used] / scale), maxiter=100 * len(scale))[0] / scale
    return x
