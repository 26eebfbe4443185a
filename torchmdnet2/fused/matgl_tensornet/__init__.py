"""TensorNet of matgl on the kernels of TensorNet."""
