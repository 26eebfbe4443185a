"""The model card: data, errors and settings of a model as Markdown, from the header of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ...determined import Determined
from ...potential import SYMBOLS
from ..steps.metrics import shown

__all__ = ["model_card"]


def model_card(config: Mapping[str, Any], metadata: Mapping[str, Any], title: str = "Model") -> str:
    """The card of a model.

    Args:
        config: of the potential, as in the model file.
        metadata: as `run_training` writes it; what is missing is left out, so cards of other models work too. "about",
            if it is there, has further sections: heading -> text.
        title: heading.
    """
    model = config.get("model", {})
    # models of other programs may have plain text under these names
    words = {
        name: metadata[name]
        for name in ("data", "errors", "training", "versions")
        if not isinstance(metadata.get(name, {}), Mapping)
    }
    metadata = {name: value for name, value in metadata.items() if name not in words}
    data = metadata.get("data", {})
    facts = {
        **_elements(config.get("elements") or [], data.get("elements")),
        "Level of theory": data.get("level_of_theory", "not stated"),
        "Model": f"{model.get('name', '?')}, {metadata.get('num_parameters', '?')} parameters",
        "Cutoff": f"{model.get('cutoff', '?')} Å",
        "Units": "energy eV, length Å, forces eV/Å, stress eV/Å³, charge e",
        "Total charges": _listed(data.get("charges")),
        "Spin multiplicities": _listed(data.get("spins"), {0: "not given"}),
        "Precision": metadata.get("precision", "not stated"),
        "Licence of the model": metadata.get("licence", "not stated"),
        "Licence of the data": data.get("licence", "not stated"),
        **{name.capitalize(): value for name, value in words.items()},
    }
    lines = [f"# {title}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    about = metadata.get("about", {})
    for heading, text in about.items() if isinstance(about, Mapping) else ():
        lines += [f"## {heading}", "", str(text), ""]
    lines += _errors(metadata.get("errors", {}))
    lines += _references(config)
    lines += _data(data)
    if "training" in metadata:
        training = metadata["training"]
        lines += ["## Training", ""]
        lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in training.items()]
        lines.append("")
    if "versions" in metadata:
        lines += ["## Versions", "", *(f"- {name} {version}" for name, version in metadata["versions"].items()), ""]
    if "config" in metadata:
        text = yaml.safe_dump(metadata["config"], sort_keys=False, allow_unicode=True)
        lines += ["## Configuration", "", "```yaml", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _elements(elements: Sequence[int], trained: Sequence[int] | None) -> dict[str, str]:
    """Those of the training frames, and those that only the model knows that the training started from."""
    kinds = {"Elements": elements}
    if trained is not None:
        kinds = {
            "Elements": [z for z in elements if z in trained],
            "Elements of the starting model alone": [z for z in elements if z not in trained],
        }
    found = {name: ", ".join(SYMBOLS[int(z)] for z in kind) for name, kind in kinds.items() if kind}
    return {"Elements": "not stated", **found}


def _errors(errors: Mapping[str, Any]) -> list[str]:
    """A table of errors by subset and property, and of force errors by element."""
    rows = []
    for subset, properties in sorted(errors.items(), reverse=True):
        for name, value in sorted(properties.items()):
            entries = sorted(value.items()) if name == "forces_by_element" else [("", value)]
            for element, error in entries:
                label = f"forces on {element}" if element else name.replace("_", " ")
                (mae, unit), (rmse, _) = shown(error["mae"], error["unit"]), shown(error["rmse"], error["unit"])
                rows.append(f"| {subset} | {label} | {mae:.3f} | {rmse:.3f} | {unit} | {error['count']} |")
    if not rows:
        return []
    return [
        "## Errors",
        "",
        "| frames | property | MAE | RMSE | unit | labels |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _references(config: Mapping[str, Any]) -> list[str]:
    for prior in config.get("priors") or []:
        if prior.get("name") == "atomref" and prior.get("energies"):
            energies, note = {int(z): energy for z, energy in prior["energies"].items()}, []
            if config.get("compositions") is not None:
                determined = Determined(config["compositions"])
                sentence = determined.sentence(config.get("elements") or energies)
                note = [f"{sentence[0].upper()}{sentence[1:]}.", ""]
                energies = {z: energy for z, energy in energies.items() if z in determined.elements}
            rows = [f"| {SYMBOLS[z]} | {energy:.6f} |" for z, energy in energies.items()]
            return ["## Reference energies", "", *note, "| element | eV |", "|---|---|", *rows, ""]
    return []


def _data(data: Mapping[str, Any]) -> list[str]:
    if not data:
        return []
    lines = ["## Data", ""]
    lines += [f"- `{path}`, sha256 {digest}" for path, digest in data.get("files", {}).items()]
    if "frames" in data:
        lines.append("- frames: " + ", ".join(f"{count} {subset}" for subset, count in data["frames"].items()))
    if "split" in data:
        lines.append(f"- split: {data['split']}")
    return [*lines, ""]


def _listed(values: Any, names: Mapping[Any, str] | None = None) -> str:
    names = names or {}
    return ", ".join(str(names.get(v, v)) for v in values) if values else "not stated"
