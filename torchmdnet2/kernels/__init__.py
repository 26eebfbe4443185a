"""What kernels of models and priors have in common: their interfaces, sums over pairs."""
