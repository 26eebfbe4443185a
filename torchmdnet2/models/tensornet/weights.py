"""Frozen TensorNet weights, prepared once for the fused kernels.

The radial filters of TensorNet are functions of the distance alone. They are tabulated in float64 as cubic Hermite
segments on knots that are uniform in exp(−a d), and so dense where the filters vary. The number of knots gives slopes,
on which forces depend, the precision of float32. For mixed precision they are quadratics in half as many bytes.
Shapes: K knots, F channels, L layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers import LogNorm

__all__ = [
    "FUNCTIONS", "FilterTable", "Filters", "FrozenTensorNet", "PackedWeights", "ScalarNetwork", "SplitWeights",
    "fit_tables", "pack", "pack_quadratics", "pack_split", "reduce_filters", "tabulate", "tabulate_quadratics",
]  # fmt: skip


Filters = Callable[[Tensor], Tensor]
"""[K] distances in Å (float64) → [K, P, F]."""

_SIZES = (512, 1024, 2048, 4096)
_SLOPE_ERROR = 7e-7  # of the largest slope; eager float32 sums have errors like this
_ROUGH_SLOPE_ERROR = 5e-5  # a tenth of the rounding errors in half precision
_CLOSEST = 0.6  # Å; atoms do not come closer
FUNCTIONS = 32
"""Number of radial functions of the embedding by elements (triton_edges.py)."""


@dataclass(eq=False)
class FilterTable:
    """Knots of the filter tables: uniform in exp(−decay · d) from 0 to the cutoff.

    Knot k lies at scale · (1 − exp(−decay · d)) = k; distances are rounded to float32, so that the kernels subtract
    them exactly.
    """

    cutoff: float
    num_knots: int = 512

    @property
    def decay(self) -> float:
        """1/Å."""
        return 3.0 / self.cutoff

    @property
    def scale(self) -> float:
        return (self.num_knots - 1) / (1 - math.exp(-self.decay * self.cutoff))

    def distances(self) -> Tensor:
        """Return knots in Å, [K] float64 (each a float32 number)."""
        place = torch.arange(self.num_knots, dtype=torch.float64, device="cpu")
        return (-torch.log1p(-place / self.scale) / self.decay).clamp(max=self.cutoff).float().double()

    def middles(self) -> Tensor:
        """Return middles between neighboring knots in Å, [K] (the last one unused) float64, each a float32 number."""
        d = self.distances()
        return torch.cat([(d[1:] + d[:-1]) / 2, d[-1:]]).float().double()


def fit_tables(
    cutoff: float, filters: Sequence[tuple[Filters, bool]], quadratic: bool = False
) -> tuple[FilterTable, list[Tensor]]:
    """Return tables of radial functions, with the fewest knots that give all slopes their precision.

    Args:
        cutoff: cutoff in Å.
        filters: functions, each with True if it is zero at the cutoff, as for `tabulate`.
        quadratic: less accurate tables, by `tabulate_quadratics`.

    Returns:
        The knots, and for each filter the result of `tabulate` or `tabulate_quadratics`.
    """
    form, largest = (tabulate_quadratics, _ROUGH_SLOPE_ERROR) if quadratic else (tabulate, _SLOPE_ERROR)
    for num_knots in _SIZES:
        table, segments = FilterTable(cutoff, num_knots), []
        for function, zero_at_cutoff in filters:
            segments.append(form(function, table, zero_at_cutoff))
            if num_knots < _SIZES[-1] and _slope_error(function, table, segments[-1]) > largest:
                break
        else:
            break
    return table, segments


def tabulate(filters: Filters, table: FilterTable, zero_at_cutoff: bool = True) -> Tensor:
    """Return radial functions as cubics between the knots.

    Args:
        filters: the functions.
        table: the knots.
        zero_at_cutoff: the functions and their slopes go to zero at the cutoff.

    Returns:
        [K, 4, P, F] float64: the cubic Hermite segment from each knot to the next, as coefficients of the powers of
        the distance from the knot in Å. The last knot, at the cutoff, is zero: nothing lies beyond it.
    """
    d = table.distances()
    f, s = _value_and_slope(filters, d)
    # exactly at the cutoff rounding decides on which side a knot falls: filters are smooth and zero there
    if zero_at_cutoff:
        f[-1], s[-1] = 0.0, 0.0
    h = torch.diff(d)[:, None, None]
    mean = (f[1:] - f[:-1]) / h
    segments = f.new_zeros(len(f), 4, *f.shape[1:])  # 25 MB of organic, which are not copied
    segments[:-1, 0], segments[:-1, 1] = f[:-1], s[:-1]
    segments[:-1, 2] = (3 * mean - 2 * s[:-1] - s[1:]) / h
    segments[:-1, 3] = (s[:-1] + s[1:] - 2 * mean) / h**2
    return segments


def tabulate_quadratics(filters: Filters, table: FilterTable, zero_at_cutoff: bool = True) -> Tensor:
    """As `tabulate`, but a quadratic around each middle between knots, [K, 3, P, F]: slopes are continuous."""
    slope = _value_and_slope(filters, table.distances())[1]
    if zero_at_cutoff:
        slope[-1] = 0.0
    middle = _value_and_slope(filters, table.middles()[:-1])[0]
    h = torch.diff(table.distances())[:, None, None]
    segments = torch.stack([middle, (slope[1:] + slope[:-1]) / 2, torch.diff(slope, dim=0) / (2 * h)], 1)
    return torch.cat([segments, torch.zeros_like(segments[:1])])


def pack_quadratics(segments: Tensor) -> Tensor:
    """Return quadratics [K, 3, P, F] as [K, 2, P, F] int32: float32 numbers c0 and c1 whose last 8 bits are those of
    c2.

    c2, of which 8 bits count, is small beside c1/t: it needs no more. c0 and c1 have relative errors below 2⁻¹⁶.
    """
    c0, c1, c2 = segments.float().unbind(1)
    bits = (c2.bfloat16().view(torch.int16).int() & 0xFFFF).long()

    def word(x: Tensor, last: Tensor) -> Tensor:
        return ((((x.contiguous().view(torch.int32).long() - last + 128) >> 8) << 8) | last).int()

    return torch.stack([word(c0, bits >> 8), word(c1, bits & 0xFF)], 1)


def reduce_filters(filters: Filters, table: FilterTable, size: int) -> tuple[Filters, Tensor]:
    """Return radial functions φ that filters [K, P, F] are nearly linear combinations of, and the combinations.

    Those with the smallest errors of values and slopes at the knots. What lies nearer than atoms come counts little:
    the filters of an embedding span one function more than there are radial functions, for their bias, and the one
    that is left out differs from zero there only (below 0.4 Å by 2 %).

    Returns:
        φ, as [K, 1, size]; V [P, size, F] float64, with filters ≈ φ V.
    """
    d = table.distances()[::4]  # many more than functions
    values, slopes = (t.flatten(1) for t in _value_and_slope(filters, d))
    weight = (d / _CLOSEST).clamp(max=1).pow(8).clamp(min=1e-6)[:, None]
    v = torch.linalg.svd(weight.repeat(2, 1) * torch.cat([values, slopes * table.cutoff / 32]))[2][:size]
    shape = filters(d[:1]).shape[1:]
    return lambda d: (filters(d).flatten(1) @ v.T)[:, None], v.unflatten(1, shape).transpose(0, 1).contiguous()


def _value_and_slope(filters: Filters, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and slope, both [K, P, F], by two backward passes from sums.

    Forward differentiation, or gradients of tensors, would load much of PyTorch, which takes a second or more.
    """
    with torch.enable_grad():
        d = d.detach().requires_grad_()
        f = filters(d)
        v = torch.ones_like(f, requires_grad=True)
        (sums,) = torch.autograd.grad((f * v).sum(), d, create_graph=True)
        (slope,) = torch.autograd.grad(sums.sum(), v)
    return f.detach(), slope


