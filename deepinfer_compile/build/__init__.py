"""ModelSpec -> the semantic graph of a phase: `prefill`, `decode` or `sample` (section 3.14).

`prefill` and `decode` end in the folded hidden rows; `sample` takes the rows that sample from
there, so that R stays the one symbolic dim of every graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from deepinfer_compile.build.attention import Shared, attention
from deepinfer_compile.build.builder import Builder
from deepinfer_compile.build.engram import engram, hash_rows
from deepinfer_compile.build.moe import moe
from deepinfer_compile.build.streams import around, embed, fold
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Graph, Value
from deepinfer_compile.ir.types import DType, TensorType
from deepinfer_compile.spec.layers import layer_facts
from deepinfer_compile.spec.load import ModelSpec

PHASES = ("prefill", "decode", "sample")

_MOST_LISTED = 1000  # what DeepInfer's top_logprobs may ask for
_MOST_BIASED = 300  # what OpenAI's logit_bias may hold

# What `engine.probes` makes readable and replaceable, by the end of a value's name.
PROBES = (
    "streams",
    "pre",
    "attn_in",
    "attn_out",
    "ffn_in",
    "ffn_out",
    "selected",
    "candidates",
    "experts",
    "engram_rows",
    "hidden",
    "logits",
)


def build_graph(spec: ModelSpec, phase: str) -> Graph:
    """The graph of one phase of `PHASES`; the spec has passed its rules."""
    assert phase in PHASES, phase
    b = Builder(spec, phase)
    graph = _sample(b) if phase == "sample" else _forward(b)
    return replace(graph, probes=_probes(graph)) if spec.engine.probes else graph


def _probes(graph: Graph) -> tuple[Value, ...]:
    made = (value for node in graph.nodes for value in node.outputs)
    return tuple(value for value in made if value.name.rsplit(".", 1)[-1] in PROBES)


def _forward(b: Builder) -> Graph:
    rows = hash_rows(b)
    x, pre = embed(b)
    shared = Shared({}, {}, {}, {})
    for facts in layer_facts(b.spec.model):
        layer = facts.index
        if facts.engram:
            x = engram(b, layer, x, rows[layer])
        b.layer = layer
        between = (f"layers.{layer}.ffn_streams", f"layers.{layer}.ffn_pre")
        x, pre = around(b, x, pre, "attn", partial(attention, b, facts, shared), between)
        b.layer = layer
        following = (f"layers.{layer + 1}.streams", f"layers.{layer + 1}.pre")
        x, pre = around(b, x, pre, "ffn", partial(moe, b, layer), following)
    return b.graph((fold(b, x, pre),))


def _sample(b: Builder) -> Graph:
    model = b.spec.model
    b.locate("model.vocab_size")
    shape = (b.dims.hidden_rows, model.hidden_size)
    hidden = b.input("hidden", TensorType(b.activation, shape))
    x = b.one(ops.SelectRows(), hidden, b.row_array("sample_row"), name="sampled_hidden")
    normed = b.rmsnorm(x, "norm", name="final_normed")
    logits = b.bf16_linear(normed, "head", model.vocab_size, out=DType.F32, name="logits")
    biases = min(_MOST_BIASED, model.vocab_size)
    counts = TensorType(DType.I32, (b.dims.request_slots, model.vocab_size))
    results = b.emit(
        ops.Sample(listed=min(_MOST_LISTED, model.vocab_size)),
        logits,
        b.row_array("biased"),
        b.row_array("bias_token", width=biases),
        b.row_array("bias", DType.F32, width=biases),
        b.row_array("counted"),
        b.input("token_counts", counts),
        b.row_array("repetition", DType.F32),
        b.row_array("frequency", DType.F32),
        b.row_array("presence", DType.F32),
        b.row_array("masked"),
        b.row_array("allowed", width=ops.mask_words(model.vocab_size)),
        b.row_array("shortlist"),
        b.row_array("temperature", DType.F32),
        b.row_array("top_p", DType.F32),
        b.row_array("top_k"),
        b.row_array("min_p", DType.F32),
        b.row_array("top_count"),
        b.row_array("seed", DType.I64),
        b.row_array("sample_position", DType.I64),
        b.row_array("forced"),
        b.row_array("summed"),
        names=("token", "logprob", "top_token", "top_logprob", "smaller"),
    )
    return b.graph(results)
