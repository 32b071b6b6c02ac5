"""Random well-typed graphs over the operators that passes rewrite, and data to run them on.

Everything has 32 channels, and streams, heads and chosen experts are two alike, so that any value
may become an operand of many operators: patterns of passes arise by themselves, with other readers
in between, values that are returned or probed, and states that move on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.graph import Graph, Node, Value
from deepinfer_compile.ir.types import Dim, DType, R, TensorType

ROWS, CHANNELS, EXPERTS = 3, 32, 4
F32, BF16, I32, E4M3, E2M1 = DType.F32, DType.BF16, DType.I32, DType.E4M3, DType.E2M1
UE8M0, MXFP8, MXFP4, NVFP4 = DType.UE8M0, DType.MXFP8, DType.MXFP4, DType.NVFP4
RECORDS = (MXFP8, MXFP8, MXFP4, NVFP4)

ROW, PAIR = (R, CHANNELS), (R, 2, CHANNELS)
TWO = TensorType(F32, (R, 2))
COMB = TensorType(F32, (R, 2, 2))
ANGLES = TensorType(F32, (R, 2, 8))
INTS = TensorType(I32, (R,))
CHOICE = TensorType(I32, (R, 2))
LOGITS = TensorType(F32, (R, EXPERTS))
WINDOW = TensorType(MXFP8, (4, 5, CHANNELS), state=True)

T = TypeVar("T")


class Missing(Exception):
    """No value so far has the type an operator needs."""


@dataclass
class Drawing:
    """A graph as it is drawn. Weights are inputs too: who has a name has the same data."""

    draw: st.DrawFn
    inputs: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)
    window: Value = field(default=Value("window", WINDOW))

    def pick(self, options: Sequence[T]) -> T:
        return self.draw(st.sampled_from(options))

    def given(self, name: str, type_: TensorType) -> Value:
        return self.inputs.setdefault(name, Value(name, type_))

    def weight(self, dtype: DType, *shape: int) -> Value:
        """One of three of its type."""
        dims = "x".join(map(str, shape))
        name = f"{dtype.value}_{dims}_{self.draw(st.integers(0, 2))}"
        return self.given(name, TensorType(dtype, shape))

    def some(self, *types: TensorType) -> Value:
        """A value of one of `types`, likely a young one."""
        found = [value for value in self.made if value.type in types]
        if not found:
            raise Missing
        back = self.pick((0, 0, 0, 0, 1, 2))
        return found[-1 - min(back, len(found) - 1)]

    def floats(self, *shapes: tuple[Dim, ...]) -> Value:
        every = [TensorType(d, shape) for d in (F32, BF16) for shape in shapes]
        return self.some(*every)

    def emit(self, op: ops.Op, *inputs: Value) -> None:
        types = op.infer(tuple(value.type for value in inputs))
        names = [f"v{len(self.made) + i}" for i in range(len(types))]
        outputs = tuple(Value(n, t) for n, t in zip(names, types, strict=True))
        self.nodes.append(Node(op, inputs, outputs))
        self.made += outputs


def _norm(d: Drawing) -> None:
    x = d.floats(ROW, PAIR)
    d.emit(ops.RmsNorm(1e-6), x, d.weight(BF16, *x.type.inner))


def _quantize(d: Drawing) -> None:
    to = d.pick(RECORDS)
    d.emit(ops.Quantize(to), d.floats(ROW, PAIR))


def _rope(d: Drawing) -> None:
    inverse = d.pick((False, False, True))
    d.emit(ops.Rope(inverse), d.floats(ROW, PAIR), d.some(ANGLES))


def _linear(d: Drawing) -> None:
    x = d.some(*(TensorType(t, ROW) for t in (F32, BF16, MXFP8, MXFP8)))
    out = d.pick((BF16, BF16, F32))
    heads = d.pick((0, 0, 2))
    outputs = 2 * CHANNELS if heads else CHANNELS
    op = ops.Linear(out, heads=2 if heads else 0)
    if x.type.dtype is not MXFP8 and d.pick((True, False)):
        d.emit(op, x, d.weight(BF16, outputs, CHANNELS))
        return
    d.emit(op, x, d.weight(E4M3, outputs, CHANNELS), d.weight(UE8M0, outputs // 32, 1))


def _grouped(d: Drawing) -> None:
    w, scale = d.weight(E4M3, 2 * CHANNELS, CHANNELS), d.weight(UE8M0, 2, 1)
    d.emit(ops.Linear(BF16, groups=2, heads=2), d.floats(PAIR), w, scale)


def _route(d: Drawing) -> None:
    d.emit(ops.Linear(F32), d.floats(ROW), d.weight(BF16, EXPERTS, CHANNELS))
    d.emit(ops.TopKGate(2, 1.5), d.made[-1], d.weight(F32, EXPERTS))


def _expert(d: Drawing) -> None:
    kinds = [TensorType(t, s) for t in (F32, BF16, MXFP8, MXFP8) for s in (ROW, PAIR)]
    w, scale = d.weight(E2M1, EXPERTS, 32, CHANNELS), d.weight(UE8M0, EXPERTS, 32, 1)
    d.emit(ops.ExpertLinear(BF16), d.some(*kinds), d.some(CHOICE), w, scale)


def _swiglu(d: Drawing) -> None:
    gate = d.floats(ROW, PAIR)
    weighted = gate.type.shape == PAIR and d.pick((True, False))
    weight = [d.some(TWO)] if weighted else []
    d.emit(ops.SwiGlu(2.0), gate, d.some(gate.type), *weight)


def _combine(d: Drawing) -> None:
    routed = d.floats(PAIR)
    d.emit(ops.MoeCombine(), routed, d.floats(ROW))


def _coefficients(d: Drawing, x: Value | None = None) -> None:
    x = x or d.floats(PAIR)
    fn, base, scale = d.weight(F32, 8, x.type.width), d.weight(F32, 8), d.weight(F32, 3)
    d.emit(ops.MhcCoefficients(3, 1e-6, 1e-20), x, fn, base, scale)


def _collapse(d: Drawing) -> None:
    d.emit(ops.MhcCollapse(), d.floats(PAIR), d.some(TWO))


def _expand(d: Drawing) -> None:
    x = d.floats(PAIR)
    o = d.some(TensorType(x.type.dtype, ROW))
    d.emit(ops.MhcExpand(), o, x, d.some(TWO), d.some(COMB))


def _broadcast(d: Drawing) -> None:
    d.emit(ops.BroadcastStreams(2), d.floats(ROW))


def _store(d: Drawing) -> None:
    rows = d.some(TensorType(MXFP8, ROW))
    following = Value(f"{d.window.name}n", WINDOW)
    inputs = (d.window, d.given("slot", INTS), d.given("position", INTS), rows)
    d.nodes.append(Node(ops.RingStore(), inputs, (following,)))
    d.window = following


def _attend(d: Drawing) -> None:
    common = (d.given("slot", INTS), d.given("position", INTS), d.weight(F32, 2))
    q = d.floats(PAIR)
    if d.pick((True, False)):
        d.emit(ops.SparseAttention(4, 0.25), q, d.window, *common)
        return
    kv = d.some(TensorType(MXFP8, ROW))
    start = d.given("row_start", INTS)
    d.emit(ops.ChunkAttention(4, 0.25), q, d.window, *common, start, kv)


def _records(d: Drawing) -> None:
    """What follows each other on the way to a record, any of it left out."""
    for step in (_norm, _rope, _quantize):
        if d.pick((True, True, False)):
            step(d)


def _gated(d: Drawing) -> None:
    """Two products, mostly of one x, their activation and what quantises it."""
    x = d.some(*(TensorType(t, ROW) for t in (F32, BF16, MXFP8, MXFP8)))
    routed = d.pick((True, False))
    weight = [d.some(TWO)] if routed else []
    chosen = [d.some(CHOICE)] if routed else []
    for _ in ("gate", "up"):
        if routed:
            w, scale = d.weight(E2M1, EXPERTS, 32, CHANNELS), d.weight(UE8M0, EXPERTS, 32, 1)
            d.emit(ops.ExpertLinear(BF16), x, *chosen, w, scale)
        else:
            d.emit(ops.Linear(BF16), x, d.weight(E4M3, 32, CHANNELS), d.weight(UE8M0, 1, 1))
        x = d.pick((x, x, x, d.some(x.type)))
    d.emit(ops.SwiGlu(2.0), d.made[-2], d.made[-1], *weight)
    if d.pick((True, True, False)):
        d.emit(ops.Quantize(MXFP8), d.made[-1])


def _sublayer(d: Drawing) -> None:
    """The streams after one sub-layer, and what the next one starts from. What it collapses with
    may follow from its own coefficients."""
    if d.pick((True, False)):
        _expand(d)
    x, pre = d.floats(PAIR), d.some(TWO)
    _coefficients(d, x)
    if d.pick((True, False, False)):
        _expand(d)
        _coefficients(d)
        pre = d.some(TWO)
    d.emit(ops.MhcCollapse(), x, pre)
    d.emit(ops.RmsNorm(1e-6), d.made[-1], d.weight(BF16, CHANNELS))
    if d.pick((True, True, False)):
        d.emit(ops.Quantize(MXFP8), d.made[-1])


def _attention(d: Drawing) -> None:
    """Rotate, attend, rotate back, with a store of the window somewhere or not."""
    d.emit(ops.Rope(), d.floats(PAIR), d.some(ANGLES))
    stored = d.pick(("before", "after", "not"))
    if stored == "before":
        _store(d)
    _attend(d)
    if stored == "after":
        _store(d)
    d.emit(ops.Rope(inverse=True), d.floats(PAIR), d.some(ANGLES))


STEPS = (
    _norm, _quantize, _quantize, _rope, _linear, _linear, _grouped, _route, _expert, _swiglu,
    _combine, _coefficients, _collapse, _expand, _broadcast, _store, _attend,
    *(_records, _gated, _sublayer, _attention) * 4,
)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn, most: int) -> Graph:
    """At most `most` steps over rows, pairs, angles and routing that are given."""
    d = Drawing(draw)
    dtype = d.pick((BF16, BF16, F32))
    for name, type_ in (
        ("x", TensorType(dtype, ROW)),
        ("X", TensorType(dtype, PAIR)),
        ("angles", ANGLES),
        ("pre", TWO),
        ("comb", COMB),
        ("choice", CHOICE),
    ):
        d.made.append(d.given(name, type_))
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=most // 2, max_size=most)):
        try:
            step(d)
        except Missing:
            continue
    own = [value for node in d.nodes for value in node.outputs if not value.type.state]
    read = {value.name for node in d.nodes for value in node.inputs}
    probes, outputs = (
        draw(st.lists(st.sampled_from(some), unique=True, max_size=4)) if some else []
        for some in ([value for value in own if value.name in read], own)
    )
    return Graph(
        "case",
        tuple(d.inputs.values()),
        (),
        (Value("window", WINDOW),),
        tuple(d.nodes),
        tuple(outputs) or tuple(own[-1:]),
        tuple(probes),
    )


def replaceable(value: Value) -> bool:
    """Whether any numbers will do for it: expert numbers must be some."""
    return value.type.dtype in (F32, BF16, MXFP8)


def data_for(value: Value, seed: int) -> Tensor:
    """Stored data of a value, the same for the same name, type and seed."""
    name = sum(ord(letter) * 31**i for i, letter in enumerate(value.name)) % 2**31
    g = torch.Generator().manual_seed(seed * 1009 + name)
    shape = [ROWS if dim is R else dim for dim in value.type.shape]
    reals = torch.randn(shape, generator=g)
    match value.name:
        case "slot":
            return torch.tensor([1, 1, 3], dtype=torch.int32)
        case "position":
            return torch.tensor([2, 3, 0], dtype=torch.int32)
        case "row_start":
            return torch.tensor([0, 0, 2], dtype=torch.int32)
        case "choice":
            return torch.tensor([[0, 3], [1, 2], [0, 1]], dtype=torch.int32)
    match value.type.dtype:
        case DType.BF16:
            return reals.bfloat16()
        case DType.E4M3:
            return codecs.encode_e4m3(reals.double())
        case DType.UE8M0:
            return torch.randint(120, 130, shape, generator=g).to(torch.uint8)
        case DType.E2M1:
            return torch.randint(0, 256, [*shape[:-1], shape[-1] // 2], generator=g).byte()
        case DType.MXFP8:
            return codecs.encode_records(reals, MXFP8)
    return reals
