"""Models: representations and heads; importing this package registers all of them."""

from ..core.devices import Float64Buffers
from ..potential.graph import Features, Graph, Head, PropertyHead, Representation
from .aimnet2.model import AIMNet2
from .heads import (
    ChargesHead,
    DipoleHead,
    EquivariantScalarHead,
    GatedScalarHead,
    ScalarCoulombHead,
    ScalarHead,
    ScalarPropertyHead,
    SpatialExtentHead,
    VectorHead,
)
from .matgl_tensornet.model import MatglTensorNet
from .message_passing.model import EquivariantTransformer, GraphNetwork, Transformer
from .tensornet.model import TensorNet
from .tensornet2.model import TensorNet2

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
