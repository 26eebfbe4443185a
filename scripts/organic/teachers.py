"""The teachers of stage 3: labels and their uncertainty for batches of structures with equal numbers of atoms.

Shapes: B structures of n atoms.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from shards import file_sha256
from torch import Tensor

if TYPE_CHECKING:
    from torchmdnet2.potential.potential import Result

__all__ = ["GFN2", "AIMNet2", "Labels", "Model", "Student", "Teacher"]


class Labels(NamedTuple):
    """energy [B] eV float64; forces [B, n, 3] eV/Å; charges [B, n] e; spread [B] eV/Å, of the worst force."""

    energy: Tensor
    forces: Tensor
    charges: Tensor
    spread: Tensor


class Teacher(ABC):
    """Attributes: description, for the record; sha256 of its file or ""; level of theory of its labels."""

    description: str
    sha256: str = ""
    level: str

    @abstractmethod
    def label(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Labels:
        """Labels of [B, n] atomic numbers, [B, n, 3] positions in Å, [B] total charges in e."""

    def forces(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Tensor:
        """[B, n, 3] eV/Å, for dynamics: may be cheaper than `label`."""
        return self.label(numbers, positions, charge).forces


class AIMNet2(Teacher):
    """An ensemble of AIMNet2 networks as TorchScript, which runs the program in the file: use files that you trust.

    Source: D. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 16, 10228 (2025). Weights: MIT licence.

    Args:
        path: aimnet2_wb97m-d3_ens.jpt or the like.
        device: of the evaluation.
        batch: most structures at a time.
    """

    def __init__(self, path: str | os.PathLike, device: str, batch: int = 2048):
        torch._C._jit_set_profiling_executor(False)  # type: ignore[attr-defined]  # new shapes would compile anew
        self.network = torch.jit.load(str(path), map_location=device)
        self.member = getattr(self.network.models, "0")  # a scripted list cannot be indexed
        self.device, self.batch = torch.device(device), batch
        self.description, self.sha256 = f"AIMNet2 {os.path.basename(path)}", file_sha256(path)
        self.level = (
            "AIMNet2 (ωB97M-D3)" if "wb97m" in os.path.basename(path) else f"AIMNet2 ({os.path.basename(path)})"
        )

    def label(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Labels:
        parts = [self._label(*(t[k : k + self.batch] for t in (numbers, positions, charge)))
                 for k in range(0, len(numbers), self.batch)]  # fmt: skip
        return Labels(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def forces(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Tensor:
        """Forces by one of the networks, which is four times as fast."""
        parts = [self._run(self.member, *(t[k : k + self.batch] for t in (numbers, positions, charge)))
                 for k in range(0, len(numbers), self.batch)]  # fmt: skip
        return torch.cat([part["forces"].detach() for part in parts])

    def _run(self, network: torch.nn.Module, numbers: Tensor, positions: Tensor, charge: Tensor) -> dict[str, Tensor]:
        given = {"coord": positions.float(), "numbers": numbers.long(), "charge": charge.float()}
        return network({name: value.to(self.device) for name, value in given.items()})

    def _label(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Labels:
        out = self._run(self.network, numbers, positions, charge)
        spread = out["forces_std"].detach().norm(dim=2).amax(1)
        return Labels(out["energy"].detach().double(), out["forces"].detach(), out["charges"].detach(), spread)


class GFN2(Teacher):
    """GFN2-xTB by tblite, one structure after the other on the CPU, to try the pipeline without AIMNet2.

    Source: C. Bannwarth, S. Ehlert, S. Grimme, J. Chem. Theory Comput. 15, 1652 (2019).
    """

    description = level = "GFN2-xTB"
    device = torch.device("cpu")

    def label(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Labels:
        from tblite.interface import Calculator

        energies, forces, charges = [], [], []
        for z, r, q in zip(numbers.numpy(), positions.double().numpy(), charge.tolist(), strict=True):
            calculator = Calculator("GFN2-xTB", z, r / 0.529177210903, charge=float(q))
            calculator.set("verbosity", 0)
            try:
                found = calculator.singlepoint()
                values = found.get("energy"), found.get("gradient"), found.get("charges")
            except RuntimeError:  # not converged
                values = np.nan, np.full(r.shape, np.nan), np.full(len(z), np.nan)
            energies.append(values[0] * 27.211386245988)
            forces.append(-values[1] * 27.211386245988 / 0.529177210903)
            charges.append(values[2])
        tensors = (torch.as_tensor(np.array(x)) for x in (energies, forces, charges))
        return Labels(*tensors, torch.zeros(len(energies)))


class Student:
    """A trained model, by file or name, that drives dynamics, so that the teacher labels the frames that it meets."""

    def __init__(self, path: str | os.PathLike, device: str):
        from torchmdnet2 import Evaluator, load
        from torchmdnet2.potentials import find_model

        # no graphs: each file of labels has another shape, and its batches are large
        self.evaluator, self.device = Evaluator(load(path, device), graphs=False), torch.device(device)
        self.description, self.sha256 = f"student {os.path.basename(path)}", file_sha256(find_model(path))

    def forces(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Tensor:
        """[B, n, 3] eV/Å."""
        found = self.run(numbers, positions, charge).forces
        assert found is not None
        return found.reshape(*numbers.shape, 3)

    def energies(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Tensor:
        """[B] eV."""
        return self.run(numbers, positions, charge).energy

    def run(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Result:
        """Energies [B], forces [B · n, 3] and all else that the model gives."""
        from torchmdnet2 import System

        size, n = numbers.shape
        batch = torch.arange(size).repeat_interleave(n)
        parts = {"z": numbers.reshape(-1).long(), "pos": positions.reshape(-1, 3).double(), "batch": batch}
        return self.evaluator(System(**parts, charge=charge.double()).to(device=self.device))


class Model(Teacher):
    """Potentials of this package as teacher, by file or name: their mean, where several are given with commas.

    `large.yaml` learns with labels of its own start, `distil.yaml` with those of trained members. The first potential
    alone gives the forces of dynamics.
    """

    def __init__(self, paths: str | os.PathLike, device: str):
        names = os.fspath(paths).split(",")
        self.members, self.device = [Student(name, device) for name in names], torch.device(device)
        potentials = [member.evaluator.potential for member in self.members]
        for potential, name in zip(potentials, names, strict=True):
            if "charges" not in potential.outputs:
                raise SystemExit(f"{name} predicts no charges, which labels have: take another model")
        if len({potential.level_of_theory for potential in potentials}) > 1:
            raise SystemExit(f"{paths}: the models have different levels of theory")
        self.description = str(paths)
        self.sha256 = " ".join(member.sha256 for member in self.members)
        self.level = potentials[0].level_of_theory or f"labels of {paths}"

    def label(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Labels:
        found = [member.run(numbers, positions, charge) for member in self.members]
        energy = torch.stack([result.energy for result in found]).mean(0)
        forces = torch.stack([result.forces for result in found]).reshape(-1, *numbers.shape, 3)
        charges = torch.stack([result.charges for result in found]).mean(0).reshape(numbers.shape)
        spread = forces.double().std(0, correction=min(1, len(found) - 1)).norm(dim=2).amax(1)
        return Labels(energy, forces.mean(0), charges, spread)

    def forces(self, numbers: Tensor, positions: Tensor, charge: Tensor) -> Tensor:
        return self.members[0].forces(numbers, positions, charge)
