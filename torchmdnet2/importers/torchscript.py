"""TorchScript files, read as data: their modules with attributes and tensors. Nothing in them is run.

A TorchScript file is a zip archive with programs, which are not looked at, a stack of instructions that builds the
modules, and the numbers of their tensors. The instructions are followed here by an interpreter that knows how to make
plain values, modules and tensors, and nothing else.
"""

from __future__ import annotations

import math
import os
import pickletools  # lists the instructions of a file; it has no way to follow them
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BadCheckpoint

__all__ = ["ScriptModule", "is_torchscript", "read_torchscript"]

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
            if code.name == "STOP":
                return self._stack[-1]
            self._step(code.name, argument)
        raise BadCheckpoint("it ends too early")

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
