"""Which representations and priors have a fast path.

A model of the package has its folder in fused/ and one line here; a plug-in calls `register_fast_path`.
"""

from __future__ import annotations

from torch import nn

from ..models.equivariant_transformer import EquivariantTransformer
from ..models.graph_network import GraphNetwork
from ..models.matgl_tensornet import MatglTensorNet
from ..models.tensornet import TensorNet
from ..models.tensornet2 import TensorNet2
from ..models.transformer import Transformer
from ..priors import D2, D3, ZBL, Coulomb, PairPotential
from .fast_path import FastPath, PriorPath
from .matgl_tensornet.path import MatglPath
from .messages.path import MessagePath
from .pair_priors.path import PairPriorPath
from .particle_mesh.path import CoulombPath
from .tensornet.path import TensorNetPath
from .tensornet2.path import TensorNet2Path

__all__ = ["fast_path", "prior_path", "register_fast_path", "register_prior_path"]

_PATHS: dict[type[nn.Module], FastPath] = {
    TensorNet: TensorNetPath(),
    TensorNet2: TensorNet2Path(),
    MatglTensorNet: MatglPath(),
    EquivariantTransformer: MessagePath(),
    Transformer: MessagePath(),
    GraphNetwork: MessagePath(),
}
_PRIOR_PATHS: dict[type[nn.Module], PriorPath] = {
    **dict.fromkeys((ZBL, PairPotential, D2, D3), PairPriorPath()),
    Coulomb: CoulombPath(),
}


def register_fast_path(representation: type[nn.Module], path: FastPath) -> None:
    """Evaluate and train representations of this class on `path`. Subclasses do not inherit it."""
    _PATHS[representation] = path


def register_prior_path(prior: type[nn.Module], path: PriorPath) -> None:
    """Evaluate priors of this class on `path`. Subclasses do not inherit it."""
    _PRIOR_PATHS[prior] = path


def fast_path(representation: nn.Module) -> FastPath | None:
    """The fast path for a representation, None where there is none."""
    return _PATHS.get(type(representation))


def prior_path(prior: nn.Module) -> PriorPath | None:
    """The fast path for a prior, None where there is none."""
    return _PRIOR_PATHS.get(type(prior))
