"""CPU kernels compiled by numba."""
