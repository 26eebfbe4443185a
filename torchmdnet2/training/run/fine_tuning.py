"""Fine-tuning: a potential that starts from the weights of another one.

Model, head, properties and priors that the configuration does not give are taken from the file. Elements that the
file's model does not know get the mean embedding of those that it knows. Reference energies are refitted to the
difference of labels and loaded potential, and change as little as possible.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from ...data import Sample, open_dataset
from ...data.dataset import ConcatDataset, select
from ...data.labels import LEVEL
from ...data.reader import InMemoryDataset
from ...errors import BadConfig, BadData
from ...potential.determined import Determined
from ...potential.potential import SYMBOLS, Potential
from ...priors import Atomref
from ...registry import REPRESENTATIONS, did_you_mean
from ..config.build_potential import load_priors, with_baseline
from ..steps.batches import Frames, Loader, in_order, require_known
from ..steps.trainer import Properties, predict
from .references import determined_by, least_change, require_references

__all__ = [
    "NOT_STATED", "SAME_LEVEL", "fine_tuned", "first_names", "freeze", "reference_energies", "refit_references",
    "start_facts", "with_replay",
]  # fmt: skip


SAME_LEVEL = 0.3  # eV; between functionals, energies of atoms such as carbon and oxygen differ by more

NOT_STATED = "not stated"
_OF_DATA = ("Level of theory", "Licence", "Citation")
_SECTIONS = ("Cite", "Source", "Teacher", "Training data", "Start")  # of a card, that say where weights come from
_INHERITED = ", that of the start"


def fine_tuned(
    base: Potential,
    parts: Mapping[str, Any],
    elements: list[int],
    isolated: Mapping[int, float] | None = None,
    charges: Sequence[float] = (),
    odd_electrons: int = 0,
    seen: Sequence[int] = (),
) -> tuple[Potential, list[str]]:
    """Return a potential with the weights of another one.

    Args:
        base: the potential of the file.
        parts: "model", "head", "properties", "priors" as in the configuration; atomref's energies may be "auto",
            "fit" or "keep", which all start from the base's.
        elements: of the new data.
        isolated: element -> eV of single atoms in the new data, which "auto" takes.
        charges: total charges in e of the new data.
        odd_electrons: frames of the new data with an odd number of electrons.
        seen: elements of all levels of theory of the new data, if there are several; `elements` and `charges` are
            those of the first one then.

    Returns:
        The potential, and what was loaded and what is new, as text.

    Raises:
        BadConfig: the model is another one than the base's.
    """
    _same_model(base.config["model"], parts["model"])
    references, known = reference_energies(base), sorted({*elements, *seen})
    config = {
        **base.config,
        **parts,
        "priors": [with_baseline(_with_references(p, references, known, isolated or {})) for p in parts["priors"]],
        "elements": sorted({*base.elements, *elements}),
        "total_charges": None if base.total_charges is None else sorted({*base.total_charges, *charges}),
        "closed_shell": base.closed_shell and not odd_electrons,
        "compositions": base.config.get("compositions") if _keeps_references(parts["priors"]) else None,
    }
    potential = Potential.from_config(config).to(base.dtype)
    load_priors(potential, parts["priors"], base)
    new = sorted(set(known) - set(base.elements))
    report = _copy_weights(base, potential, new)
    if new:
        report.append(f"new elements: {_symbols(new)}; their embeddings start as the mean of the known ones")
    if base.closed_shell and odd_electrons:
        report.append(
            f"note: {odd_electrons} training frames have an odd number of electrons: radicals, or ions whose total "
            "charge is not read (data.keys.charge). The file of `init` refuses such structures; the new model will not"
        )
    return potential, report


def start_facts(metadata: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return licence and sources of a start, for the card of the model that is trained from it.

    Args:
        metadata: of the start's file, which may hold anything.
        file: the start, as `init.file` names it.
    """
    licence, data, about = (metadata.get(name) for name in ("licence", "data", "about"))
    data, about = (part if isinstance(part, Mapping) else {} for part in (data, about))
    known = {f"{name} of the data": data.get(name.lower().replace(" ", "_"), NOT_STATED) for name in _OF_DATA}
    known |= {name: about.get(name, NOT_STATED) for name in _SECTIONS}
    said = [f"{name}: {text}" for name, text in known.items() if text != NOT_STATED]
    facts: dict[str, Any] = {"about": {"Start": "\n\n".join([f"The weights of {file} were the start.", *said])}}
    if isinstance(licence, str) and licence != NOT_STATED:
        facts["licence"] = licence.removesuffix(_INHERITED) + _INHERITED
    return facts


