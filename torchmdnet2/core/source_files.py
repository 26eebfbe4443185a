"""Safe readers for PyTorch and TorchScript files: they read tensors and plain data and run nothing in the files."""

from __future__ import annotations

import math
import os
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import BadCheckpoint

__all__ = [
    "Layout", "ScriptModule", "is_torchscript", "prove_layout", "read_tensor_file", "read_torchscript",
    "reorder_rows",
]  # fmt: skip


def read_tensor_file(path: str | os.PathLike) -> Any:
    """Read a file that torch.save wrote. Classes and functions in it are never loaded.

    Raises:
        BadCheckpoint: torch.save did not write the file, it is damaged, or it names code to run.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of files that it did not write
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any error means that the file is at fault; there is no second, less safe attempt
        raise BadCheckpoint(f"{path}: {_reason(path, str(error))}") from error


def _reason(path: str | os.PathLike, words: str) -> str:
    """Replace PyTorch's message, which advises to read the file in a way that runs its content."""
    named = re.search(r"GLOBAL ([\w.]+)", words)
    if named:
        return (
            f"not a checkpoint that can be read without running code from it: it names {named[1]}. "
            "A checkpoint holds only tensors and plain data"
        )
    with Path(path).open("rb") as file:
        start = file.read(4)
    if not start.startswith((b"PK\x03\x04", b"\x80")):
        return "not a checkpoint: " + ("the file is empty" if not start else "PyTorch did not write this file")
    return "not a checkpoint that can be read: it is damaged, cut short, or holds more than tensors and plain data"


# --- Detection of the version of TorchMD-Net that wrote a TensorNet, from the tensors of the checkpoint ---
#
# Version 3 changed two things that no name shows: the order of the rows of some linear layers, from (F, 3) to (3, F),
# and the sign of the antisymmetric part of the embedding, on which only SO(3) models depend.

Layout = Literal["2.x", "3.x"]

_OLD_NAMES = (re.compile(r"^output_model\.output_network\.\d+\.(weight|bias)$"), re.compile(r"\.update_net\.\d+\."))
_EMBEDDING_ROWS = re.compile(r"^representation_model\.tensor_embedding\.linears_scalar\.1\.(weight|bias)$")
_LAYER_ROWS = re.compile(r"^representation_model\.layers\.\d+\.linears_scalar\.2\.(weight|bias)$")


def prove_layout(
    state: Mapping[str, Tensor], args: Mapping[str, Any], decisions: list[str], given: Layout | None = None
) -> Layout:
    """Return the layout that the evidence in a checkpoint proves, or the given one if it proves none.

    Evidence, strongest first: the buffer `distance.box`, which version 3 stores and version 2 does not; names of
    layers from before version 3; the hyper-parameter `check_errors`, which users also carry along in YAML files of
    version 2 and which therefore proves nothing against the buffer.

    Args:
        state: TorchMD-Net's tensors, with names without the leading "model.".
        args: its hyper-parameters.
        decisions: list to which a sentence is added.
        given: the layout that the user states, if any.

    Raises:
        BadCheckpoint: the evidence is contradictory, or there is none, and no layout is given; or the given one is not
            that of the evidence.
    """
    box = "representation_model.distance.box" in state
    old_names = any(pattern.search(name) for pattern in _OLD_NAMES for name in state)
    check_errors = "check_errors" in args
    shown = None if box and old_names else "3.x" if box else "2.x" if old_names or check_errors else None
    reason = (
        "it has the buffer distance.box" if box else "old layer names" if old_names
        else "no buffer distance.box and the hyper-parameter check_errors"
    )  # fmt: skip
    if given is not None and shown is None:
        decisions.append(f"the checkpoint is taken as one of TorchMD-Net {given}, as requested")
        return given
    if given not in (None, shown):
        raise BadCheckpoint(
            f"layout {given} is given, and TorchMD-Net {shown} wrote the checkpoint ({reason}): its energies would be "
            "wrong. Leave layout out"
        )
    if box and old_names:
        raise BadCheckpoint(
            "the checkpoint has the buffer distance.box of version 3 and layer names of version 2: it was changed by "
            'hand. Give the version as layout="2.x" or "3.x", and check an energy that you know'
        )
    if box:
        note = "; the hyper-parameter check_errors is ignored" if check_errors else ""
        decisions.append(f"TorchMD-Net 3.x wrote the file: {reason}{note}; rows keep their order")
        return "3.x"
    if shown is not None:
        decisions.append(f"TorchMD-Net 2.x wrote the file ({reason}): rows of the filters are put in the new order")
        return "2.x"
    raise BadCheckpoint(
        "nothing in the checkpoint proves whether TorchMD-Net 2 or 3 wrote it, and the order of the weights depends on "
        'that. Give the version as layout="2.x" or "3.x", and check an energy that you know'
    )


