"""Collects a graph node by node: names, inferred types, current state versions, origins.

The one mutable object of the build; it lives inside `build_graph` and ends as a frozen `Graph`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer_compile.build.dimensions import Dimensions
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Graph, Node, Origin, Value, Weight
from deepinfer_compile.ir.types import Dim, DType, R, TensorType
from deepinfer_compile.spec.load import ModelSpec
from deepinfer_compile.spec.schema import Numerics


@dataclass
class Builder:
    """`phase` decides where rows of the same request are read from (see `ir/ops.py`)."""

    spec: ModelSpec
    phase: str
    at: str = ""
    layer: int | None = None
    inputs: dict[str, Value] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    states: dict[str, Value] = field(default_factory=dict)
    versions: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    made: dict[str, Value] = field(default_factory=dict)

    @property
    def dims(self) -> Dimensions:
        return Dimensions(self.spec)

    @property
    def chunked(self) -> bool:
        """Prefill: older rows come from the state, newer ones from the chunk."""
        return self.phase == "prefill"

    @property
    def activation(self) -> DType:
        """What operators hand to each other under the numerics policy."""
        return DType.F32 if self.rounds_nothing else DType.BF16

    @property
    def rounds_nothing(self) -> bool:
        return self.spec.engine.numerics is Numerics.F32

    def locate(self, key: str, layer: int | None = None) -> None:
        """Nodes from here on come from spec field `key`, in `layer`."""
        span = self.spec.span(key)
        self.at = f"{span.file.rsplit('/', 1)[-1]}:{span.line} {key}"
        self.layer = layer

    def row_array(self, name: str, dtype: DType = DType.I32, width: int | None = None) -> Value:
        """An input with one entry per row, or `width` of them."""
        return self.input(name, TensorType(dtype, (R,) if width is None else (R, width)))

    def input(self, name: str, type_: TensorType) -> Value:
        return self.inputs.setdefault(name, Value(name, type_))

    def weight(self, name: str, dtype: DType, *shape: Dim, source: str = "") -> Value:
        """A parameter of `shape`; its checkpoint tensor is `source`, or has the same name."""
        value = Value(name, TensorType(dtype, shape))
        return self.weights.setdefault(name, Weight(value, source or name)).value

    def fp8_weight(self, name: str, rows: int, channels: int) -> tuple[Value, Value]:
        """An FP8 matrix and its 32x32 block scales."""
        return (
            self.weight(f"{name}.weight", DType.E4M3, rows, channels),
            self.weight(f"{name}.scale", DType.UE8M0, -(-rows // 32), -(-channels // 32)),
        )

    def state(self, name: str, dtype: DType, *shape: int) -> Value:
        """The current version of a state, declared on first use."""
        if name not in self.states:
            self.states[name] = Value(name, TensorType(dtype, shape, state=True))
            self.versions[name] = self.states[name]
        return self.versions[name]

    def emit(self, op: ops.Op, *inputs: Value, names: tuple[str, ...]) -> tuple[Value, ...]:
        """Append a node; its results are called `names`."""
        types = op.infer(tuple(value.type for value in inputs))
        assert len(types) == len(names), f"{op.name} has {len(types)} results"
        assert not self.made.keys() & set(names), f"value names used twice: {names}"
        outputs = tuple(Value(n, t) for n, t in zip(names, types, strict=True))
        self.made.update(zip(names, outputs, strict=True))
        self.nodes.append(Node(op, inputs, outputs, Origin(self.at, self.layer, ("build",))))
        return outputs

    def one(self, op: ops.Op, *inputs: Value, name: str) -> Value:
        """`emit` for operators with a single result."""
        return self.emit(op, *inputs, names=(name,))[0]

    def update(self, state: str, op: ops.Op, *rows: Value) -> Value:
        """Consume the current version of `state`; returns the next one."""
        version = self.versions[state]
        self.versions[state] = self.one(op, version, *rows, name=f"{state}.next")
        return self.versions[state]

    def quantized(self, x: Value) -> Value:
        """x as the FP8 weights take it: per-32 records under `vendor`, itself under `f32`."""
        if self.rounds_nothing:
            return x
        name = f"{x.name}.fp8"
        return self.made.get(name) or self.one(ops.Quantize(DType.MXFP8), x, name=name)

    def fp8_linear(self, x: Value, weight: str, rows: int, *, name: str, heads: int = 0) -> Value:
        """Quantise x and multiply by an FP8 weight: section 3.1."""
        w, scale = self.fp8_weight(weight, rows, x.type.width)
        op = ops.Linear(out=self.activation, heads=heads)
        return self.one(op, self.quantized(x), w, scale, name=name)

    def bf16_linear(self, x: Value, weight: str, rows: int, *, name: str, out: DType) -> Value:
        w = self.weight(f"{weight}.weight", DType.BF16, rows, x.type.width)
        return self.one(ops.Linear(out=out), x, w, name=name)

    def rmsnorm(self, x: Value, weight: str, *, name: str) -> Value:
        w = self.weight(f"{weight}.weight", DType.BF16, x.type.channels)
        return self.one(ops.RmsNorm(self.spec.model.rms_norm_eps), x, w, name=name)

    def graph(self, outputs: tuple[Value, ...]) -> Graph:
        return Graph(
            name=self.phase,
            inputs=tuple(self.inputs.values()),
            weights=tuple(self.weights.values()),
            states=tuple(self.states.values()),
            nodes=tuple(self.nodes),
            outputs=outputs,
        )
