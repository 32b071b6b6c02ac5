"""Fused operators: what a pass puts in the place of several semantic ones.

Each says which operators it is made of, and nothing else: result types, operation counts and the
float64 meaning follow, so every rounding between its parts is part of what it means. Operands are
those of the parts in their order, without what one part hands to the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Cost, Op, Types
from deepinfer_compile.ir.types import DType, TensorType

V = TypeVar("V")
Apply = Callable[..., tuple[V, ...]]  # an operator and its operands -> its results


class Fused(Op):
    """An operator made of others. None of them consumes a state."""

    @abstractmethod
    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        """The results, from operands `xs` by way of `apply`, which stands for one part."""

    def infer(self, inputs: Types) -> Types:
        trace = _Trace(list(inputs))
        results = self.compose(trace.apply, range(len(inputs)))
        return tuple(trace.types[i] for i in results)

    def flops_per_row(self, inputs: Types) -> int:
        return self.cost(inputs).flops_per_row

    def cost(self, inputs: Types) -> Cost:
        """That of the parts, less what they no longer move: an operand is read once, a result is
        written once, and everything else stays where it was made."""
        trace = _Trace(list(inputs))
        results = self.compose(trace.apply, range(len(inputs)))
        costs = [op.cost(types) for op, types in trace.parts]
        fixed = sum(cost.bytes_fixed for cost in costs)
        per_row = sum(cost.bytes_per_row for cost in costs)
        for i, type_ in enumerate(trace.types):
            if type_.state:
                continue
            unmoved = trace.moves.count(i) - (i < len(inputs)) - (i in results)
            if type_.by_rows:
                per_row -= unmoved * type_.bytes(1)
            else:
                fixed -= unmoved * type_.bytes(1)
        flops = sum(cost.flops_per_row for cost in costs)
        picked = sum(cost.picked_per_row for cost in costs)
        pool = sum(cost.pool_bytes for cost in costs)
        per_entry = tuple(part for cost in costs for part in cost.per_entry)
        return Cost(fixed, per_row, flops, picked, pool, per_entry)


@dataclass
class _Trace:
    """The parts of a fused operator over value numbers: operands first, then results in order."""

    types: list[TensorType]
    parts: list[tuple[Op, Types]] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)

    def apply(self, op: Op, *xs: int) -> tuple[int, ...]:
        types = tuple(self.types[i] for i in xs)
        first = len(self.types)
        self.types += op.infer(types)
        made = tuple(range(first, len(self.types)))
        self.parts.append((op, types))
        self.moves += (*xs, *made)
        return made


def _stored(apply: Apply[V], y: V, to: DType | None) -> tuple[V, ...]:
    return apply(ops.Quantize(to), y) if to else (y,)


@dataclass(frozen=True)
class RmsNormQuantize(Fused):
    """(x, w) -> the normed rows as records."""

    name: ClassVar[str] = "rmsnorm_quantize"
    eps: float
    to: DType

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, w = xs
        (y,) = apply(ops.RmsNorm(self.eps), x, w)
        return apply(ops.Quantize(self.to), y)


@dataclass(frozen=True)
class RopeQuantize(Fused):
    """(x, angles) -> the rotated rows as records."""

    name: ClassVar[str] = "rope_quantize"
    to: DType

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, angles = xs
        (y,) = apply(ops.Rope(), x, angles)
        return apply(ops.Quantize(self.to), y)


@dataclass(frozen=True)
class RmsNormRopeQuantize(Fused):
    """(x, w, angles) -> the normed and rotated rows as records."""

    name: ClassVar[str] = "rmsnorm_rope_quantize"
    eps: float
    to: DType

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, w, angles = xs
        (y,) = apply(ops.RmsNorm(self.eps), x, w)
        return apply(RopeQuantize(self.to), y, angles)


@dataclass(frozen=True)
class LinearPair(Fused):
    """(x, w and scale of each of two matrices) -> both products; `heads` shape them."""

    name: ClassVar[str] = "linear_pair"
    out: DType
    heads: tuple[int, ...] = (0, 0)

    def products(self) -> tuple[ops.Linear, ops.Linear]:
        first, second = self.heads
        return ops.Linear(self.out, heads=first), ops.Linear(self.out, heads=second)

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, *weights = xs
        half = len(weights) // 2
        first, second = self.products()
        return (*apply(first, x, *weights[:half]), *apply(second, x, *weights[half:]))


@dataclass(frozen=True)
class LinearSwiGlu(Fused):
    """(x, gate's w and scale, up's w and scale) -> the gated rows, as records of type `to` if that
    is given. `inner` is what gate, up and product are rounded to."""

    name: ClassVar[str] = "linear_swiglu"
    limit: float
    inner: DType
    to: DType | None = None

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, gate_w, gate_scale, up_w, up_scale = xs
        (gate,) = apply(ops.Linear(self.inner), x, gate_w, gate_scale)
        (up,) = apply(ops.Linear(self.inner), x, up_w, up_scale)
        (h,) = apply(ops.SwiGlu(self.limit), gate, up)
        return _stored(apply, h, self.to)


@dataclass(frozen=True)
class ExpertSwiGlu(Fused):
    """(x, expert, gate's w and scale, up's w and scale, weight) -> the gated and weighted rows of
    each chosen expert, as records of type `to` if that is given."""

    name: ClassVar[str] = "expert_swiglu"
    limit: float
    inner: DType
    to: DType | None = None

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, expert, gate_w, gate_scale, up_w, up_scale, weight = xs
        (gate,) = apply(ops.ExpertLinear(self.inner), x, expert, gate_w, gate_scale)
        (up,) = apply(ops.ExpertLinear(self.inner), x, expert, up_w, up_scale)
        (h,) = apply(ops.SwiGlu(self.limit), gate, up, weight)
        return _stored(apply, h, self.to)


@dataclass(frozen=True)
class MhcEnter(Fused):
    """(X, fn, base, scale, pre, w) -> pre, post, comb of X; y, its collapse with the given `pre`,
    normed; y as records of type `to` if that is given. What a sub-layer starts from."""

    name: ClassVar[str] = "mhc_enter"
    iterations: int
    eps: float
    norm_eps: float
    rms_eps: float
    to: DType | None = None

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        x, fn, base, scale, pre, w = xs
        mhc = ops.MhcCoefficients(self.iterations, self.eps, self.norm_eps)
        coefficients = apply(mhc, x, fn, base, scale)
        (collapsed,) = apply(ops.MhcCollapse(), x, pre)
        (y,) = apply(ops.RmsNorm(self.rms_eps), collapsed, w)
        return (*coefficients, y, *(_stored(apply, y, self.to) if self.to else ()))


@dataclass(frozen=True)
class MhcExpandEnter(Fused):
    """(o, X, post, comb, fn, base, scale, pre, w) -> X', the streams after a sub-layer, then
    `MhcEnter` of them: one sub-layer ends and the next one starts."""

    name: ClassVar[str] = "mhc_expand_enter"
    iterations: int
    eps: float
    norm_eps: float
    rms_eps: float
    to: DType | None = None

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        o, x, post, comb, *rest = xs
        (after,) = apply(ops.MhcExpand(), o, x, post, comb)
        enter = MhcEnter(self.iterations, self.eps, self.norm_eps, self.rms_eps, self.to)
        return (after, *apply(enter, after, *rest))


@dataclass(frozen=True)
class RopeAttention(Fused):
    """(`SparseAttention`'s operands, angles) -> o: q is rotated before, o rotated back after."""

    name: ClassVar[str] = "rope_attention"
    window: int
    scale: float
    ratio: int = 0

    def attention(self) -> ops.SparseAttention:
        return ops.SparseAttention(self.window, self.scale, self.ratio)

    def compose(self, apply: Apply[V], xs: Sequence[V]) -> tuple[V, ...]:
        q, *others, angles = xs
        (turned,) = apply(ops.Rope(), q, angles)
        (o,) = apply(self.attention(), turned, *others)
        return apply(ops.Rope(inverse=True), o, angles)


@dataclass(frozen=True)
class ChunkRopeAttention(RopeAttention):
    """(`ChunkAttention`'s operands, angles) -> o: `RopeAttention` for prefill."""

    name: ClassVar[str] = "chunk_rope_attention"

    def attention(self) -> ops.SparseAttention:
        return ops.ChunkAttention(self.window, self.scale, self.ratio)


FUSED: tuple[type[Op], ...] = (
    RmsNormQuantize,
    RopeQuantize,
    RmsNormRopeQuantize,
    LinearPair,
    LinearSwiGlu,
    ExpertSwiGlu,
    MhcEnter,
    MhcExpandEnter,
    RopeAttention,
    ChunkRopeAttention,
)
