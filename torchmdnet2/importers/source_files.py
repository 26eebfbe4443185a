"""Files of PyTorch and TorchScript from elsewhere: tensors and plain data are read, and nothing in them is run."""

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
    """What is in a file that torch.save wrote. There is no way to read classes or functions from it.

    Raises:
        BadCheckpoint: it is no such file, is damaged, or names code to run.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, about files that it did not write
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with a file, it is a bad checkpoint; there is no second try
        raise BadCheckpoint(f"{path}: {_reason(path, str(error))}") from error


def _reason(path: str | os.PathLike, words: str) -> str:
    """Without PyTorch's own words: they advise to read the file in a way that runs what is in it."""
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
# Version 3 changed two things that no name shows: the order of the rows of some linear layers, (F, 3) before and (3, F)
# since, and the sign of the antisymmetric part of the embedding (which only SO(3) models feel).

Layout = Literal["2.x", "3.x"]

_OLD_NAMES = (re.compile(r"^output_model\.output_network\.\d+\.(weight|bias)$"), re.compile(r"\.update_net\.\d+\."))
_EMBEDDING_ROWS = re.compile(r"^representation_model\.tensor_embedding\.linears_scalar\.1\.(weight|bias)$")
_LAYER_ROWS = re.compile(r"^representation_model\.layers\.\d+\.linears_scalar\.2\.(weight|bias)$")


def prove_layout(state: Mapping[str, Tensor], args: Mapping[str, Any], decisions: list[str]) -> Layout:
    """The layout that the evidence in a checkpoint proves.

    Evidence, strongest first: the buffer `distance.box`, which version 3 stores and version 2 does not; names of
    layers from before version 3; the hyper-parameter `check_errors`, which users also carry along in YAML files of
    version 2 and which therefore proves nothing against the buffer.

    Args:
        state: their tensors, without the leading "model.".
        args: their hyper-parameters.
        decisions: a sentence is added.

    Raises:
        BadCheckpoint: the evidence contradicts itself, or there is none.
    """
    box = "representation_model.distance.box" in state
    old_names = any(pattern.search(name) for pattern in _OLD_NAMES for name in state)
    check_errors = "check_errors" in args
    if box and old_names:
        raise BadCheckpoint(
            "the checkpoint holds the buffer distance.box of version 3 and layer names of version 2: it was changed by "
            'hand. Say which it is with layout="2.x" or "3.x", and check an energy that you know'
        )
    if box:
        note = "; the hyper-parameter check_errors was carried along and means nothing" if check_errors else ""
        decisions.append(f"written by TorchMD-Net 3.x: it stores the buffer distance.box{note}; rows are in order")
        return "3.x"
    if old_names or check_errors:
        reason = "old layer names" if old_names else "no buffer distance.box and the hyper-parameter check_errors"
        decisions.append(f"written by TorchMD-Net 2.x ({reason}): rows of the filters are put in the new order")
        return "2.x"
    raise BadCheckpoint(
        "nothing in the checkpoint proves whether TorchMD-Net 2 or 3 wrote it, and the order of the weights depends on "
        'it. Say so with layout="2.x" or "3.x", and check an energy that you know'
    )


def reorder_rows(state: Mapping[str, Tensor], model: str, to: Layout) -> dict[str, Tensor]:
    """The tensors with the rows of TensorNet's gates in the order of version 3 (from 2), or of 2 (from 3).

    Args:
        state: their tensors.
        model: "tensornet": embedding and layers differ; "tensornet2": only the embedding does.
        to: the layout wanted.
    """
    patterns = (_EMBEDDING_ROWS, _LAYER_ROWS) if model == "tensornet" else (_EMBEDDING_ROWS,)
    result = dict(state)
    for name, value in state.items():
        if any(pattern.match(name) for pattern in patterns):
            rows = value.shape[0] // 3
            shape = (rows, 3) if to == "3.x" else (3, rows)
            result[name] = torch.transpose(value.unflatten(0, shape), 0, 1).flatten(0, 1).contiguous()
    return result


