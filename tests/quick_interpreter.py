"""Triton's interpreter without what it does again in every call; what it computes is the same.

It replaces the functions of triton.language before each launch and each call of a function of a kernel, makes the types
and shapes of all intermediate tensors anew, looks for overflow of integers without using what it finds, derives types
in each operator and load again, and reduces and scans element by element. bfloat16 is as on a GPU here: the interpreter
cuts numbers off instead of rounding them, and multiplies their bits as integers. tests/conftest.py uses this for
checks; python quick_interpreter.py SCRIPT runs a script with it.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core  # the interpreter looks for both among the globals of a function
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["speed_up"]


def speed_up() -> None:
    """Change the interpreter of this process, in which all kernels are interpreted."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    gc.freeze()  # modules stay, and each interpreted operation makes many small objects: fewer searches for garbage
    gc.set_threshold(50_000, 20, 20)
    _replace_functions_once()
    _keep_types()
    _repair_bfloat16(interpreter.InterpreterBuilder)
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ScanOps.generic_scan = _scan


def _replace_functions_once() -> None:
    replace, wrapper = interpreter._patch_lang, core.builtin(lambda: None).__code__

    def replace_one(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.interpreter_semantic
        function = member.__wrapped__ if member.__code__ is wrapper else member  # which only looks for _semantic

        def call(*given: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*given, **options)

        scope.set_attr(package, name, call)

    @cache
    def replace_all() -> None:
        replace(speed_up)
        for name, function in _OPERATORS.items():
            for swapped in (False, True):
                method = f"__{'r' * swapped}{name}__"
                setattr(tl.tensor, method, _quick_operator(getattr(tl.tensor, method), function, swapped))
        tl.load = _quick_load(tl.load)

    def replace_once(_function: Any) -> Any:
        replace_all()
        scope: Any = ExitStack()
        scope.restore = scope.close  # nothing is put back
        return scope

    interpreter._patch_attr = replace_one
    interpreter._patch_lang = replace_once


def _keep_types() -> None:
    numpy_type, make_block, unwrap = interpreter._get_np_dtype, tl.block_type.__init__, core._unwrap_if_constexpr
    broadcast = TritonSemantic.broadcast_impl_value
    type_of_scalar = cache(numpy_type)
    blocks: dict[Any, dict[str, Any]] = {}

    def type_of_elements(kind: tl.dtype) -> Any:
        return numpy_type(kind) if kind.scalar.is_ptr() else type_of_scalar(kind.scalar)

    def unwrap_value(given: Any) -> Any:
        kind = type(given)
        if kind is tl.constexpr:
            return given.value
        return given if kind is int or kind is tl.tensor or kind is tl.dtype else unwrap(given)

    def block_type(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, getattr(element, "address_space", ""), *(unwrap_value(size) for size in shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    @cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(int(np.prod(shape))), tl.tuple([tl.constexpr(size) for size in shape])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = sizes(tuple(kind.shape.values) if kind.is_block() else ())

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        same = a.shape.values == b.shape.values if a.is_block() and b.is_block() else a.is_block() == b.is_block()
        return (left, right) if same else broadcast(self, left, right)

    assert not interpreter.interpreter_builder.options.debug  # the check for overflow would be used
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *given: None
    TritonSemantic.broadcast_impl_value = broadcast_others
    interpreter._get_np_dtype = type_of_elements
    core._unwrap_if_constexpr = unwrap_value
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor


_OPERATORS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "and": np.bitwise_and,
    "or": np.bitwise_or, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_INTEGERS = {"int32": np.int32, "int64": np.int64}
_NUMBERS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, **_INTEGERS}
_new_handle, _new_tensor = interpreter.TensorHandle.__new__, tl.tensor.__new__


def _quick_operator(slow: Any, function: Any, swapped: bool) -> Any:
    """An operator of tensors. NumPy does the same where nothing is cast, and for an offset of pointers.

    For each pair of types, and each number, the interpreter's own result says once of what type it is, and whether
    NumPy's is the same.
    """
    tensor, constexpr = tl.tensor, tl.constexpr
    known: dict[Any, Any] = {}

    def learn(left: Any, right: Any, result: Any) -> Any:
        kind, width, constant = left.dtype, 0, None
        if kind.is_ptr():
            if function is not np.add or swapped or kind.address_space != "global":
                return None
            width, kind = max(1, kind.element_ty.primitive_bitwidth // 8), tl.int64
        if kind.name not in _NUMBERS:  # among them booleans, which NumPy adds otherwise
            return None
        if type(right) is not tensor:
            if type(right) is float and kind.name in _INTEGERS:
                return None
            constant = np.array([right], _NUMBERS[kind.name])
        elif right.dtype.name != kind.name and not (width and right.dtype.name in _INTEGERS):
            return None
        plan = width, constant, result.handle.data.dtype, result
        computed, exact = compute(left, right, plan), result.handle.data
        same = computed.dtype == exact.dtype and np.array_equal(computed, exact, equal_nan=True)
        return plan if same else None

    def compute(left: Any, right: Any, plan: Any) -> Any:
        width, constant, *_ = plan
        a, b = left.handle.data, right.handle.data if constant is None else constant
        if width:
            return a + width * b.astype(np.uint64)
        return function(b, a) if swapped else function(a, b)

    def operate(left: Any, right: Any) -> Any:
        if type(right) is constexpr:
            right = right.value
        kind: Any = type(right)
        if kind is tensor:
            key: Any = left.type.name, right.type.name
        elif kind is int or kind is float:
            key = left.type.name, kind, right or repr(right)  # -0.0 equals 0.0
        else:
            return slow(left, right)
        if key not in known:
            result = slow(left, right)
            known[key] = learn(left, right, result)
            return result
        plan = known[key]
        if plan is None:
            return slow(left, right)
        data = compute(left, right, plan)
        if data.dtype is not plan[2]:
            return slow(left, right)
        return _tensor_like(plan[3], data)

    return operate


def _quick_load(slow: Any) -> Any:
    """tl.load without a mask, or with one of the pointers' shape: types, and arrays of one number, are made once."""
    tensor, constexpr, read = tl.tensor, tl.constexpr, interpreter._interpreter.load
    known: dict[Any, Any] = {}

    def values(pointer: Any, mask: Any, plan: Any) -> Any:
        all_of_them, other, _ = plan
        return read(pointer.handle.data, all_of_them if mask is None else mask.handle.data, other, other.dtype)

    def learn(pointer: Any, mask: Any, other: Any, result: Any) -> Any:
        kind, exact = pointer.dtype.element_ty, result.handle.data
        if kind.name not in _NUMBERS or (mask is not None and mask.handle.data.shape != exact.shape):
            return None
        plan = (
            np.ones(exact.shape, bool),
            np.full(exact.shape, 0 if other is None else other, _NUMBERS[kind.name]),
            result,
        )
        same = exact.dtype == plan[1].dtype and np.array_equal(values(pointer, mask, plan), exact, equal_nan=True)
        return plan if same else None

    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        if type(mask) is constexpr:
            mask = mask.value
        if type(other) is constexpr:
            other = other.value
        if (mask is not None and type(mask) is not tensor) or not isinstance(other, int | float | None):
            return slow(pointer, mask, other, **options)
        key = pointer.type.name, mask is not None and mask.type.name, other or repr(other)
        if key not in known:
            result = slow(pointer, mask, other, **options)
            known[key] = learn(pointer, mask, other, result)
            return result
        plan = known[key]
        if plan is None:
            return slow(pointer, mask, other, **options)
        return _tensor_like(plan[2], values(pointer, mask, plan))

    return load


def _tensor_like(like: Any, data: Any) -> Any:
    """Numbers as a tensor of the type of another one."""
    handle, made = _new_handle(interpreter.TensorHandle), _new_tensor(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, like.handle.dtype, {}
    made.handle, made.type, made.dtype, made.numel, made.shape = handle, like.type, like.dtype, like.numel, like.shape
    return made


def _repair_bfloat16(builder: Any) -> None:
    slow_cast, slow_product, handle = builder.cast_impl, builder.create_dot, interpreter.TensorHandle

    def cast(self: Any, given: Any, kind: Any) -> Any:
        types = given.dtype.scalar, kind.scalar
        if types == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(given.data).view(np.uint32)
            return handle(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):
            return handle((given.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return slow_cast(self, given, kind)

    def product(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (cast(self, given, tl.float32) if given.dtype.scalar == tl.bfloat16 else given for given in (a, b))
        return slow_product(self, a, b, *others)

    builder.cast_impl, builder.create_dot = cast, product


def _accumulated(self: Any, given: Any, axis: int) -> list[list[np.ndarray]]:
    """Of each tensor an array for each place along the axis: all up to there, combined in the order of the axis."""
    numbers = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in given]
    results = [[array[0]] for array in numbers]
    for place in range(1, len(numbers[0])):
        before = [self.to_tensor(array[-1], tensor.dtype) for array, tensor in zip(results, given, strict=True)]
        here = [self.to_tensor(array[place], tensor.dtype) for array, tensor in zip(numbers, given, strict=True)]
        combined = self.combine_fn.fn(*before, *here)
        for array, one in zip(results, combined if isinstance(combined, tuple) else (combined,), strict=True):
            array.append(one.handle.data.reshape(array[0].shape))
    return results


def _reduce(self: Any, given: Any) -> list[Any]:
    tensors, axis = self.unravel(given, self.axis)
    results = [array[-1] for array in _accumulated(self, tensors, axis)]
    if self.keep_dims:
        every = tuple(range(given[0].handle.data.ndim)) if self.axis is None else axis
        results = [np.expand_dims(array, every) for array in results]
    return [self.to_tensor(array, tensor.dtype) for array, tensor in zip(results, given, strict=True)]


def _scan(self: Any, given: Any) -> list[Any]:
    results = _accumulated(self, given, self.axis)
    return [
        self.to_tensor(np.stack(array, self.axis), tensor.dtype) for array, tensor in zip(results, given, strict=True)
    ]


if __name__ == "__main__":
    speed_up()
    sys.path[0] = os.path.dirname(sys.argv[1])
    runpy.run_path(sys.argv[1], run_name="__main__")
