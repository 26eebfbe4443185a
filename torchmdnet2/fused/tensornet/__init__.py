"""TensorNet on fused kernels; models/tensornet.py is the specification."""
