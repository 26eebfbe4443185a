"""Vectors and matrix products in CPU kernels, which numba does not make from Python: functions that kernels call.

Their sums stay in registers; numba would write them to memory after each step. Products are those of the vector units
(`panels`), or, where a processor has them, of its matrix units (`tiles`).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending, njit, types
from numba.core import cgutils, config
from numba.core.typing import signature
from numba.core.typing.templates import ConcreteTemplate, infer_global

from ..core.compiling_cpu import INNER

__all__ = [
    "LANES", "PANELS", "ROWS", "TILES", "TILE_ROWS", "VECTOR", "WIDE", "add_product", "add_products", "adds_products",
    "call", "dense", "dense_block", "exp", "fetch_row", "inline", "load", "logistic", "panels", "repeat", "store",
    "tiles", "total", "zeros",
]  # fmt: skip


inline = njit(forceinline=True, **INNER)
# functions that allocate no arrays, so that they need not count references, which takes atomic operations
_UNCOUNTED: dict[str, Any] = {**INNER, "_nrt": False}
call = njit(**_UNCOUNTED)


# --- Vectors in registers: sums that numba would write to memory after each step, and functions in full width ---

WIDE = bool(get_host_cpu_features().get("avx512f"))

VECTOR = 16 if WIDE else 8
"""Numbers of a vector: those of a register."""

intrinsic: Any = extending.intrinsic  # by its type, callers would have to give the context too


class _Vector(types.Type):
    """VECTOR numbers in float32: `+`, `-`, `*`, `/` of two of them, or of one number and them, and what is below."""

    def __init__(self) -> None:
        super().__init__(f"Vector{VECTOR}")


_VECTOR, _LLVM_VECTOR = _Vector(), ir.VectorType(ir.FloatType(), VECTOR)


@extending.register_model(_Vector)
class _VectorModel(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        super().__init__(manager, kind, _LLVM_VECTOR)


_OPERATORS = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}
_PAIRS = (_VECTOR, _VECTOR), (_VECTOR, types.float32), (types.float32, _VECTOR)
_FLAGS = "nnan", "ninf", "nsz", "arcp", "contract", "afn"  # all of "fast" but "reassoc": sums keep their order

for _operator, _name in _OPERATORS.items():

    @infer_global(_operator)
    class _Operator(ConcreteTemplate):
        cases = tuple(signature(_VECTOR, *pair) for pair in _PAIRS)

    def _lower(_context, builder, given, arguments, name=_name):
        whole = [
            value if kind is _VECTOR else _filled(builder, value, VECTOR)
            for kind, value in zip(given.args, arguments, strict=True)
        ]
        return getattr(builder, name)(*whole, flags=_FLAGS)

    for _pair in _PAIRS:
        extending.lower_builtin(_operator, *_pair)(_lower)


def _at(context, builder, array, values):
    """Pointer to VECTOR numbers from a place on; contiguous arrays are counted as if they had one dimension."""
    if array.layout != "C" or array.dtype != types.float32:
        raise TypeError(f"vectors are in contiguous arrays of float32, not in {array}")
    data = context.make_array(array)(context, builder, values[0]).data
    return builder.bitcast(builder.gep(data, [values[1]]), _LLVM_VECTOR.as_pointer())


@intrinsic
def load(_typing, array, at):
    """The numbers from place `at` on of an array, which is contiguous and float32."""

    def generate(context, builder, given, values):
        return builder.load(_at(context, builder, given.args[0], values), align=4)

    return _VECTOR(array, types.intp), generate


@intrinsic
def store(_typing, array, at, vector):
    """Write a vector to where `load` would read it."""

    def generate(context, builder, given, values):
        builder.store(values[2], _at(context, builder, given.args[0], values), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


def _function(builder, name, *values):
    """Call a function of LLVM on numbers or vectors of one type."""
    kind = values[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    known = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(values)), f"llvm.{name}.{suffix}"
    )
    return builder.call(known, values, fastmath=_FLAGS)


def _constant(kind, number):
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


@intrinsic
def floor(_typing, x):
    """The largest integer that is not above x, a number or vector."""
    return x(x), lambda _context, builder, _signature, values: _function(builder, "floor", values[0])


@intrinsic
def limited(_typing, x):
    """x, a number or vector, or −87 or 87 where it is beyond: exp(x) is finite."""

    def generate(_context, builder, _signature, values):
        above = _function(builder, "maxnum", values[0], _constant(values[0].type, -87.0))
        return _function(builder, "minnum", above, _constant(above.type, 87.0))

    return x(x), generate


@intrinsic
def power_of_two(_typing, k):
    """2^k of an integer from −126 to 127, in float32, or of a vector of them."""

    def generate(_context, builder, _signature, values):
        kind = values[0].type
        number = ir.IntType(32)
        whole = ir.VectorType(number, kind.count) if isinstance(kind, ir.VectorType) else number
        biased = builder.add(builder.fptosi(values[0], whole), _constant(whole, 127))
        return builder.bitcast(builder.shl(biased, _constant(whole, 23)), kind)

    return k(k), generate


_HALF, _ONE = np.float32(0.5), np.float32(1)
_IN_ORDER: dict[str, Any] = {**INNER, "fastmath": set(_FLAGS)}


@njit(forceinline=True, **_IN_ORDER)
def exp(x):
    """exp(x) of a number in float32 or a vector: 2^k times the series of the rest, |rest| ≤ ln 2 / 2."""
    x = limited(x)
    k = floor(x * np.float32(1.4426950408889634) + _HALF)
    # ln 2 in two parts, the first of few digits: its product with k is exact
    r = (x - k * np.float32(0.693359375)) - k * np.float32(-2.12194440054690583e-4)
    series = np.float32(1 / 720) + r * np.float32(1 / 5040)
    series = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * series)
    series = _HALF + r * (np.float32(1 / 6) + r * series)
    return (_ONE + r * (_ONE + r * series)) * power_of_two(k)


@inline
def logistic(x):
    """1/(1 + exp(−x)) of a number or vector."""
    return _ONE / (_ONE + exp(np.float32(-1) * x))


def _filled(builder, number, length):
    """A vector of one number."""
    lane, nothing = ir.IntType(32), ir.Constant(ir.VectorType(ir.FloatType(), length), ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(lane, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(lane, length), [0] * length))


@intrinsic
def zeros(_typing):
    """A vector of zeros."""

    def generate(_context, _builder, _signature, _values):
        return ir.Constant(_LLVM_VECTOR, [0.0] * VECTOR)

    return _VECTOR(), generate


@intrinsic
def repeat(_typing, array, at):
    """The number at a place in all lanes."""

    def generate(context, builder, given, values):
        first = builder.bitcast(_at(context, builder, given.args[0], values), ir.FloatType().as_pointer())
        return _filled(builder, builder.load(first), VECTOR)

    return _VECTOR(array, types.intp), generate


@intrinsic
def total(_typing, vector):
    """The sum of the lanes."""

    def generate(_context, builder, _signature, values):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _LLVM_VECTOR])
        add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{VECTOR}f32")
        return builder.call(add, [ir.Constant(ir.FloatType(), 0.0), values[0]], fastmath=("fast",))

    return types.float32(vector), generate


def _fetch(builder, place):
    """Fetch what lies there to the L2 cache."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(place, byte), *(ir.Constant(number, k) for k in (0, 2, 1))])


