"""Triton kernels for TensorNet2: charges, and filters that depend on them."""