def _same_model(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise BadConfig if an argument differs that the weights depend on; files may be older than an argument."""
    defaults = inspect.signature(REPRESENTATIONS[theirs["name"]]).parameters
    theirs = {**{name: parameter.default for name, parameter in defaults.items()}, **theirs}
    for name in ours:
        if name != "max_z" and name in theirs and theirs[name] != ours[name]:
            raise BadConfig(
                f"model.{name}: is {ours[name]!r} here and {theirs[name]!r} in the file of `init`; leave `model` out, "
                "to take it from there, or `init`, to start from random weights"
            )


def reference_energies(potential: Potential) -> dict[int, float]:
    """Return element -> eV of the atomref prior, including changes made by training."""
    for prior in potential.priors:
        if isinstance(prior, Atomref):
            table = prior.table.tolist()
            return {z: table[z] for z in potential.elements}
    return {}


def _keeps_references(priors: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a fit starts from the reference energies of the base."""
    return any(prior["name"] == "atomref" and isinstance(prior["energies"], str) for prior in priors)


def _with_references(
    prior: dict[str, Any], known: dict[int, float], elements: list[int], isolated: Mapping[int, float]
) -> dict[str, Any]:
    if prior["name"] != "atomref" or not isinstance(prior["energies"], str):
        return prior
    if prior["energies"] == "keep":
        require_references(known, elements)
    if prior["energies"] == "auto":
        known = {**known, **isolated}
    return {**prior, "energies": {str(z): known.get(z, 0.0) for z in sorted({*known, *elements})}}


def _copy_weights(base: Potential, potential: Potential, new: list[int]) -> list[str]:
    """Copy the weights that both have; tables by element may have grown."""
    old, own = base.state_dict(), potential.state_dict()
    tables = {name for name, m in potential.named_modules() if isinstance(m, nn.Embedding)}
    loaded, fresh = [], []
    for name, value in own.items():
        if name.startswith("priors.") and ".potential." not in name:  # all but baselines have nothing to load
            continue
        given = old.get(name)
        if name.rpartition(".")[0] in tables and given is not None and given.shape[1:] == value.shape[1:]:
            rows = min(len(given), len(value))
            value[:rows] = given[:rows]
            if new:
                value[new] = given[base.elements].mean(0)
            loaded.append(name)
        elif given is not None and given.shape == value.shape:
            value.copy_(given)
            loaded.append(name)
        else:
            fresh.append(name)
    left = [name for name in old if name not in own and not name.startswith("priors.")]
    if not any(name.startswith("representation.") for name in loaded):
        raise BadConfig("init.file: none of its weights fits this model")
    report = [f"{len(loaded)} of {len(loaded) + len(fresh)} tensors loaded"]
    if fresh:
        report.append(f"new, with random weights: {first_names(fresh)}")
    if left:
        report.append(f"in the file and not in this model: {first_names(left)}")
    return report


def refit_references(
    potential: Potential,
    frames: Frames,
    facts: dict[str, Any],
    batch_size: int,
    isolated: Mapping[int, float] | None = None,
    trained: Sequence[int] = (),
) -> str:
    """Refit the atomref energies to the labels: the smallest change, see `least_change`.

    A change of more than 0.3 eV means labels of another level of theory. Then only the compositions of the frames, and
    combinations of them, have energies of that level: those of other elements do not change.

    Args:
        potential: with the loaded weights; its reference energies are changed, and `determined`.
        frames: the training frames.
        facts: of `survey`.
        batch_size: frames at a time.
        isolated: elements whose energies are known, and stay.
        trained: elements that the loaded model knows.

    Returns:
        The changes, in words.
    """
    atomref = next((p for p in potential.priors if isinstance(p, Atomref)), None)
    if atomref is None or not facts["energy_positions"]:
        return "reference energies: none to fit"
    rest: list[float] = []
    chosen = facts["energy_positions"]
    for part in in_order(len(chosen), batch_size):
        for batch in Loader(frames)([[chosen[k] for k in part]]):
            batch = batch.to(potential.device)
            result = predict(potential, batch, Properties(forces=False))
            rest += (batch.sample.labels["energy"] - result.energy).tolist()
    counted = [z for z in facts["elements"] if z > potential.atom_filter and z not in (isolated or {})]
    if not counted:
        return "reference energies: none to fit"
    change = least_change(facts["compositions"], rest, counted, trained)
    table = atomref.initial
    for z, energy in change.items():
        table[z] += energy
    for prior in potential.config["priors"]:
        if prior["name"] == "atomref":
            prior["energies"] = {str(z): float(table[z]) for z in potential.elements}
    potential.determined = _determined(potential, facts, change, isolated or {}, trained)
    potential.config["compositions"] = None if potential.determined is None else potential.determined.stored()
    texts = ", ".join(f"{SYMBOLS[z]} {energy:+.3f} eV" for z, energy in change.items())
    return f"reference energies changed by least squares: {texts}"


def _determined(
    potential: Potential,
    facts: dict[str, Any],
    change: Mapping[int, float],
    isolated: Iterable[int],
    trained: Sequence[int],
) -> Determined | None:
    """Return the compositions whose reference energies are determined after a refit."""
    found: dict[str, Any] = {"atom_filter": potential.atom_filter, "elements": potential.elements}
    if any(abs(change.get(z, 0.0)) > SAME_LEVEL for z in trained):
        return determined_by(facts, known=isolated, **found)
    if potential.determined is None:
        return determined_by(facts, known=[*isolated, *trained], **found)
    return determined_by(facts, known=isolated, before=potential.determined.compositions, **found)


def freeze(potential: Potential, names: list[str]) -> int:
    """Take parameters out of training.

    Args:
        potential: changed.
        names: beginnings of parameter names, at a dot: "representation.layers.0".

    Returns:
        The number of frozen numbers.

    Raises:
        BadConfig: a name fits none, or nothing is left to train.
    """
    parameters = dict(potential.named_parameters())
    for name in names:
        found = [key for key in parameters if f"{key}.".startswith(f"{name}.")]
        if not found:
            known = {".".join(key.split(".")[:k]) for key in parameters for k in range(1, key.count(".") + 2)}
            hint = did_you_mean(name, known) or f" (parts: {', '.join(sorted(k for k in known if k.count('.') < 2))})"
            raise BadConfig(f"init.freeze: no parameter of this model starts with '{name}'{hint}")
        for key in found:
            parameters[key].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise BadConfig("init.freeze: every parameter is frozen: there is nothing to train")
    return sum(p.numel() for p in parameters.values() if not p.requires_grad)


def _symbols(numbers: list[int]) -> str:
    return ", ".join(SYMBOLS[z] for z in numbers)


def first_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and the number of the others; frames that a training repeats count once."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- Replay: structures with predictions of the initial potential as further training frames of a fine-tuning ---
#
# A fine-tuned network forgets what the new frames do not show. Frames that it labelled itself before the training hold
# it to what it knew (A. Robins, Connect. Sci. 7, 123 (1995)).

_AT_ONCE = 32  # frames


def with_replay(train: Frames, file: str, potential: Potential, level: str | None = None) -> Frames:
    """Return the training frames, followed by those of a file, labelled by a potential.

    Args:
        train: the user's frames.
        file: structures; labels in it are not read.
        potential: with the weights and reference energies that the training starts from, on its device; its energies,
            forces, and charges where it predicts them, become the labels.
        level: level of theory of these labels, if the potential has several.

    Raises:
        FileNotFoundError, BadData: the file is missing, empty, or has structures that the potential cannot evaluate.
    """
    data = open_dataset(file, keys={})
    if not len(data):
        raise BadData(f"init.replay: {file} has no structures")
    structures = Frames(data, range(len(data)), train.cutoff, cache_bytes=0)
    labeller = potential if level is None else potential.at_level(level)
    try:
        require_known(labeller, structures, range(len(structures)))
    except ValueError as error:
        raise BadData(f"init.replay: {error}") from None
    samples = []
    training = potential.training
    potential.eval()
    for part in in_order(len(structures), _AT_ONCE):
        for batch in Loader(structures)([part]):
            result = predict(labeller, batch.to(potential.device), Properties())
            labels = {"energy": result.energy, "forces": result.forces, "charges": result.charges}
            known = {name: value.detach().cpu().double() for name, value in labels.items() if value is not None}
            together = Sample(batch.sample.system, known)
            samples += [select(together, np.array([k])) for k in range(len(part))]
    potential.train(training)
    replayed = InMemoryDataset(samples, [f"{data.name(k)} (replay)" for k in range(len(data))])
    indices = np.concatenate([train.indices, len(train.data) + np.arange(len(data))])
    labels_of = None if level is None else [{}, {LEVEL: float(potential.level_names.index(level))}]
    return Frames(ConcatDataset([train.data, replayed], labels_of), indices, train.cutoff)