@intrinsic
def _fetch_line(_typing, array, at):
    """Fetch the cache line of the number at a place to the L2 cache."""

    def generate(context, builder, given, values):
        data = context.make_array(given.args[0])(context, builder, values[0]).data
        _fetch(builder, builder.gep(data, [values[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@inline
def fetch_row(array, row, width):
    """Fetch a row of a contiguous array of float32 to the L2 cache, so that it is there when it is read."""
    for at in range(row * width, (row + 1) * width, 16):
        _fetch_line(array, at)


# --- Matrix products of a few rows by the vector units, at the full rate of one core ---
#
# Weights W [K, N] are stored in panels of LANES columns, [N/LANES, K, LANES], which are read from front to back. The
# sums of ROWS rows and LANES columns stay in registers for all of K: numba would write them to memory after each step.

ROWS = 4
"""Atoms at a time. With 16 columns their sums fill half of the registers of AVX2, with 32 a quarter of AVX-512's."""

LANES = 16

ZERO = np.float32(0)


def panels(w: Any) -> Any:
    """W [..., K, N] → [..., N/LANES, K, LANES], from the begin of a cache line on, where PyTorch's memory starts."""
    moved = np.moveaxis(w.reshape(*w.shape[:-1], -1, LANES), -2, -3)
    out = torch.empty(moved.shape, device="cpu").numpy()
    out[:] = moved
    return out


def adds_products(rows: int, panels: int, ahead: bool = False) -> Any:
    """y += x @ w for `rows` rows of K numbers from at_x on, `panels` panels of w from at_w on, as many LANES of y.

    Places and strides count numbers of the arrays, which are contiguous and float32. With `ahead`, the panels have
    `panel` numbers each, and one number of w is fetched to the L2 cache for each of the K, from at_next on in steps.
    """

    def generate(context, builder, signature, arguments):
        _x, at_x, x_stride, _w, at_w, _y, at_y, y_stride, size, *following = arguments
        x, w, y = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 3, 5))
        index, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)

        def place(start, stride, row):
            return builder.add(start, builder.mul(stride, ir.Constant(index, row)))

        def lanes(base, at):
            return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())

        panel = following[0] if following else builder.mul(size, ir.Constant(index, LANES))
        begins = [place(at_w, panel, p) for p in range(panels)]
        columns = [builder.add(at_y, ir.Constant(index, p * LANES)) for p in range(panels)]
        out = [[lanes(y, place(column, y_stride, row)) for column in columns] for row in range(rows)]
        nothing = ir.Constant(vector, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, nothing) for _ in row] for row in out]
        with cgutils.for_range(builder, size) as loop:
            weights = [builder.load(lanes(w, place(begin, loop.index, LANES)), align=4) for begin in begins]
            if following:
                _, at_next, step = following
                _fetch(builder, builder.gep(w, [builder.add(at_next, builder.mul(loop.index, step))]))
            for row, totals in enumerate(sums):
                at = builder.add(place(at_x, x_stride, row), loop.index)
                number = _filled(builder, builder.load(builder.gep(x, [at])), LANES)
                for weight, total in zip(weights, totals, strict=True):
                    product = builder.fmul(number, weight, flags=("fast",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("fast",)), total)
        for places, totals in zip(out, sums, strict=True):
            for at, total in zip(places, totals, strict=True):
                whole = builder.fadd(builder.load(at, align=4), builder.load(total))
                builder.store(whole, at, align=4)
        return context.get_dummy_value()

    def typed(x, w, y, following):
        for array in (x, w, y):
            if array.layout != "C" or array.dtype != types.float32:
                raise TypeError(f"the product needs contiguous arrays of float32, not {array}")
        place = types.intp
        return types.void(x, place, place, w, place, y, place, place, place, *[place] * following), generate

    def add_product(_context, x, at_x, x_stride, w, at_w, y, at_y, y_stride, K):
        return typed(x, w, y, 0)

    def add_product_ahead(_context, x, at_x, x_stride, w, at_w, y, at_y, y_stride, K, panel, at_next, step):
        return typed(x, w, y, 3)

    return intrinsic(add_product_ahead if ahead else add_product)


