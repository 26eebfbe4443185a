"""TorchMD-Net's priors, translated into ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import BadCheckpoint
from ..priors import ZBL
from ..units import factor

__all__ = ["prior_configs"]

_ANGSTROM, _JOULE = 1e-10, 1.602176634e-19


def prior_configs(
    args: Mapping[str, Any], state: Mapping[str, Tensor], energy_unit: str, std: float, decisions: list[str]
) -> list[dict[str, Any]]:
    """Configurations of the priors, with the repulsion of TensorNet2 among them.

    Args:
        args: their hyper-parameters.
        state: their tensors.
        energy_unit: in which the model gives energies.
        std: their scale, which multiplies the repulsion too.
        decisions: sentences are added.

    Raises:
        BadCheckpoint: a prior has no right equivalent.
    """
    priors: list[dict[str, Any]] = []
    stored = [key for key in state if key.startswith("representation_model.repulsion.")]
    if bool(stored) != bool(args.get("repulsion")):
        raise BadCheckpoint("the hyper-parameter 'repulsion' and the tensors of the repulsion do not fit together")
    if stored:
        _check_repulsion(state)
        priors.append({"name": "zbl", "envelope": "covalent", "screening": "refitted", "scale": std})
        decisions.append("the repulsion inside TensorNet2 is the prior 'zbl' here")
    names = _names(args)
    details = args.get("prior_args") or [{}] * len(names)
    if isinstance(details, Mapping):
        details = [details]
    if len(details) != len(names):
        raise BadCheckpoint(f"{len(names)} priors, and arguments of {len(details)}")
    for k, (name, given) in enumerate(zip(names, details, strict=True)):
        prefix = f"prior_model.{k}." if any(key.startswith("prior_model.0.") for key in state) else "prior_model."
        tensors = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if name in ("Atomref", "LearnableAtomref"):
            priors.append(_atomref(tensors, energy_unit, given, decisions))
        elif name in ("ZBL", "D2"):
            priors.append(_pair_prior(name, tensors, given, energy_unit, decisions))
        else:
            raise BadCheckpoint(
                f"the prior '{name}' cannot be converted"
                + (
                    ": its energies are right only for positions in nm and without a box, and its charges are not in "
                    "the checkpoint; add the prior 'coulomb' with the charges instead, and train anew"
                    if name == "Coulomb"
                    else ""
                )
            )
    found = {int(m[1]) for key in state if (m := re.match(r"prior_model\.(\d+)\.", key))}
    if found - set(range(len(names))):
        raise BadCheckpoint("the state_dict holds priors that the hyper-parameters do not name")
    return priors


def _check_repulsion(state: Mapping[str, Tensor]) -> None:
    """The constants that the checkpoint holds must be those of the prior 'zbl'."""
    radii = ZBL(envelope="covalent").radii
    table = state["representation_model.repulsion.cutoff_ab"].double()
    z = torch.arange(1, table.shape[0], dtype=torch.float64)
    powers = state["representation_model.repulsion.z_pow"].double()[1:]
    radii = radii[1 : table.shape[0]]
    sums = radii[:, None] + radii
    if not (torch.allclose(table[1:, 1:], sums, rtol=1e-5) and torch.allclose(powers, z**0.3, rtol=1e-5)):
        raise BadCheckpoint("the repulsion was made with other radii or exponents than those known")


def _names(args: Mapping[str, Any]) -> list[str]:
    """Names of the priors: a name, a list of names, or a list of {name: arguments}."""
    given = args.get("prior_model")
    if given is None:
        # delta learning appends reference energies that are switched on again for use
        given = ["Atomref"] if args.get("remove_ref_energy") and args.get("prior_args") else []
    if isinstance(given, str | Mapping):
        given = [given]
    return [str(next(iter(p))) if isinstance(p, Mapping) else str(p) for p in given]


def _atomref(
    tensors: Mapping[str, Tensor], energy_unit: str, given: Mapping[str, Any], decisions: list[str]
) -> dict[str, Any]:
    if "atomref.weight" not in tensors:
        raise BadCheckpoint("the reference energies (atomref.weight) are missing in the state_dict")
    table = tensors["atomref.weight"].double().flatten() * factor("energy", energy_unit)
    energies = {str(z): float(e) for z, e in enumerate(table) if float(e) != 0}
    decisions.append(f"reference energies of {len(energies)} elements are added to the atoms (prior 'atomref')")
    if given.get("enable") is False:
        decisions.append(
            "trained with the reference energies removed: here they are added, so that energies are totals"
        )
    return {"name": "atomref", "energies": energies, "max_z": table.shape[0]}


def _pair_prior(
    name: str, tensors: Mapping[str, Tensor], given: Mapping[str, Any], energy_unit: str, decisions: list[str]
) -> dict[str, Any]:
    length, energy = given.get("distance_scale"), given.get("energy_scale")
    unit = factor("energy", energy_unit) * _JOULE
    if length is None or energy is None or abs(length / _ANGSTROM - 1) > 1e-4 or abs(energy / unit - 1) > 1e-4:
        raise BadCheckpoint(
            f"the prior '{name}' was made for distance_scale {length} m and energy_scale {energy} J, not for Å and "
            f"{energy_unit}; give the right energy_unit, or it cannot be carried over"
        )
    types = tensors.get("atomic_number", given.get("atomic_number"))
    if types is None or any(int(z) != i for i, z in enumerate(types)):
        raise BadCheckpoint(f"the prior '{name}' renumbers the elements (atomic_number), which cannot be converted")
    decisions.append(f"the prior '{name}' is '{name.lower()}' here; it honours each structure's cell")
    config = {"name": name.lower(), "cutoff": float(given["cutoff_distance"])}
    # their D2 ends abruptly
    return config if name == "ZBL" else {**config, "switch_width": 0.0}