def reorder_rows(state: Mapping[str, Tensor], model: str, to: Layout) -> dict[str, Tensor]:
    """Return the tensors with the rows of TensorNet's gates in the order of another version.

    Args:
        state: TorchMD-Net's tensors.
        model: "tensornet", where embedding and layers differ, or "tensornet2", where only the embedding does.
        to: the requested layout.
    """
    patterns = (_EMBEDDING_ROWS, _LAYER_ROWS) if model == "tensornet" else (_EMBEDDING_ROWS,)
    result = dict(state)
    for name, value in state.items():
        if any(pattern.match(name) for pattern in patterns):
            rows = value.shape[0] // 3
            shape = (rows, 3) if to == "3.x" else (3, rows)
            result[name] = torch.transpose(value.unflatten(0, shape), 0, 1).flatten(0, 1).contiguous()
    return result


# --- TorchScript files, read as data: modules with attributes and tensors ---
#
# A TorchScript file is a zip archive with programs, a pickle whose instructions build the modules, and the numbers of
# their tensors. The programs are not read. The instructions are followed by an interpreter that can make plain values,
# modules and tensors, and nothing else, so that nothing in the file is run.

_DTYPES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch BoolStorage": torch.bool,
}
_PLAIN = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_VALUES = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}


@dataclass
class ScriptModule:
    """A module of a TorchScript file.

    Attributes:
        kind: name of its class, without the suffix by which TorchScript distinguishes classes of the same name.
        attributes: plain values, tensors and modules, by name.
    """

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, path: str) -> Any:
        """Return the attribute at a path such as "mlps.0.weight".

        Raises:
            BadCheckpoint: the module has no such attribute.
        """
        found: Any = self
        for name in path.split("."):
            if not isinstance(found, ScriptModule) or name not in found.attributes:
                raise BadCheckpoint(f"the module {self.kind} has no '{path}'")
            found = found.attributes[name]
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.attributes


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: torch.dtype
    content: bytearray


def read_torchscript(path: str | os.PathLike) -> ScriptModule:
    """Read the outermost module of a TorchScript file.

    Raises:
        FileNotFoundError: the file does not exist.
        BadCheckpoint: the file is not a TorchScript file, is damaged, or holds more than modules, plain values and
            tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except FileNotFoundError:
        raise
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error}") from error
    except zipfile.BadZipFile as error:
        raise BadCheckpoint(f"{path}: not a TorchScript file, or damaged: {error}") from error
    except Exception as error:  # the content is not trusted: any error means that the file is at fault
        raise BadCheckpoint(f"{path}: damaged, or not a TorchScript file") from error


def is_torchscript(path: str | os.PathLike) -> bool:
    """Return whether the file is a TorchScript file, by the names of its parts."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in archive.namelist())


def _read(archive: zipfile.ZipFile) -> ScriptModule:
    names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1 or f"{names[0].partition('/')[0]}/constants.pkl" not in archive.namelist():
        raise BadCheckpoint("not a TorchScript file")
    folder = names[0].partition("/")[0]
    found = _Machine(lambda key: archive.read(f"{folder}/data/{key}")).follow(archive.read(names[0]))
    if not isinstance(found, ScriptModule):
        raise BadCheckpoint("not a TorchScript file of a module")
    return found