# sums of two panels fill the registers of AVX-512 and hide the latency of its additions; others have half as many
PANELS = 2 if WIDE else 1
BLOCK = 2 * ROWS if WIDE else ROWS  # rows of a product at a time, as long as there are so many
add_product, add_products, _add_block = (adds_products(*of) for of in ((ROWS, 1), (ROWS, PANELS), (BLOCK, PANELS)))


@call
def dense(x, at_x, w, bias, y, at_y, K, N, rows=ROWS):
    """Y = X @ W + bias of `rows` rows, a multiple of ROWS, from row at_x of x and at_y of y on.

    Panels of W stay in the L1 cache for all of them.
    """
    for r in range(rows):
        a = y[at_y + r]
        for c in range(N):
            a[c] = bias[c]
    together, blocks = N // (PANELS * LANES) * PANELS * LANES, rows // BLOCK * BLOCK
    for n in range(0, together, PANELS * LANES):
        for r in range(0, blocks, BLOCK):
            _add_block(x, (at_x + r) * x.shape[1], x.shape[1], w, n * K, y, (at_y + r) * y.shape[1] + n, y.shape[1], K)
        for r in range(blocks, rows, ROWS):
            add_products(
                x, (at_x + r) * x.shape[1], x.shape[1], w, n * K, y, (at_y + r) * y.shape[1] + n, y.shape[1], K
            )
    for n in range(together, N, LANES):
        for r in range(0, rows, ROWS):
            add_product(x, (at_x + r) * x.shape[1], x.shape[1], w, n * K, y, (at_y + r) * y.shape[1] + n, y.shape[1], K)


