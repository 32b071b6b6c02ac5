"""Residual streams: the embedding, the hyper-connections around sub-layers, the final fold.

coefficients of a sub-layer are taken from the streams entering it
its input is collapsed with the `pre` of the sub-layer before it ("shifted")
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_compile.build.builder import Builder
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Value
from deepinfer_compile.ir.types import DType


def embed(b: Builder) -> tuple[Value, Value]:
    """The first streams and the one-hot coefficients of the first collapse (section 3.2)."""
    model = b.spec.model
    b.locate("model.hidden_size")
    table = b.weight("embed.weight", DType.BF16, model.vocab_size, model.hidden_size)
    h = b.one(ops.Embed(b.activation), b.row_array("token_id"), table, name="embedding")
    b.locate("model.hyper_connections.hc_mult")
    streams = model.hyper_connections.hc_mult
    x = b.one(ops.BroadcastStreams(streams), h, name="layers.0.streams")
    pre = b.one(ops.FirstStream(streams), b.row_array("position"), name="layers.0.pre")
    return x, pre


def around(
    b: Builder,
    x: Value,
    pre: Value,
    part: str,
    sublayer: Callable[[Value], Value],
    names: tuple[str, str],
) -> tuple[Value, Value]:
    """Collapse with `pre`, norm, run `sublayer`, write back. `part` is attn or ffn.

    `names` are those of the streams and the coefficients handed on (sections 3.4 and 3.14).
    """
    model, prefix = b.spec.model, f"layers.{b.layer}"
    layer, hyper = b.layer, model.hyper_connections
    b.locate("model.hyper_connections", layer)
    streams = hyper.hc_mult
    mixes = (2 + streams) * streams
    new_pre, post, comb = b.emit(
        ops.MhcCoefficients(hyper.hc_sinkhorn_iters, hyper.hc_eps, model.rms_norm_eps),
        x,
        b.weight(f"{prefix}.hc_{part}_fn", DType.F32, mixes, x.type.width),
        b.weight(f"{prefix}.hc_{part}_base", DType.F32, mixes),
        b.weight(f"{prefix}.hc_{part}_scale", DType.F32, 3),
        names=(names[1], f"{prefix}.{part}_post", f"{prefix}.{part}_comb"),
    )
    collapsed = b.one(ops.MhcCollapse(), x, pre, name=f"{prefix}.{part}_collapsed")
    b.locate("model.rms_norm_eps", layer)
    normed = b.rmsnorm(collapsed, f"{prefix}.{part}_norm", name=f"{prefix}.{part}_in")
    out = sublayer(normed)
    b.locate("model.hyper_connections", layer)
    return b.one(ops.MhcExpand(), out, x, post, comb, name=names[0]), new_pre


def fold(b: Builder, x: Value, pre: Value) -> Value:
    """The hidden rows handed to `sample` (section 3.13)."""
    b.locate("model.hyper_connections")
    return b.one(ops.MhcCollapse(), x, pre, name="hidden")
