"""The mixture of experts: router, routed FP4 experts, one shared FP8 expert (section 3.11)."""

from __future__ import annotations

from deepinfer_compile.build.builder import Builder
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Value
from deepinfer_compile.ir.types import DType


def moe(b: Builder, layer: int, x: Value) -> Value:
    """The sub-layer's output, activation[R,D]."""
    b.locate("model.moe", layer)
    prefix = f"layers.{layer}"
    expert, weight = _route(b, prefix, x)
    routed = _routed(b, prefix, x, expert, weight)
    shared = _shared(b, prefix, x)
    return b.one(ops.MoeCombine(), routed, shared, name=f"{prefix}.ffn_out")


def _route(b: Builder, prefix: str, x: Value) -> tuple[Value, Value]:
    config = b.spec.model.moe
    experts = config.n_routed_experts
    gate = f"{prefix}.ffn.gate"
    logits = b.bf16_linear(x, gate, experts, out=DType.F32, name=f"{prefix}.router_logits")
    operands = [logits, b.weight(f"{gate}.bias", DType.F32, experts)]
    if b.spec.model.image_routing_bias:
        operands.append(b.weight(f"{gate}.bias_vl", DType.F32, experts))
        operands.append(b.row_array("image"))
    op = ops.TopKGate(config.num_experts_per_tok, config.routed_scaling_factor)
    expert, weight = b.emit(op, *operands, names=(f"{prefix}.experts", f"{prefix}.expert_weight"))
    return expert, weight


def _routed(b: Builder, prefix: str, x: Value, expert: Value, weight: Value) -> Value:
    config, hidden = b.spec.model.moe, b.spec.model.hidden_size
    inner = config.moe_intermediate_size
    gate = _expert_linear(b, prefix, "w1", x, expert, inner, name="expert_gate")
    up = _expert_linear(b, prefix, "w3", x, expert, inner, name="expert_up")
    swiglu = ops.SwiGlu(config.swiglu_limit)
    h = b.one(swiglu, gate, up, weight, name=f"{prefix}.expert_hidden")
    return _expert_linear(b, prefix, "w2", h, expert, hidden, name="expert_out")


def _expert_linear(
    b: Builder, prefix: str, matrix: str, x: Value, expert: Value, rows: int, *, name: str
) -> Value:
    experts, channels = b.spec.model.moe.n_routed_experts, x.type.channels
    stacked = f"{prefix}.ffn.experts.{matrix}"
    source = f"{prefix}.ffn.experts.{{e}}.{matrix}"
    w = b.weight(
        f"{stacked}.weight", DType.E2M1, experts, rows, channels, source=f"{source}.weight"
    )
    scale = b.weight(
        f"{stacked}.scale", DType.UE8M0, experts, rows, channels // 32, source=f"{source}.scale"
    )
    op = ops.ExpertLinear(out=b.activation)
    return b.one(op, b.quantized(x), expert, w, scale, name=f"{prefix}.{name}")


def _shared(b: Builder, prefix: str, x: Value) -> Value:
    config, hidden = b.spec.model.moe, b.spec.model.hidden_size
    inner, stem = config.moe_intermediate_size, f"{prefix}.ffn.shared_experts"
    gate = b.fp8_linear(x, f"{stem}.w1", inner, name=f"{prefix}.shared_gate")
    up = b.fp8_linear(x, f"{stem}.w3", inner, name=f"{prefix}.shared_up")
    h = b.one(ops.SwiGlu(config.swiglu_limit), gate, up, name=f"{prefix}.shared_hidden")
    return b.fp8_linear(h, f"{stem}.w2", hidden, name=f"{prefix}.shared_out")
