"""GPU kernels in Triton. They know tensors, not models; `torchmdnet2.runtime` calls them in order."""
