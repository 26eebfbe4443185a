"""Plug-in for openmm-ml: MLPotential("torchmdnet2", modelPath="model.tmn").

openmm-ml imports this module when it is imported itself, so nothing but openmm-ml may be needed here: torch and the
rest of this package are imported when a system is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import needs_extra

with needs_extra("openmm"):
    from openmmml.mlpotential import MLPotentialImpl, MLPotentialImplFactory

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

__all__ = ["TorchMDNet2Factory", "TorchMDNet2Impl"]

_ELSEWHERE = {"spin": "multiplicity", "dtype": "precision"}  # what our other interfaces call them
_REASONS = {
    "periodic": ": the model is periodic where the topology or the System has a box. For a box, take a model whose "
    "Coulomb energy has a cutoff, the reaction field or Ewald summation; a molecule alone needs both without box"
}
_OPTIONS = ("charge", "multiplicity", "device", "precision", "allow_untrained_charge")
_KNOWN = f" (known: {', '.join(_OPTIONS)})"


class TorchMDNet2Factory(MLPotentialImplFactory):
    """Makes the implementation; registered under the entry point `openmmml.potentials`."""

    def createImpl(  # the interface's name and arguments
        self, name: str, modelPath: str | os.PathLike | None = None, **args: Any
    ) -> TorchMDNet2Impl:
        """
        Args:
            name: "torchmdnet2".
            modelPath: path of a .tmn file, or name of a potential.

        Raises:
            ValueError: no path, or another argument.
        """
        if modelPath is None:
            raise ValueError('give the path of a model file: MLPotential("torchmdnet2", modelPath="model.tmn")')
        if args:
            raise ValueError(f"MLPotential('torchmdnet2') takes only modelPath, got also {', '.join(args)}")
        return TorchMDNet2Impl(modelPath)


class TorchMDNet2Impl(MLPotentialImpl):
    """The potential of a model file for openmm-ml, alone or mixed with a force field.

    Args:
        path: of the .tmn file, or a name.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = path

    def addForces(
        self,
        topology: Topology,
        system: openmm.System,
        atoms: Iterable[int] | None,
        forceGroup: int,
        charge: int | None = None,
        multiplicity: int = 0,
        device: Any = None,
        precision: str | None = None,
        allow_untrained_charge: bool = False,
        **args: Any,
    ) -> None:
        """Add the model's force; arguments after `forceGroup` are those of createSystem and createMixedSystem.

        Args:
            topology, system, atoms, forceGroup: from openmm-ml.
            charge: total charge in e of the atoms that the model sees; None: the sum of the formal charges that the
                topology states, else 0.
            multiplicity: 2S+1 of these; 0 means not given.
            device: "cpu", "cuda", …; None takes a GPU when there is one.
            precision: "single" or "double"; None keeps the model's.
            allow_untrained_charge: take a charge that the model was not trained on, or does not use.
            args: none; the embedding takes its own before.

        Raises:
            TypeError: an argument that is not known.
            others: as `torchmdnet2.adapters.openmm.create_force`.
        """
        import torch

        from ..registry import did_you_mean
        from .openmm import create_force, has_box

        for name in args:
            meant = _ELSEWHERE.get(name)
            hint = f", did you mean '{meant}'?" if meant else did_you_mean(name, _OPTIONS)
            raise TypeError(f"unknown argument '{name}'{_REASONS.get(name) or hint or _KNOWN}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        periodic = has_box(topology) or system.usesPeriodicBoundaryConditions()
        force = create_force(
            self.path, topology, atoms, periodic, charge, multiplicity, device, precision, allow_untrained_charge
        )
        force.setForceGroup(forceGroup)
        system.addForce(force)

    def getMLLongRange(self) -> bool:
        """Whether the model sums electrostatics over all periodic images; by its file."""
        from ..checkpoint import read_header

        return _sums_over_images(read_header(self.path)["config"])


def _sums_over_images(config: Mapping[str, Any]) -> bool:
    """Whether a potential has a term that does, or has another such potential below it."""
    parts = [config["model"], config.get("head"), *(config.get("priors") or [])]
    return any(
        part.get("method") in ("ewald", "pme") or ("potential" in part and _sums_over_images(part["potential"]))
        for part in parts
        if part
    )
