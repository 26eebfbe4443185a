"""Programs for the development of torchmdnet2; not a part of the package."""