class _Machine:
    """The interpreter of the pickle's instructions: a stack, divided by marks, and a memo of numbered values.

    Args:
        storage: function that returns the bytes of a tensor's numbers for their key.
    """

    def __init__(self, storage: Callable[[str], bytes]):
        self._storage = storage
        self._stacks: list[list[Any]] = [[]]
        self._kept: dict[int, Any] = {}
        self._storages: dict[str, _Storage] = {}

    def follow(self, instructions: bytes) -> Any:
        """Return the object that the instructions build."""
        for code, argument, _place in pickletools.genops(instructions):
            if code.name != "STOP":  # genops makes sure that it is there, and that it is last
                self._step(code.name, argument)
        return self._stack[-1]

    @property
    def _stack(self) -> list[Any]:
        return self._stacks[-1]

    def _step(self, name: str, argument: Any) -> None:
        push, pop = self._stack.append, self._stack.pop
        if name in _PLAIN:
            push(_PLAIN[name])
        elif name in _VALUES:
            push(argument)
        elif name == "EMPTY_DICT":
            push({})
        elif name == "EMPTY_LIST":
            push([])
        elif name == "GLOBAL":
            push(_Global(argument))
        elif name == "MARK":
            self._stacks.append([])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._kept[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            push(self._kept[argument])
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items = self._stacks.pop()
            if name == "TUPLE":
                self._stack.append(tuple(items))
            elif name == "APPENDS":
                self._stack[-1].extend(items)
            else:
                self._stack[-1].update(_pairs(items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            items = [pop() for _ in range(int(name[-1]))]
            push(tuple(reversed(items)))
        elif name == "BINPERSID":
            push(self._open(pop()))
        elif name == "REDUCE":
            arguments, function = pop(), pop()
            push(_made(function, arguments))
        elif name == "NEWOBJ":
            arguments, kind = pop(), pop()
            if not isinstance(kind, _Global) or not kind.name.startswith("__torch__.") or arguments != ():
                raise BadCheckpoint(f"it makes an object that is not a module: {kind}")
            push(ScriptModule(kind.name.rpartition(" ")[2]))
        elif name == "BUILD":
            attributes = pop()
            module = self._stack[-1]
            if not isinstance(module, ScriptModule) or not isinstance(attributes, dict):
                raise BadCheckpoint("it sets attributes of an object that is not a module")
            module.attributes.update(attributes)
        elif name != "PROTO":
            raise BadCheckpoint(f"it has the instruction {name}, which TorchScript files do not use")

    def _open(self, what: Any) -> _Storage:
        word, kind, key, _device, size = what
        dtype = _DTYPES.get(kind.name) if isinstance(kind, _Global) else None
        if word != "storage" or dtype is None:
            raise BadCheckpoint(f"it has numbers of an unknown type: {kind}")
        if key not in self._storages:
            self._storages[key] = _Storage(dtype, bytearray(self._storage(key)))
        found = self._storages[key]
        if found.dtype != dtype or len(found.content) != size * dtype.itemsize:
            raise BadCheckpoint(f"the file {key} of a tensor's numbers does not have the stated type and size")
        return found


def _pairs(items: list[Any]) -> Iterator[tuple[str, Any]]:
    return zip(items[::2], items[1::2], strict=True)


def _made(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the value of a call of one of the few known functions."""
    name = function.name if isinstance(function, _Global) else ""
    if name == "collections OrderedDict" and arguments == ():
        return {}
    if name == "torch.jit._pickle restore_type_tag":
        return arguments[0]
    if name.startswith("torch.jit._pickle build_") and name.endswith("list"):
        return list(arguments[0])
    if name == "torch._utils _rebuild_tensor_v2":
        return _tensor(*arguments[:4])
    raise BadCheckpoint(f"it calls {name or function}, which TorchScript files of models do not need")


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        raise BadCheckpoint("the shape of a tensor is not valid")
    numbers = torch.frombuffer(storage.content, dtype=storage.dtype) if storage.content else torch.zeros(0)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if math.prod(shape) > numbers.numel() or last >= numbers.numel():
        raise BadCheckpoint("a tensor has more numbers than the file holds")
    return torch.as_strided(numbers, shape, stride, offset).clone()
