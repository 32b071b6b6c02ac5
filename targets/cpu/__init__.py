"""The CPU target: generated C++ for x86-64, every operator of the model."""

from __future__ import annotations

from pathlib import Path

import deepinfer_templates
from deepinfer_targets.cpu.isas import AVX512, X86_64_V3
from deepinfer_targets.cpu.rules import (
    attention,
    engram,
    gated,
    index,
    linear,
    mhc,
    moe,
    norms,
    pooling,
    quantize,
    rope,
    sample,
    selection,
    state,
    streams,
)
from deepinfer_targets.cpu.toolchain import Gxx

from deepinfer_compile.target import Machine, Target

TARGET = Target(
    name="cpu",
    machine=Machine(name="x86-64 core", bandwidth=20e9, flops=50e9),
    rules=(
        *attention.RULES,
        *engram.RULES,
        *gated.RULES,
        *index.RULES,
        *linear.RULES,
        *mhc.RULES,
        *moe.RULES,
        *norms.RULES,
        *pooling.RULES,
        *quantize.RULES,
        *rope.RULES,
        *sample.RULES,
        *selection.RULES,
        *state.RULES,
        *streams.RULES,
    ),
    toolchain=Gxx(),
    driver="cpu",
    language="cpu",
    isas=(X86_64_V3, AVX512),
    support={
        "attend.h": "cpu/common/attend.h.jinja",
        "index_scores.h": "cpu/common/index_scores.h.jinja",
        "decode.h": "cpu/common/decode.h.jinja",
        "engine.h": "cpu/common/engine.h.jinja",
        "exp.h": "cpu/common/exp.h.jinja",
        "experts.h": "cpu/common/experts.h.jinja",
        "logits.h": "cpu/common/logits.h.jinja",
        "mhc.h": "cpu/common/mhc.h.jinja",
        "norm.h": "cpu/common/norm.h.jinja",
        "numerics.h": "cpu/common/numerics.h.jinja",
        "pooling.h": "cpu/common/pooling.h.jinja",
        "random.h": "cpu/common/random.h.jinja",
        "records.h": "cpu/common/records.h.jinja",
        "rope.h": "cpu/common/rope.h.jinja",
        "select.h": "cpu/common/select.h.jinja",
        "swiglu.h": "cpu/common/swiglu.h.jinja",
        "table_rows.h": "cpu/common/table_rows.h.jinja",
        "tile.h": "cpu/common/tile.h.jinja",
        "token_row.h": "cpu/common/token_row.h.jinja",
        "types.h": "cpu/common/types.h.jinja",
        "wide.h": "cpu/common/wide.h.jinja",
    },
    templates=Path(deepinfer_templates.__path__[0]),
)