# --- Matrix products by the matrix unit (Intel's AMX): factors in bfloat16, sums in float32 ---
#
# float32 has 24 binary digits, bfloat16 8. A number x is exactly x0 + x1 + x2, each in bfloat16: x0 is x rounded, x1
# what remains rounded, and so on. Of the nine products of parts, six are computed; the others are below 2^-24 of the
# whole. So results are as accurate as in float32, and six products take less time than one by the vector units.
#
# A tile is a register of 16 rows of 64 bytes. That of X has 16 rows and 32 of K; that of W, for the same 32 of K and 16
# columns, has two of K beside each other. There are eight: four sums, the part of X at hand (of 16 or 32 rows), and
# the others for parts of W, so that loads do not wait for products.

TILE_ROWS = 16
"""Rows of a tile of X; a product takes one or two."""

_DEPTH = 32  # of K, in one tile
_TILE = 1024  # bytes
_PARTS = 3
_PRODUCTS = (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)
"""Parts of X and of W that are multiplied, in this order."""

_BYTE, _SHORT, _INT, _INDEX, _NONE = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.VoidType()
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18  # the system call of Linux, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def _permitted() -> bool:
    """Return whether this process may use the matrix unit, for which Linux must be asked, once for all threads."""
    features = get_host_cpu_features()
    if not (WIDE and features.get("amx-tile") and features.get("amx-bf16") and sys.platform == "linux"):
        return False
    if any(
        getattr(config, name) is not None for name in ("CPU_NAME", "CPU_FEATURES")
    ):  # numba compiles for another one
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0


TILES = _permitted()
"""There is a matrix unit that this process may use."""


def _rounded(x: Any) -> Any:
    """x in bfloat16, as float32: the upper half of its bits, rounded."""
    return ((x.view(np.int32) + 0x8000) & -0x10000).astype(np.int32).view(np.float32)


