"""Representations and heads; importing this package registers all of them."""

from .base import Features, Float64Buffers, Graph, Head, Representation
from .heads import ScalarHead
from .tensornet import TensorNet

__all__ = ["Features", "Float64Buffers", "Graph", "Head", "Representation", "ScalarHead", "TensorNet"]
