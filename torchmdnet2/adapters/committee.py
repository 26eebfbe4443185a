"""Several potentials as one ASE calculator: their mean, and how much they disagree."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from ..ensemble import Ensemble, read_ensemble
from ..potential.potential import Potential
from .ase import TorchMDNet2Calculator
from .model import open_model

__all__ = ["CommitteeCalculator"]


class CommitteeCalculator(TorchMDNet2Calculator):
    """An Ensemble for ASE: the mean of several potentials, as TorchMDNet2Calculator gives it for one, and their spread.

    The spread is the sample standard deviation over the members (divided by members − 1): `energy_std` (eV),
    `energies_std` [N] (eV), `forces_std` [N, 3] (eV/Å) and `stress_std` (eV/Å³, Voigt order), by
    `calc.get_property(name, atoms)`. Members trained from different random weights on the same data disagree where
    the data says little; a small spread does not prove a small error.

    Args:
        models: at least two, each a path or a Potential; or the ensemble.json of a training.
        device: of all members, as for TorchMDNet2Calculator.
        dtype: likewise.
        charge: likewise.
        spin: likewise.
        allow_untrained_charge: likewise.
        isolated: likewise.

    Raises:
        ValueError: fewer than two models; others as TorchMDNet2Calculator.
    """

    def __init__(
        self,
        models: Iterable[str | os.PathLike | Potential] | str | os.PathLike,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        charge: int | None = None,
        spin: int | None = None,
        allow_untrained_charge: bool = False,
        isolated: bool = False,
    ):
        if isinstance(models, str | os.PathLike) and str(models).endswith(".json"):
            models = read_ensemble(models)
        if isinstance(models, str | os.PathLike | Potential) or len(models := list(models)) < 2:
            raise ValueError("a committee needs at least two models: give a list of them")
        opened = [open_model(model, device, dtype, allow_untrained_charge) for model in models]
        self._set_up(opened, charge, spin, isolated)

    @property
    def potentials(self) -> list[Potential]:
        """The members, in the order given."""
        return list(self._potentials)

    def _evaluator(self) -> Ensemble:
        return Ensemble(self._potentials)

    def _names(self) -> list[str]:
        common = super()._names()
        return [*common, *(f"{name}_std" for name in common if name not in ("free_energy", "novelty"))]
