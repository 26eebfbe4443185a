"""torch-sim: a potential as a model of batched simulations. Needs Python 3.12 and torch-sim-atomistic.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.stated_words import kind_of
from ..errors import BadData, needs_extra
from ..evaluator import Evaluator, Precision
from ..potential.potential import Potential
from ..potential.refusals import require_flag
from ..system import System
from .isolated import isolate
from .model import open_model

with needs_extra("torch-sim", "torch-sim-atomistic"):
    from torch_sim.models.interface import ModelInterface

if TYPE_CHECKING:
    from torch_sim.state import SimState

__all__ = ["TorchMDNet2Model"]


class TorchMDNet2Model(ModelInterface):
    """Model for torch-sim: energy (eV), forces (eV/Å) and stress (eV/Å³, tensile positive).

    The Evaluator computes the results. Total charges and multiplicities 2S+1 are the state's system extras `charge` and
    `spin` [B], or extras under their other names (`total_charge`, `multiplicity`), else 0. The stress of structures
    without a cell is zero.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential (copied: later changes to it have no effect).
        device: "cpu", "cuda", "cuda:1", …
        dtype: floating-point type of network and states, torch.float32 or torch.float64; None keeps the stored one.
        compute_forces: True if `forward` returns forces in addition to the energy; can be set later.
        compute_stress: likewise for the stress.
        allow_untrained_charge: evaluate total charges that the model was not trained on, or does not use, with a
            warning; they are refused otherwise.
        isolated: each structure is one molecule: made whole where it is wrapped into a periodic cell, and evaluated
            without the cell, as in vacuum. It must be shorter than half of the shortest width of its cell; its stress
            is zero.
        coulomb: method for Coulomb sums over all pairs in periodic cells, "pme" or "dsf", as for `torchmdnet2.load`;
            None takes "pme", or the method of a given Potential.
        level: level of theory, for a model that was trained on several; None takes its default.
        precision: of the kernels on a GPU, "native" or "mixed" (faster), as for `Evaluator`.

    Raises:
        FileNotFoundError, BadCheckpoint: the model file is missing or damaged.
        ValueError: the device, dtype or precision cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike | Potential,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        compute_forces: bool = True,
        compute_stress: bool = False,
        allow_untrained_charge: bool = False,
        isolated: bool = False,
        coulomb: str | None = None,
        level: str | None = None,
        precision: Precision = "native",
    ):
        super().__init__()
        self.isolated = require_flag(isolated, "isolated")
        self.potential, _ = open_model(model, device, dtype, allow_untrained_charge, coulomb, level)
        self._device, self._dtype = self.potential.device, self.potential.dtype
        self._compute_forces = require_flag(compute_forces, "compute_forces")
        self._compute_stress = require_flag(compute_stress, "compute_stress")
        self._evaluator = Evaluator(self.potential, precision)
        self._known: tuple[Any, ...] = ()
        self._template: System | None = None
        self._isolated: tuple[System | None, System] | None = None

    @ModelInterface.compute_forces.setter  # type: ignore[attr-defined]
    def compute_forces(self, value: bool) -> None:
        self._compute_forces = require_flag(value, "compute_forces")

    @ModelInterface.compute_stress.setter  # type: ignore[attr-defined]
    def compute_stress(self, value: bool) -> None:
        self._compute_stress = require_flag(value, "compute_stress")

    def forward(self, state: SimState, **kwargs: Any) -> dict[str, Tensor]:
        """Return energies and, if enabled, forces and stress of all structures; the state stays unchanged.

        Args:
            state: N atoms in B structures, on the model's device.
            kwargs: ignored.

        Returns:
            "energy" [B], "forces" [N, 3], "stress" [B, 3, 3], in the type of the state's positions.

        Raises:
            ValueError, UnknownElement: as the Potential; ValueError if a result is not finite.
        """
        system = self._system(state)
        if self.isolated:
            system = self._alone(isolate(system))
        flat = system.volume == 0
        if self._compute_stress and bool(flat.any()):
            # without a cell the volume does not enter, so that any value will do
            cell = torch.where(flat[:, None, None] & ~system.pbc.any(), torch.eye(3).to(system.cell), system.cell)
            system = system.replace(cell=cell)
        result = self._evaluator(system, forces=self._compute_forces, stress=self._compute_stress)
        output = {"energy": result.energy.to(system.dtype)}
        if result.forces is not None:
            output["forces"] = result.forces
        if result.stress is not None:
            output["stress"] = torch.where(flat[:, None, None], 0.0, result.stress).to(system.dtype)
        if not all(bool(torch.isfinite(value).all()) for value in output.values()):
            raise ValueError(
                "the model's result is not finite: a structure is unphysical (atoms too close or too far apart?)"
            )
        return {name: value.detach() for name, value in output.items()}

    def _alone(self, system: System) -> System:
        """Return the previous tensors for unchanged parts, as `_system` does."""
        if self._isolated is None or self._isolated[0] is not self._template:
            self._isolated = (self._template, system)
        return self._isolated[1].replace(pos=system.pos)

    @staticmethod
    def _stated(state: SimState, quantity: str) -> Any:
        """Return the system extra that states a quantity under any of its names (`stated_words.kind_of`), or None.

        Raises:
            BadData: two extras state the quantity, and they differ.
        """
        names = {quantity, *(name for name in getattr(state, "_system_extras", {}) if kind_of(name) == quantity)}
        found = [(name, value) for name in sorted(names) if (value := getattr(state, name, None)) is not None]
        for name, value in found[1:]:
            if not torch.equal(value.double(), found[0][1].double()):
                raise BadData(f"the state's extras {found[0][0]} and {name} differ: remove the one that is wrong")
        return found[0][1] if found else None

    def _system(self, state: SimState) -> System:
        """Return the state as a System; unchanged parts keep their tensors, which the evaluator need not check."""
        charge, spin = self._stated(state, "charge"), self._stated(state, "spin")
        pbc = torch.as_tensor(state.pbc, device=self._device)
        given = [t for t in (state.atomic_numbers, state.system_idx, charge, spin) if t is not None]
        known: tuple[Any, ...] = ()
        if not any(t.is_inference() for t in given):  # inference tensors do not count their changes
            known = (*((id(t), t._version) for t in given), tuple(pbc.tolist()), state.n_systems)
        pos, cell = state.positions.detach(), state.row_vector_cell.detach().contiguous()
        if not known or known != self._known or self._template is None:
            self._template = System(
                z=state.atomic_numbers, pos=pos, batch=state.system_idx, cell=cell, pbc=pbc, charge=charge, spin=spin
            )
            # keep the tensors alive, so that no other tensor gets one of these addresses
            self._known, self._held = known, given
        return self._template.replace(pos=pos, cell=cell)
