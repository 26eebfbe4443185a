"""Fast paths of whole models: kernels for GPUs (Triton), for CPUs (numba) and for training, one folder per model."""
