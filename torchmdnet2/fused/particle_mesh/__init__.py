"""Particle-mesh Ewald on the GPU: the mesh by kernels and cuFFT, the short-range pairs by the kernel of pair priors."""
