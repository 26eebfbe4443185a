"""Import models of other programs. Nothing in their files is executed."""

from ..models.aimnet2.importer import import_aimnet2
from ..models.matgl_tensornet.importer import import_matgl
from .torchmd_net import convert, export_checkpoint, export_state, import_checkpoint, read_checkpoint
from .training_yaml import config_from_torchmd_net, convert_yaml

__all__ = [
    "config_from_torchmd_net",
    "convert",
    "convert_yaml",
    "export_checkpoint",
    "export_state",
    "import_aimnet2",
    "import_checkpoint",
    "import_matgl",
    "read_checkpoint",
]
