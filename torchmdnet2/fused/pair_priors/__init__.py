"""Fast kernels of the priors that are sums over pairs of atoms: one frame, one function of the distance per prior."""
