"""Plug-in for openmm-ml: MLPotential("torchmdnet2", modelPath="model.tmn").

openmm-ml imports this module at its own import. So this module imports nothing but openmm-ml; torch and the rest of the
package are imported when a system is made.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import StructureWarning, needs_extra


class _Factory:
    """Stands for the factory below while openmm-ml is being imported and requests it too early."""

    def createImpl(self, *given: Any, **named: Any) -> TorchMDNet2Impl:
        return TorchMDNet2Factory().createImpl(*given, **named)


def __getattr__(name: str) -> Any:
    # if this module is imported before openmm-ml, the imports below make openmm-ml request the factory at once
    if name == "TorchMDNet2Factory":
        return _Factory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


with needs_extra("openmm", "openmm", "openmmml"):
    from openmmml.mlpotential import MLPotentialImpl, MLPotentialImplFactory

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

__all__ = ["TorchMDNet2Factory", "TorchMDNet2Impl"]

_ELSEWHERE = {"spin": "multiplicity", "dtype": "precision"}  # names in the other adapters -> names here
_REASONS = {
    "periodic": ": the model is periodic where the topology or the System has a box; for a molecule alone in a box "
    "give isolated=True",
    "forceGroup": " of createSystem; call setForceGroup of the System's forces",
}
_OPTIONS = ("charge", "multiplicity", "device", "precision", "allow_untrained_charge", "isolated", "coulomb", "level")
_OF_EMBEDDING = ("linkAtomDistances",)  # mechanical embedding passes on its arguments
_KNOWN = f" (known: {', '.join((*_OPTIONS, *_OF_EMBEDDING))})"
_ROUNDING = 0.02 + 1e-9  # e, rounding of the sum of a molecule's charges in force fields
_LOGGER = logging.getLogger("torchmdnet2.openmm")


class TorchMDNet2Factory(MLPotentialImplFactory):
    """Creates the implementation; registered under the entry point `openmmml.potentials`."""

    def createImpl(  # name and arguments of openmm-ml's interface
        self, name: str, modelPath: str | os.PathLike | None = None, **args: Any
    ) -> TorchMDNet2Impl:
        """
        Args:
            name: "torchmdnet2".
            modelPath: path of a .tmn file, or name of a potential.

        Raises:
            ValueError: the path is missing, or there is another argument.
        """
        if modelPath is None:
            raise ValueError('give the path of a model file: MLPotential("torchmdnet2", modelPath="model.tmn")')
        if args:
            raise ValueError(f"MLPotential('torchmdnet2') takes only modelPath, but also got {', '.join(args)}")
        return TorchMDNet2Impl(modelPath)


class TorchMDNet2Impl(MLPotentialImpl):
    """Implements openmm-ml's interface for a model file, alone or mixed with a force field.

    Args:
        path: path of the .tmn file, or name of a potential.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = path

    def addForces(
        self,
        topology: Topology,
        system: openmm.System,
        atoms: Iterable[int] | None,
        forceGroup: int,
        /,
        charge: int | None = None,
        multiplicity: int = 0,
        device: Any = None,
        precision: str | None = None,
        allow_untrained_charge: bool = False,
        isolated: bool | None = None,
        coulomb: str = "pme",
        level: str | None = None,
        **args: Any,
    ) -> None:
        """Add the model's force, and the bonds that define the molecules of its atoms for OpenMM.

        Arguments after `forceGroup` are those of createSystem and createMixedSystem.

        Args:
            topology, system, atoms, forceGroup: from openmm-ml.
            charge: total charge in e of the atoms that the model sees. None takes the sum of the formal charges that
                the topology states, else in a mixed system the sum of the force field's charges, else 0.
            multiplicity: 2S+1 of these atoms; 0 means not given.
            device: "cpu", "cuda", …; None takes a GPU if there is one.
            precision: "single" or "double"; "mixed" is faster on a GPU, as for `Evaluator`; None keeps the model's.
            allow_untrained_charge: accept a charge that the model was not trained on, or does not use.
            isolated: evaluate the atoms of the model without periodic images, made whole. None does so in a mixed
                system if the model has a sum over all pairs.
            coulomb: "pme" or "dsf", as for `torchmdnet2.load`.
            level: level of theory, as for `torchmdnet2.load`.
            args: argument of the embedding: linkAtomDistances.

        Raises:
            TypeError: an argument is unknown.
            others: as `torchmdnet2.adapters.openmm.add_force`.
        """
        import torch

        from ..registry import did_you_mean
        from .openmm import add_force

        for name in args.keys() - set(_OF_EMBEDDING):
            meant = _ELSEWHERE.get(name)
            hint = f", did you mean '{meant}'?" if meant else did_you_mean(name, _OPTIONS)
            raise TypeError(f"unknown argument '{name}'{_REASONS.get(name) or hint or _KNOWN}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        add_force(
            system, self.path, topology, atoms, force_group=forceGroup, charge=charge, spin=multiplicity, device=device,
            **({"precision": "mixed"} if precision == "mixed" else {"dtype": precision}),
            allow_untrained_charge=allow_untrained_charge, isolated=isolated, coulomb=coulomb, level=level,
        )  # fmt: skip

    def getSupportedEmbeddings(self) -> list[str]:
        """Return the only embedding, the mechanical one of `createMixedSystem`, which reads the force field."""
        return ["mechanical"]

    def createMixedSystem(
        self,
        topology: Topology,
        system: openmm.System,
        atoms: list[int],
        forceGroup: int,
        interpolate: bool,
        embedding: str,
        returnInfo: bool = False,
        **args: Any,
    ) -> openmm.System | dict[str, Any]:
        """Return a mixed system by openmm-ml's mechanical embedding, with facts that `addForces` cannot know.

        These are the box, which may be in the force field's System alone, and the charges of the force field. If
        neither `charge` nor the topology states the total charge of the model's atoms, their sum is taken, which must
        be a whole number up to rounding. A `charge` that differs from the sum is used, with a warning.

        Args:
            topology, system, atoms, forceGroup, interpolate, embedding, returnInfo, args: from openmm-ml.

        Raises:
            BadData: `charge` is not given, and the total charges of topology and force field differ, or the topology
                states none and the charges of the force field do not sum to a whole number.
            others: as `addForces`.
        """
        from openmmml.embeddings.mechanicalembedding import MechanicalEmbedding

        from ..core.stated import ROUNDING, Statement, agreed
        from ..errors import BadData
        from .openmm import CORRECT, formal_charge, has_box

        if system.usesPeriodicBoundaryConditions() and not has_box(topology):
            topology = copy.deepcopy(topology)
            topology.setPeriodicBoxVectors(system.getDefaultPeriodicBoxVectors())
        everyone, atoms = list(topology.atoms()), list(atoms)
        total, given = _force_field_charge(system, atoms), args.get("charge")
        formal = formal_charge([everyone[i] for i in atoms])
        expected = None if total is None or abs(total - round(total)) > _ROUNDING else round(total)
        if total is not None and expected is None and given is None and formal is None:
            raise BadData(
                f"the charges of the force field sum to {total:.4g} e over the atoms of the model, which is not a "
                "whole number: give their total charge, as in charge=0"
            )
        if total is not None and expected is not None and given is None:
            if abs(total - expected) > ROUNDING:
                _LOGGER.warning(
                    "the charges of the force field sum to %.4g e over the atoms of the model: the total charge is %d",
                    total, expected,
                )  # fmt: skip
            stated = [*([formal] if formal else []), Statement(expected, "the charges of the force field")]
            remedy = f"{CORRECT} or the force field, or give charge={stated[0].value}"
            args["charge"] = agreed(stated, "charge", "of the model's atoms, ", remedy)
        elif expected is not None and given != expected:
            warnings.warn(
                f"the charges of the force field sum to {expected} e over the atoms of the model, but the given "
                f"charge={given} is used",
                StructureWarning,
                stacklevel=3,
            )
        return MechanicalEmbedding().createMixedSystem(
            self, topology, system, atoms, forceGroup, interpolate, returnInfo=returnInfo, **args
        )

    def getMLLongRange(self) -> bool:
        """Return True if the model sums electrostatics over all periodic images, according to its file."""
        from ..checkpoint import read_header

        return _sums_over_images(read_header(self.path)["config"])


def _force_field_charge(system: openmm.System, atoms: Iterable[int]) -> float | None:
    """Return the sum of the atoms' charges in e; None without a NonbondedForce."""
    import openmm

    for force in system.getForces():
        if isinstance(force, openmm.NonbondedForce):
            return sum(force.getParticleParameters(atom)[0]._value for atom in atoms)
    return None


def _sums_over_images(config: Mapping[str, Any]) -> bool:
    """Return True if a potential, or one that it contains, sums over all periodic images."""
    parts = [config["model"], config.get("head"), *(config.get("priors") or [])]
    return any(
        part.get("method") in ("ewald", "pme") or ("potential" in part and _sums_over_images(part["potential"]))
        for part in parts
        if part
    )