# --- TorchScript files, read as data: their modules with attributes and tensors. Nothing in them is run ---
#
# A TorchScript file is a zip archive with programs, which are not looked at, a stack of instructions that builds the
# modules, and the numbers of their tensors. The instructions are followed here by an interpreter that knows how to make
# plain values, modules and tensors, and nothing else.

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
        kind: the name of its class, without what TorchScript adds to tell classes of the same name apart.
        attributes: by name: plain values, tensors and modules.
    """

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, path: str) -> Any:
        """The attribute at a path such as "mlps.0.weight".

        Raises:
            BadCheckpoint: there is none.
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
    """The outermost module of a TorchScript file.

    Raises:
        FileNotFoundError: there is no such file.
        BadCheckpoint: it is not a TorchScript file, is damaged, or holds more than modules, plain values and tensors.
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
    except Exception as error:  # the content is not trusted: whatever it brings about, the file is to blame
        raise BadCheckpoint(f"{path}: damaged, or not a TorchScript file") from error


def is_torchscript(path: str | os.PathLike) -> bool:
    """Whether the file is a TorchScript file, by the names of its parts."""
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
    """The interpreter: a stack, whose parts a mark divides, and numbered values to come back to.

    Args:
        storage: content of the file with the numbers of this key.
    """

    def __init__(self, storage: Callable[[str], bytes]):
        self._storage = storage
        self._stacks: list[list[Any]] = [[]]
        self._kept: dict[int, Any] = {}
        self._storages: dict[str, _Storage] = {}

    def follow(self, instructions: bytes) -> Any:
        """What the instructions build."""
        for code, argument, _place in pickletools.genops(instructions):
            if code.name != "STOP":  # always there, and the last one: genops sees to it
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
                raise BadCheckpoint(f"it makes something else than a module: {kind}")
            push(ScriptModule(kind.name.rpartition(" ")[2]))
        elif name == "BUILD":
            attributes = pop()
            module = self._stack[-1]
            if not isinstance(module, ScriptModule) or not isinstance(attributes, dict):
                raise BadCheckpoint("it builds something else than a module")
            module.attributes.update(attributes)
        elif name != "PROTO":
            raise BadCheckpoint(f"it has an instruction {name}, which TorchScript files have not")

    def _open(self, what: Any) -> _Storage:
        word, kind, key, _device, size = what
        dtype = _DTYPES.get(kind.name) if isinstance(kind, _Global) else None
        if word != "storage" or dtype is None:
            raise BadCheckpoint(f"it has numbers of an unknown type: {kind}")
        if key not in self._storages:
            self._storages[key] = _Storage(dtype, bytearray(self._storage(key)))
        found = self._storages[key]
        if found.dtype != dtype or len(found.content) != size * dtype.itemsize:
            raise BadCheckpoint(f"the numbers {key} are not those that it names")
        return found


def _pairs(items: list[Any]) -> Iterator[tuple[str, Any]]:
    return zip(items[::2], items[1::2], strict=True)


def _made(function: Any, arguments: tuple[Any, ...]) -> Any:
    """What a call of one of the few known functions stands for."""
    name = function.name if isinstance(function, _Global) else ""
    if name == "collections OrderedDict" and arguments == ():
        return {}
    if name == "torch.jit._pickle restore_type_tag":
        return arguments[0]
    if name.startswith("torch.jit._pickle build_") and name.endswith("list"):
        return list(arguments[0])
    if name == "torch._utils _rebuild_tensor_v2":
        return _tensor(*arguments[:4])
    raise BadCheckpoint(f"it calls {name or function}: TorchScript files of models have no need to")


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        raise BadCheckpoint("a tensor has no valid shape")
    numbers = torch.frombuffer(storage.content, dtype=storage.dtype) if storage.content else torch.zeros(0)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if math.prod(shape) > numbers.numel() or last >= numbers.numel():
        raise BadCheckpoint("a tensor has more numbers than the file")
    return torch.as_strided(numbers, shape, stride, offset).clone()
