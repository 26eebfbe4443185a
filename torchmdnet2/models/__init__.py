"""Representations and heads; importing this package registers all of them."""

from ..float64_buffers import Float64Buffers
from .aimnet2 import AIMNet2
from .base import Features, Graph, Head, PropertyHead, Representation
from .equivariant_transformer import EquivariantTransformer
from .graph_network import GraphNetwork
from .heads import EquivariantScalarHead, GatedScalarHead, ScalarCoulombHead, ScalarHead
from .matgl_tensornet import MatglTensorNet
from .properties import ChargesHead, DipoleHead, ScalarPropertyHead, SpatialExtentHead, VectorHead
from .tensornet import TensorNet
from .tensornet2 import TensorNet2
from .transformer import Transformer

__all__ = [
    "AIMNet2",
    "ChargesHead",
    "DipoleHead",
    "EquivariantScalarHead",
    "EquivariantTransformer",
    "Features",
    "Float64Buffers",
    "GatedScalarHead",
    "Graph",
    "GraphNetwork",
    "Head",
    "MatglTensorNet",
    "PropertyHead",
    "Representation",
    "ScalarCoulombHead",
    "ScalarHead",
    "ScalarPropertyHead",
    "SpatialExtentHead",
    "TensorNet",
    "TensorNet2",
    "Transformer",
    "VectorHead",
]
