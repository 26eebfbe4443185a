"""Muon: orthogonalised momentum for weight matrices, AdamW for everything else.

Shapes: M matrices, [R, C] the largest number of their rows and columns, P their entries one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ...registry import Registry

__all__ = [
    "DEFAULT_OPTIMIZER", "OPTIMIZERS", "AdamW", "Muon", "Stacks", "Update", "depths", "make_optimizer",
    "newton_schulz", "parameter_groups", "rates_of",
]  # fmt: skip


Beta = Annotated[float, Field(ge=0, lt=1)]
Small = Annotated[float, Field(gt=0, lt=1)]

_ROWS = 128  # on a GPU, matrices of up to so many rows share a stack, those of up to twice as many the next one


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for weight matrices, AdamW for everything else (Jordan et al. 2024).

    The momentum M of a matrix is replaced by the nearest orthogonal matrix, found by five Newton–Schulz iterations, and
    scaled by 0.2·√max(rows, columns), so that its entries are as large as AdamW's updates and the same learning rate
    fits both (Liu et al. 2025, arXiv:2502.16982). Embeddings are tables, not matrices: they go to AdamW. Nothing waits
    for the device, and rates may be tensors on it.

    Args:
        params: groups of parameters; those with `matrices` are orthogonalised.
        momentum: of the matrices, Nesterov's.
        beta1, beta2: of AdamW for the rest.
        eps: of AdamW.
    """

    def __init__(self, params: Any, momentum: Beta = 0.95, beta1: Beta = 0.9, beta2: Beta = 0.999, eps: Small = 1e-8):
        settings = {"lr": 0.0, "momentum": momentum, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": 0.0}
        super().__init__(params, {**settings, "matrices": False})
        self._stacks: dict[tuple[int, ...], Stacks] = {}
        for group in self.param_groups:  # now, because a step that is captured in a graph could not make them
            if group["matrices"]:
                self._stacks_of(group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if trained:
                (self._orthogonal if group["matrices"] else self._adam)(trained, group)

    def _stacks_of(self, parameters: Sequence[Tensor]) -> Stacks:
        key = tuple(map(id, parameters))
        if key not in self._stacks:
            self._stacks[key] = Stacks(parameters, fill=parameters[0].is_cuda)
        return self._stacks[key]

    def _orthogonal(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = _gradients(parameters)
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        changes = self._stacks_of(parameters).orthogonalised(torch.cat([u.reshape(-1) for u in updates])) * group["lr"]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        parts = changes.split([p.numel() for p in parameters])
        torch._foreach_sub_(parameters, [part.view_as(p) for part, p in zip(parts, parameters, strict=True)])

    def _adam(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p].update(step=step, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        of = {name: [self.state[p][name] for p in parameters] for name in ("mean", "square", "step")}
        adamw(
            parameters, _gradients(parameters), of["mean"], of["square"], [], of["step"], fused=True,
            amsgrad=False, beta1=group["beta1"], beta2=group["beta2"], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


class Stacks:
    """Stacks of matrices that are orthogonalised together, since a few large products are faster than many small ones.

    Wide matrices and the transposes of tall ones are stacked.

    Args:
        matrices: of one device and floating-point type; only that and their shapes matter.
        fill: rows are padded with zeros to a multiple of 128, which Newton–Schulz does not change (for a GPU, where
            the number of operations counts). Otherwise matrices of a stack have one shape.

    Attributes:
        stacks: [M, R, C] each: where the entries are among all P, P for a zero.
        back: [P] where the entries are in the stacks, one after the other.
        scale: [P] factor of the entries.
    """

    def __init__(self, matrices: Sequence[Tensor], fill: bool):
        shapes, device = [matrix.shape for matrix in matrices], matrices[0].device
        numbers = [shape.numel() for shape in shapes]
        total = sum(numbers)
        places = torch.arange(total).split(numbers)
        wide = [p.view(s) if s[0] <= s[1] else p.view(s).T for p, s in zip(places, shapes, strict=True)]
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in wide:
            alike.setdefault((-(-matrix.shape[0] // _ROWS),) if fill else tuple(matrix.shape), []).append(matrix)
        back = torch.empty(total, dtype=torch.long)
        first = 0
        self.stacks: list[Tensor] = []
        for members in alike.values():
            entry = torch.full((len(members), *(max(m.shape[k] for m in members) for k in (0, 1))), total)
            for into, matrix in zip(entry, members, strict=True):
                into[: matrix.shape[0], : matrix.shape[1]] = matrix
            used = entry < total
            back[entry[used]] = first + used.flatten().nonzero().flatten()
            first += entry.numel()
            self.stacks.append(entry.to(device))
        self.back = back.to(device)
        scale = torch.tensor([0.2 * max(shape) ** 0.5 for shape in shapes], dtype=torch.float64)
        self.scale = scale.repeat_interleave(torch.tensor(numbers)).to(matrices[0])

    def orthogonalised(self, entries: Tensor) -> Tensor:
        """Return scaled orthogonal matrices near those with these entries, [P] both."""
        padded = torch.nn.functional.pad(entries, (0, 1))
        found = [newton_schulz(padded[entry]).flatten() for entry in self.stacks]
        return torch.cat(found)[self.back] * self.scale


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return nearly U Vᵀ of matrices U S Vᵀ, [..., m, n]: singular values between 0.7 and 1.2, by Muon's quintic
    iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    shape = matrices.shape
    x = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)).reshape(-1, *shape[-2:])
    tall = shape[-2] > shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)


# --- Optimisers by name. Each keeps its state in tensors, so that a training resumes to the same bits ---
#
# Parameters come in groups, each with `weight_decay` and `lr_scale`, a factor of the learning rate.

OPTIMIZERS: Registry = Registry("optimizer")
DEFAULT_OPTIMIZER = "muon"  # half the error of AdamW after as many steps: docs/training.md, "Optimizers"


@OPTIMIZERS.register("adamw")
class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019).

    Args:
        params: groups of parameters.
        beta1: decay of the mean of the gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the latter.
        amsgrad: divide by the largest mean of squares so far.
    """

    def __init__(self, params: Any, beta1: Beta = 0.9, beta2: Beta = 0.999, eps: Small = 1e-8, amsgrad: bool = False):
        super().__init__(params, betas=(beta1, beta2), eps=eps, amsgrad=amsgrad, fused=True)


OPTIMIZERS.register("muon")(Muon)


# --- groups ----------------------------------------------------------------------------------------------------------


def depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter of a potential: 0 embeddings, 1 … L the layers, L + 1 the read-out and the
    priors.

    Parameters before the first layer of the representation count as embedding, those after the last as read-out.
    """
    names = [name for name, _ in model.named_parameters()]
    layer = {name: re.match(r"representation\.\w+\.(\d+)\.", name) for name in names}
    layers = [name for name in names if layer[name] and "tensor_embedding" not in name]
    last = max((int(match[1]) + 1 for name in layers if (match := layer[name])), default=0)
    found, seen = {}, False
    for name in names:
        match = layer[name] if name in layers else None
        seen = seen or match is not None
        if match:
            found[name] = int(match[1]) + 1
        else:
            early = name.startswith("representation.") and ("embedding" in name or not seen)
            found[name] = 0 if early else last + 1
    return found


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_decay: float = 1.0, matrices: bool = False
) -> list[dict[str, Any]]:
    """Return trainable parameters in groups for an optimizer.

    Args:
        model: a potential.
        weight_decay: of tensors with two or more dimensions only.
        lr_decay: the rate of parameters d levels below the read-out is multiplied by lr_decay**d.
        matrices: put weight matrices, without embeddings, in separate groups, marked "matrices".
    """
    deep = depths(model)
    top = max(deep.values(), default=0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim >= 2
            matrix = matrices and parameter.ndim == 2 and id(parameter) not in tables and min(parameter.shape) > 1
            groups.setdefault((not decayed, not matrix, lr_decay ** (top - deep[name])), []).append(parameter)
    made = []
    for (plain, no_matrix, scale), parameters in groups.items():
        group = {"params": parameters, "weight_decay": 0.0 if plain else weight_decay, "lr_scale": scale}
        made.append({**group, "matrices": True} if not no_matrix else group)
    if not made:
        raise ValueError("every parameter is frozen: there is nothing to train")
    return made


def make_optimizer(
    model: nn.Module, settings: Mapping[str, Any], weight_decay: float = 0.0, lr_decay: float = 1.0
) -> torch.optim.Optimizer:
    """Return the optimizer of a potential's trainable parameters.

    Args:
        model: a potential.
        settings: {"name": …, arguments} as in the configuration.
        weight_decay, lr_decay: see `parameter_groups`.
    """
    arguments = dict(settings)
    cls = OPTIMIZERS[arguments.pop("name")]
    return cls(parameter_groups(model, weight_decay, lr_decay, matrices=cls is Muon), **arguments)


# --- The end of a training step, eager or captured ---


class Update:
    """Gradients, their clipping, the optimizer's step, the average of the weights. Nothing waits for the device.

    Args:
        parameters: what is trained.
        average: the averaged parameters, in the same order.
        optimizer: of the parameters.
        clipping: largest norm of the gradient; None: no limit.

    Attributes:
        flat: [P + 1] all gradients and the loss side by side: one sum over processes, one norm.
    """

    def __init__(
        self, parameters: Sequence[Tensor], average: Sequence[Tensor], optimizer: torch.optim.Optimizer,
        clipping: float | None,
    ):  # fmt: skip
        self.parameters, self.average = list(parameters), list(average)
        self.optimizer, self.clipping = optimizer, math.inf if clipping is None else clipping
        sizes = [p.numel() for p in self.parameters]
        self.flat = self.parameters[0].new_zeros(sum(sizes) + 1)
        for p, part in zip(self.parameters, self.flat[:-1].split(sizes), strict=True):
            p.grad = part.view_as(p)

    def store(self, loss: Tensor) -> None:
        """Compute the gradients of a loss; those of parameters that it does not depend on are zero."""
        none = [None] * len(self.parameters)
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True) if loss.requires_grad else none
        places = _gradients(self.parameters)
        used = [(place, gradient) for place, gradient in zip(places, found, strict=True) if gradient is not None]
        if len(used) < len(places):
            self.flat.zero_()
        if used:
            torch._foreach_copy_([place for place, _ in used], [gradient for _, gradient in used])
        self.flat[-1] = loss.detach()

    def clip(self) -> Tensor:
        """Scale the gradients down to `clipping`; returns whether they and the loss are finite: else they are zero."""
        gradient, loss = self.flat[:-1], self.flat[-1]
        norm = torch.linalg.vector_norm(gradient)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        scale = (self.clipping / (norm + 1e-6)).clamp(max=1.0)
        gradient.copy_(torch.where(finite, gradient * scale, 0))
        return finite

    @torch.no_grad()
    def move(self, share: float | Tensor) -> None:
        """Change the weights at the rates of the optimizer, and their average: (1 − share)·average + share·weights."""
        self.optimizer.step()
        if not isinstance(share, Tensor):
            torch._foreach_lerp_(self.average, self.parameters, share)
            return
        change = torch._foreach_sub(self.parameters, self.average)  # lerp takes no such tensor
        torch._foreach_mul_(change, share)
        torch._foreach_add_(self.average, change)


def rates_of(optimizer: torch.optim.Optimizer, rate: float) -> list[float]:
    """Return the learning rate of every group: the rate times the group's factor."""
    return [rate * group.get("lr_scale", 1.0) for group in optimizer.param_groups]
