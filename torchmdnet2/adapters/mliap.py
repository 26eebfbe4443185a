"""LAMMPS builds with Kokkos and ML-IAP: potentials for `pair_style mliap unified`, with data on the GPU.

LAMMPS unpickles the given file. A file from `export_mliap` holds the name of the class `MliapModel`, the bytes of a
.tmn file and plain options. A pickle can run any code when it is read: use only files from sources that you trust.

Shapes: n local atoms, N with the ghosts after them, E directed edges.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import from_bytes, to_bytes
from ..core.files import atomic_write
from ..engine.domain import evaluate_edges, list_cutoff, refuse_global
from ..errors import BadConfig
from ..potential.potential import Potential
from ..units import KCAL_MOL
from .model import atomic_numbers

__all__ = ["MliapModel", "export_mliap"]

_UNITS = {"metal": 1.0, "real": KCAL_MOL}


def export_mliap(
    potential: Potential,
    path: str | os.PathLike,
    elements: Sequence[str],
    charge: float = 0.0,
    units: str = "metal",
    host: bool = False,
    keep: bool = False,
) -> None:
    """Write a file for `pair_style mliap unified FILE 0`, and `pair_coeff * * H O`.

    Args:
        potential: a potential whose parts are all local.
        path: path of the file, which ends in .pt.
        elements: symbols that pair_coeff may name.
        charge: total charge of the simulated structure in e.
        units: LAMMPS's units, "metal" or "real".
        host: run also if Kokkos computes on the CPU; see `MliapModel`.
        keep: rename an existing file to FILE.old.

    Raises:
        ValueError: a part of the potential needs the whole structure.
        UnknownElement, UntrainedCharge, BadConfig: elements, charge or units are unknown.
    """
    allowed = potential.allow_untrained_charge
    model = MliapModel(to_bytes(potential), tuple(elements), float(charge), units, host, allowed)
    file = io.BytesIO()
    # this protocol stores bytes directly, so that the pickle names no object but the class
    torch.save(model, file, pickle_protocol=4)
    atomic_write(path, file.getvalue(), keep=keep)


class MliapModel:
    """The object that `pair_style mliap unified` calls.

    Its pickle holds the bytes of a .tmn file and plain options.

    Args:
        blob: content of a .tmn file.
        elements: symbols of ML-IAP's elements, in order.
        charge: total charge in e.
        units: "metal" or "real".
        host: allow data in the memory of the CPU. LAMMPS 22 July 2025 overruns the buffers of its exchange there, which
            damages memory silently. Use it only with a version in which this is fixed.
        allow_untrained_charge: evaluate a total charge that the model was not trained on.

    Attributes:
        interface, element_types, ndescriptors, nparams, rcutfac: attributes that ML-IAP reads and sets.
    """

    def __init__(
        self,
        blob: bytes,
        elements: tuple[str, ...],
        charge: float,
        units: str,
        host: bool,
        allow_untrained_charge: bool = False,
    ):
        self._arguments = (blob, elements, charge, units, host, allow_untrained_charge)
        if units not in _UNITS:
            raise BadConfig(f"units must be metal or real, got '{units}'")
        self._potential = from_bytes(blob, name="exported model").eval().requires_grad_(False)
        self._potential.allow_untrained_charge = allow_untrained_charge
        refuse_global(self._potential)
        numbers = torch.tensor(atomic_numbers(elements))
        self._potential.check_elements(numbers, lambda k: f"elements: entry {k + 1}")
        # check charge and elements now instead of in the first step
        nobody = numbers[:0]
        evaluate_edges(
            self._potential, numbers, nobody.expand(2, 0), torch.zeros(0, 3), len(numbers), charge,
            list_cutoff(self._potential),
        )  # fmt: skip
        self._numbers, self._charge, self._unit, self._host = numbers, charge, _UNITS[units], host
        self._isolated: Tensor | None = None
        self.interface: Any = None
        self.element_types = list(elements)
        self.ndescriptors, self.nparams = 1, 1
        self.rcutfac = list_cutoff(self._potential) / 2  # ML-IAP multiplies it by the sum of two radii, which are 1

    def __reduce__(self) -> tuple[Any, ...]:
        return MliapModel, self._arguments

    def compute_descriptors(self, data: Any) -> None:
        """Compute nothing: there are no descriptors."""

    def compute_gradients(self, data: Any) -> None:
        """Compute nothing: there are no descriptors."""

    def compute_forces(self, data: Any) -> None:
        """Pass energies and dE/drij to LAMMPS. Processes without atoms take part in all exchanges.

        Raises:
            RuntimeError: LAMMPS has no exchange, or computes on the CPU.
        """
        if not hasattr(data, "forward_exchange"):
            raise RuntimeError(
                "this LAMMPS has no exchange for ML-IAP: a build with Kokkos of 2025 or later is needed, started with "
                "-k on g 1 -sf kk; or use `torchmdnet2 lammps`, which needs no build"
            )
        vectors = torch.as_tensor(data.rij).reshape(-1, 3)
        if vectors.device.type == "cpu" and not self._host:
            raise RuntimeError(
                "LAMMPS runs on the CPU, where its exchange for ML-IAP may damage memory: run it on a GPU "
                "(-k on g 1 -sf kk), use `torchmdnet2 lammps`, or export with --host if your version has this fixed"
            )
        device, n = vectors.device, int(data.nlocal)
        if self._potential.device != device or self._isolated is None:
            self._potential = self._potential.to(device)
            self._numbers = self._numbers.to(device)
            self._isolated = self._potential.subtracted_energies()
        edges = torch.stack([torch.as_tensor(data.pair_i).long(), torch.as_tensor(data.pair_j).long()])
        elements = torch.as_tensor(data.elems).long()[: int(data.ntotal)]
        found = evaluate_edges(
            self._potential, self._numbers[elements], edges, vectors, n, self._charge, list_cutoff(self._potential),
            _Exchange(data, device), self._isolated,
        )  # fmt: skip
        torch.as_tensor(data.eatoms)[:n].copy_(found.atom_energies / self._unit)
        data.energy = float(found.energy) / self._unit
        gradient = (found.edge_gradients.double() / self._unit).contiguous()
        if gradient.device.type == "cuda":
            torch.cuda.synchronize(gradient.device)
            data.update_pair_forces(gradient)
        elif gradient.shape[0]:
            data.update_pair_forces(np.ascontiguousarray(gradient.numpy()))


class _Exchange:
    """Exchange of rows of atoms through ML-IAP; input and output hold rows of local atoms and ghosts."""

    def __init__(self, data: Any, device: torch.device):
        self._data, self._device = data, device
        self.num_local, self.num_ghosts = int(data.nlocal), int(data.ntotal) - int(data.nlocal)

    def forward(self, rows: Tensor) -> Tensor:
        out = self._call(self._data.forward_exchange, rows, 0)
        return out[self.num_local :].reshape(self.num_ghosts, *rows.shape[1:])

    def reverse(self, rows: Tensor) -> Tensor:
        out = self._call(self._data.reverse_exchange, rows, self.num_local)
        return out[: self.num_local].reshape(self.num_local, *rows.shape[1:])

    def _call(self, exchange: Any, rows: Tensor, first: int) -> Tensor:
        """Set the rows from `first` on; the others are zero."""
        width = rows.shape[1:].numel()
        given = rows.new_zeros(self.num_local + self.num_ghosts, width)
        given[first : first + rows.shape[0]] = rows.detach().reshape(rows.shape[0], width)
        taken = torch.zeros_like(given)
        exchange(given, taken, width)
        return taken
