"""Equivariant Transformer, Transformer and graph network on Triton kernels for their messages."""