def tiles(w: Any) -> Any:
    """W [K, N] → [N/16, K/32, 3 parts, 16, 32] int16, the bits of bfloat16; K must be a multiple of 32, N of 16."""
    rest, parts = np.ascontiguousarray(w, np.float32), []
    for _ in range(_PARTS):
        parts.append(_rounded(rest))
        rest = rest - parts[-1]
    bits = (np.stack(parts).view(np.int32) >> 16).astype(np.int16)
    pieces = bits.reshape(_PARTS, w.shape[0] // _DEPTH, _DEPTH // 2, 2, w.shape[1] // LANES, LANES)
    moved = pieces.transpose(4, 1, 0, 2, 5, 3)
    out = torch.empty(moved.shape, dtype=torch.int16, device="cpu").numpy()
    out[:] = moved
    return out.reshape(*out.shape[:4], _DEPTH)


def _configuration() -> Any:
    """The 64 bytes that the processor reads: eight tiles of 16 rows of 64 bytes."""
    found = np.zeros(64, np.uint8)
    found[0], found[48:56] = 1, 16
    found[16:32].view(np.uint16)[:] = 64
    return found


_CONFIGURATION = _configuration()


def _instruction(builder, name, *arguments):
    """Call an instruction for tiles."""
    kind = ir.FunctionType(_NONE, [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _data(context, builder, signature, arguments, k):
    """Where the numbers of an argument begin."""
    return context.make_array(signature.args[k])(context, builder, arguments[k]).data


@intrinsic
def _configure(_typing, configuration):
    """Prepare the tiles of this thread."""

    def generate(context, builder, signature, arguments):
        place = _data(context, builder, signature, arguments, 0)
        _instruction(builder, "ldtilecfg", builder.bitcast(place, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(configuration), generate


@intrinsic
def _release(_typing):
    """End the use of tiles, which the operating system then need not save."""

    def generate(context, builder, _signature, _arguments):
        _instruction(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _split(_typing, x, at, parts, to, part):
    """Write the parts of LANES numbers of x from `at` on to `parts` from `to` on, `part` numbers from each other."""

    def generate(context, builder, signature, arguments):
        source, target = (_data(context, builder, signature, arguments, k) for k in (0, 2))
        _, at, _, to, part = arguments
        reals, whole, half = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), _INT, _SHORT))

        def filled(number):
            return ir.Constant(whole, [number] * LANES)

        rest = builder.load(builder.bitcast(builder.gep(source, [at]), reals.as_pointer()), align=4)
        for k in range(_PARTS):
            bits = builder.and_(builder.add(builder.bitcast(rest, whole), filled(0x8000)), filled(-0x10000))
            rest = builder.fsub(rest, builder.bitcast(bits, reals))
            place = builder.gep(target, [builder.add(to, builder.mul(part, ir.Constant(_INDEX, k)))])
            upper = builder.trunc(builder.lshr(bits, filled(16)), half)
            builder.store(upper, builder.bitcast(place, half.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(x, types.intp, parts, types.intp, types.intp), generate


def _multiplies_tiles(blocks: int, pieces: int) -> Any:
    """y = bias + X @ W for `blocks` times TILE_ROWS rows and `pieces` times LANES columns.

    X is given by its parts, whose rows have `stride` numbers and which are `part` numbers from each other. The columns
    begin at piece `piece` of W, and in y, whose numbers they count, at `at_y`.
    """

    def generate(context, builder, signature, arguments):
        parts, w, bias, y = (
            builder.bitcast(_data(context, builder, signature, arguments, k), _BYTE.as_pointer()) for k in (0, 3, 4, 5)
        )
        _, stride, part, _, _, _, piece, at_y, y_stride, size = arguments

        def number(k):
            return ir.Constant(_INDEX, k)

        def times(value, k):
            return builder.mul(value, number(k))

        def load(register, base, places, row):
            place = functools.reduce(builder.add, places)
            _instruction(builder, "tileloadd64", ir.Constant(_BYTE, register), builder.gep(base, [place]), row)

        steps, row, y_row = builder.udiv(size, number(_DEPTH)), times(stride, 2), times(y_stride, 4)
        of_piece, part = times(steps, _PARTS * _TILE), times(part, 2)
        first, columns = builder.mul(piece, of_piece), times(piece, 4 * LANES)
        sums = [(block, k, block * pieces + k) for block in range(blocks) for k in range(pieces)]
        of_x = range(len(sums), len(sums) + blocks)
        of_w = range(len(sums) + blocks, 8)
        for _, k, register in sums:
            load(register, bias, (columns, number(4 * LANES * k)), number(0))  # the same for all rows
        with cgutils.for_range(builder, steps) as loop:
            step = builder.add(first, times(loop.index, _PARTS * _TILE))
            turn = 0
            for n, (x_part, w_part) in enumerate(_PRODUCTS):
                if n == 0 or x_part != _PRODUCTS[n - 1][0]:
                    for block, register in enumerate(of_x):
                        places = times(loop.index, 2 * _DEPTH), times(part, x_part), times(row, TILE_ROWS * block)
                        load(register, parts, places, row)
                for k in range(pieces):
                    weights, turn = of_w[turn % len(of_w)], turn + 1
                    load(weights, w, (step, times(of_piece, k), number(w_part * _TILE)), number(64))
                    for block in range(blocks):
                        three = (ir.Constant(_BYTE, r) for r in (sums[block * pieces + k][2], of_x[block], weights))
                        _instruction(builder, "tdpbf16ps", *three)
        for block, k, register in sums:
            places = times(at_y, 4), times(y_row, TILE_ROWS * block), number(4 * LANES * k)
            place = builder.gep(y, [functools.reduce(builder.add, places)])
            _instruction(builder, "tilestored64", ir.Constant(_BYTE, register), place, y_row)
        return context.get_dummy_value()

    def multiply(_context, parts, stride, part, w, bias, y, piece, at_y, y_stride, K):
        for array, kind in ((parts, types.int16), (w, types.int16), (bias, types.float32), (y, types.float32)):
            if array.layout != "C" or array.dtype != kind:
                raise TypeError(f"the product by tiles needs a contiguous array of {kind}, not {array}")
        place = types.intp
        return types.void(parts, place, place, w, bias, y, place, place, place, place), generate

    return intrinsic(multiply)


_two_by_two, _two_by_one, _one_by_four, _one_by_one = (
    _multiplies_tiles(*of) for of in ((2, 2), (2, 1), (1, 4), (1, 1))
)


@call
def _dense_by_tiles(x, at_x, w, bias, y, at_y, K, N, rows, parts):
    """As `dense`, of TILE_ROWS rows or, if `rows` is larger, of twice as many."""
    stride, part, pieces = parts.shape[2], parts.shape[1] * parts.shape[2], N // LANES
    blocks = 2 if rows > TILE_ROWS else 1
    for r in range(blocks * TILE_ROWS):
        for k in range(0, K, LANES):
            _split(x, (at_x + r) * x.shape[1] + k, parts, r * stride + k, part)
    o, y_stride = at_y * y.shape[1], y.shape[1]
    _configure(_CONFIGURATION)
    if blocks == 2:
        together = pieces // 2 * 2
        for n in range(0, together, 2):
            _two_by_two(parts, stride, part, w, bias, y, n, o + n * LANES, y_stride, K)
        for n in range(together, pieces):
            _two_by_one(parts, stride, part, w, bias, y, n, o + n * LANES, y_stride, K)
    else:
        together = pieces // 4 * 4
        for n in range(0, together, 4):
            _one_by_four(parts, stride, part, w, bias, y, n, o + n * LANES, y_stride, K)
        for n in range(together, pieces):
            _one_by_one(parts, stride, part, w, bias, y, n, o + n * LANES, y_stride, K)
    _release()


@call
def dense_block(x, at_x, w, bias, y, at_y, K, N, rows, parts):
    """As `dense`, by the unit that W is stored for: `panels` or `tiles`.

    By tiles the rows of y are written up to TILE_ROWS, or to twice as many. parts [3, 2 TILE_ROWS, ≥ K] int16 is
    scratch.
    """
    if w.ndim == 5:  # numba compiles one of the two
        _dense_by_tiles(x, at_x, w, bias, y, at_y, K, N, rows, parts)
    else:
        dense(x, at_x, w, bias, y, at_y, K, N, rows)