def _slope_error(filters: Filters, table: FilterTable, segments: Tensor) -> float:
    """Return the largest error of the slopes of every fourth of these segments, relative to the largest slope.

    Errors of neighboring segments are nearly the same.
    """
    knots = table.distances()
    h = torch.diff(knots)[::4]
    segments = segments[:-1:4]
    if segments.shape[1] == 3:  # worst at the middle
        d, slope = table.middles()[:-1:4], segments[:, 1]
    else:
        place = 0.5 - math.sqrt(1 / 12)  # where the slope of a cubic Hermite segment is worst
        d, t = knots[:-1:4] + place * h, (place * h)[:, None, None]
        slope = segments[:, 1] + t * (2 * segments[:, 2] + 3 * t * segments[:, 3])
    exact = _value_and_slope(filters, d)[1]
    error = slope - exact
    return float(error[d > _CLOSEST].abs().max() / exact.abs().max().clamp(min=1e-30))


def _norm(norm: Any, give: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, float]:
    """γ, β and ε, which "log" does not have."""
    return give(norm.weight), give(norm.bias), getattr(norm, "eps", 0.0)


class FrozenTensorNet:
    """Weights of a TensorNet and its scalar head in the layout of the kernels, float32, on one device.

    Attributes:
        mixed: for kernels in mixed precision.
        table: knots of the filter tables; knots: [K] the distances from which segments are counted, Å.
        embedding_table: [K, 4, 3, F]; layer_tables: L × [K, 4, 3, F]; where mixed, as `pack_quadratics` gives them.
        embedding_self: [F] f1(0); layer_self: L × [3, F] filters at distance 0 (an atom's message to itself).
        z_receiver, z_sender: [max_z, F], their sum being the pair embedding of two elements.
        log_norm: norms are γ log(1 + x) + β, not layer norms.
        linear: [L + 1, F] eV, of the linear read-out; None where the model has none.
    """

    _vanish = True  # the tables of the layers do so at the cutoff

    def __init__(
        self, model: Any, head: nn.Module, energy_scale: float, device: torch.device | str, mixed: bool = False
    ):  # fmt: skip
        exact: Any = copy.deepcopy(model).cpu().double().requires_grad_(False)
        self.channels: int = model.hidden_channels
        self.num_layers = len(model.layers)
        self.is_o3 = model.group == "O(3)"
        self.log_norm = isinstance(model.out_norm, LogNorm)
        self.device, self.mixed = torch.device(device), mixed
        emb = exact.tensor_embedding

        def give(t: Tensor) -> Tensor:
            return t.detach().float().contiguous().to(self.device)

        with torch.no_grad():

            def embedding_filters(d: Tensor) -> Tensor:
                rbf, envelope = exact.distance_expansion(d), exact.envelope(d)
                projections = (emb.distance_proj1, emb.distance_proj2, emb.distance_proj3)
                f1, f2, f3 = (p(rbf) * envelope[:, None] for p in projections)
                return torch.stack([f1, emb.skew_sign * f2, f3], 1)

            of_layers = [self._filters(exact, layer) for layer in exact.layers]
            filters = [(embedding_filters, True), *((f, self._vanish) for f in of_layers)]
            self.table, fitted = fit_tables(model.cutoff, filters, mixed)
            of_embedding, *tables = [self._pack(t) for t in fitted]
            self.knots = give(self.table.middles() if mixed else self.table.distances())
            zero = torch.zeros(1, dtype=torch.float64, device="cpu")
            self.embedding_table, self.layer_tables = of_embedding, tables
            self._embedding_filters, self._places = embedding_filters, dict[tuple[int, ...], tuple[Tensor, Tensor]]()
            own = float(emb.counts_itself)
            self.embedding_self = give(own * embedding_filters(zero)[0, 0])
            self.layer_self = [give(own * f(zero)[0]) for f in of_layers]

            of_receiver, of_sender = emb.emb2.weight.chunk(2, 1)
            self.z_receiver = give(emb.emb.weight @ of_receiver.T + emb.emb2.bias)
            self.z_sender = give(emb.emb.weight @ of_sender.T)
            assert max(len(self.z_sender), self.table.num_knots) <= 2**15  # `pack_segment` (triton_edges.py)

            def mixing(linears: Any, first: int) -> tuple[Tensor, Tensor]:
                w = torch.stack([linear.weight for linear in linears[first : first + 3]])
                return give(w.transpose(1, 2)), give(w)

            self.embedding_mix, self.embedding_mix_t = mixing(emb.linears_tensor, 0)
            self.gate_norm = _norm(emb.init_norm, give)
            first, second = emb.linears_scalar
            self.gate = (give(first.weight.T), give(first.bias), give(second.weight.T), give(second.bias))
            self.gate_t = (give(first.weight), give(second.weight))
            # W γ and b + W β: what the gradient of a layer norm followed by a linear map needs (triton_atoms.py)
            norm = emb.init_norm
            self.gate_sums = (give(first.weight @ norm.weight), give(first.bias + first.weight @ norm.bias))
            self.mix_in = [mixing(layer.linears_tensor, 0) for layer in exact.layers]
            self.mix_out = [mixing(layer.linears_tensor, 3) for layer in exact.layers]
            self.out_norm = _norm(exact.out_norm, give)
            linear = [energy_scale * weight for weight in getattr(exact, "linear_readout", ())]
            self.linear = give(torch.stack(linear)) if linear else None
            after, after_t = self._head(copy.deepcopy(head).cpu().double(), energy_scale)
            self.readout = (give(exact.linear.weight.T), give(exact.linear.bias), *map(give, after))
            self.readout_t = (give(exact.linear.weight), *map(give, after_t))
            norm, linear = exact.out_norm, exact.linear
            self.readout_sums = (give(linear.weight @ norm.weight), give(linear.bias + linear.weight @ norm.bias))

    @property
    def fit_halves(self) -> bool:
        """Whether all matrices fit into the layout of `pack_halves`, also those after a layer norm."""
        given = self.embedding_mix, *self.gate[::2], self.readout[0], *(w for w, _ in (*self.mix_in, *self.mix_out))
        scale = max(1.0, *(float(gamma.abs().max()) for gamma in (self.gate_norm[0], self.out_norm[0])))
        return scale * max(float(w.abs().max()) for w in given) < HALVES_BELOW

    def _pack(self, segments: Tensor) -> Tensor:
        """Return a table in the layout of the kernels."""
        return (pack_quadratics(segments) if self.mixed else segments.float().contiguous()).to(self.device)

    @cached_property
    def embedding_by_elements(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The embedding as combinations of 32 functions: their table [K, 4, 1, 32], V [3, 32, F] and Vᵀ [3, F, 32].

        None where combinations of so few functions are less accurate than tables are.
        """
        with torch.inference_mode(False), torch.no_grad():
            functions, maps = reduce_filters(self._embedding_filters, self.table, FUNCTIONS)
            d = self.table.middles()[:-1]
            exact, found = _value_and_slope(self._embedding_filters, d)[1], _value_and_slope(functions, d)[1]
            error = (torch.einsum("kr,prf->kpf", found[:, 0], maps) - exact)[d > _CLOSEST].abs().max()
            if error > (_ROUGH_SLOPE_ERROR if self.mixed else _SLOPE_ERROR) * exact.abs().max():
                return None
            form = tabulate_quadratics if self.mixed else tabulate
            table = self._pack(form(functions, self.table))
            maps = maps.float().to(self.device)
        return table, maps, maps.transpose(1, 2).contiguous()

    def places_of(self, elements: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the place of each atomic number among these, [max_z], and these, int32."""
        if elements not in self._places:
            present = torch.tensor(elements, dtype=torch.int32, device="cpu")
            places = torch.zeros(len(self.z_sender), dtype=torch.int32, device="cpu")
            places[present] = torch.arange(len(elements), dtype=torch.int32, device="cpu")
            self._places[elements] = places.to(self.device), present.to(self.device)
        return self._places[elements]

    def _head(self, head: Any, energy_scale: float) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the maps of the read-out after the features, and those transposed."""
        hidden, last = head.output_network.layers[0], head.output_network.layers[2]
        after = (hidden.weight.T, hidden.bias, last.weight[0] * energy_scale, last.bias * energy_scale)
        return after, (hidden.weight,)

    def _filters(self, exact: Any, layer: Any) -> Filters:
        """Return what is tabulated of a layer."""
        return lambda d: layer.radial_filter(exact.distance_expansion(d), exact.envelope(d))


# --- Weights of a frozen TensorNet packed for products on CUDA cores (few atoms) and in split fp16 ---


def pack(w: Tensor) -> Tensor:
    """[.., K, N] → [.., K/4, N, 4]."""
    return w.reshape(*w.shape[:-2], w.shape[-2] // 4, 4, w.shape[-1]).transpose(-1, -2).contiguous()


class ScalarNetwork(NamedTuple):
    """A network of the features, F → H → 1 with H = F/2.

    Attributes:
        first: [F, H], also as `pack` gives it and transposed; first_bias [H]; last [H], last_bias [].
    """

    first: Tensor
    packed: Tensor
    first_bias: Tensor
    last: Tensor
    last_bias: Tensor
    first_t: Tensor


class _Maps:
    """The matrices of `FrozenTensorNet` but the last of the read-out, forward and transposed, as `form` gives them.

    The first one after a layer norm is γ ⊙ W.
    """

    def __init__(self, w: FrozenTensorNet, form: Callable[[Tensor], Tensor]):
        def pair(forward: Tensor, transposed: Tensor) -> tuple[Tensor, Tensor]:
            return form(forward), form(transposed)

        def after_norm(gamma: Tensor, forward: Tensor, transposed: Tensor) -> tuple[Tensor, Tensor]:
            return pair((gamma.double()[:, None] * forward.double()).float(), transposed)

        self.embedding_mix = pair(w.embedding_mix, w.embedding_mix_t)
        self.mix_in = [pair(*maps) for maps in w.mix_in]
        self.mix_out = [pair(*maps) for maps in w.mix_out]
        self.gate_hidden = after_norm(w.gate_norm[0], w.gate[0], w.gate_t[0])
        self.gate = pair(w.gate[2], w.gate_t[1])
        self.readout_hidden = after_norm(w.out_norm[0], w.readout[0], w.readout_t[0])


class PackedWeights(_Maps):
    """All matrices in the layout of `pack`."""

    def __init__(self, w: FrozenTensorNet):
        super().__init__(w, pack)


def pack_split(w: Tensor) -> Tensor:
    """[.., K, N] → [.., 2, N/16, K/16, 8, 4, 8] float16, with W = high + low/2048.

    Eight numbers of a thread of Tensor Cores: columns n and n + 8, k, k + 1, k + 2, k + 3 of 16 columns and 16 k.
    """
    k, n = w.shape[-2:]
    w = w.unflatten(-2, (k // 16, 4, 2, 2)).unflatten(-1, (n // 16, 2, 8))  # [.., k/16, 4, 2, 2, n/16, 2, 8]
    order = (-3, -7, -1, -6, -5, -2, -4)
    kept = w.dim() - 7
    w = w.permute(*range(kept), *(i + w.dim() for i in order)).flatten(-3)
    high = w.half()
    if not torch.isfinite(high).all():
        raise ValueError(
            "a weight is not finite or above 65504, the largest number in half precision: use "
            "Evaluator(…, precision='float64')"
        )
    return torch.stack([high, ((w.double() - high.double()) * 2048).half()], kept)


HALVES_BELOW = 31.0
"""Weights below this fit into the layout of `pack_halves`."""


def pack_halves(w: Tensor, dim: int = 0) -> Tensor:
    """[.., K, N] → [2, .., K, N] float16, or with the 2 at another dimension; the sum of both is 2048 W."""
    w = 2048 * w.double()
    high = w.half()
    return torch.stack([high, (w - high.double()).half()], dim)


class HalfWeights(_Maps):
    """All matrices but the last of the read-out in the layout of `pack_halves`."""

    def __init__(self, w: FrozenTensorNet):
        super().__init__(w, pack_halves)


class SplitWeights(_Maps):
    """All matrices but the last of the read-out in the layout of `pack_split`, sums over 3F in three parts."""

    def __init__(self, w: FrozenTensorNet):
        f = w.channels
        super().__init__(w, lambda m: pack_split(m.unflatten(0, (3, f)) if m.shape[0] == 3 * f else m))
