"""Models of other programs, read safely."""

from .torchmd_net import convert, import_checkpoint, read_checkpoint

__all__ = ["convert", "import_checkpoint", "read_checkpoint"]
