"""TensorNet2 on fused kernels; models/tensornet2.py is the specification."""
