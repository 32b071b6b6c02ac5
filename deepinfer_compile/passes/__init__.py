"""Graph -> graph, one file per pass; `PIPELINE` is the order they run in."""

from __future__ import annotations

from deepinfer_compile.diagnostics import error
from deepinfer_compile.passes.base import Pass
from deepinfer_compile.passes.fuse_linear_pair import FUSE_LINEAR_PAIR
from deepinfer_compile.passes.fuse_mhc_enter import FUSE_MHC_ENTER
from deepinfer_compile.passes.fuse_mhc_expand import FUSE_MHC_EXPAND
from deepinfer_compile.passes.fuse_rmsnorm_quantize import FUSE_RMSNORM_QUANTIZE
from deepinfer_compile.passes.fuse_rope_attention import FUSE_ROPE_ATTENTION
from deepinfer_compile.passes.fuse_rope_quantize import FUSE_ROPE_QUANTIZE
from deepinfer_compile.passes.fuse_swiglu import FUSE_SWIGLU


def ordered(*passes: Pass) -> tuple[Pass, ...]:
    """`passes`, each of which must come after those it names."""
    names = [each.name for each in passes]
    assert len(set(names)) == len(names), f"a pass is listed twice: {names}"
    for i, each in enumerate(passes):
        late = set(each.after) - set(names[:i])
        assert not late, f"{each.name} runs before {', '.join(sorted(late))}"
    return passes


PIPELINE = ordered(
    FUSE_MHC_ENTER,
    FUSE_MHC_EXPAND,
    FUSE_ROPE_ATTENTION,
    FUSE_ROPE_QUANTIZE,
    FUSE_RMSNORM_QUANTIZE,
    FUSE_SWIGLU,
    FUSE_LINEAR_PAIR,
)


def find_pass(name: str, source: str) -> Pass:
    """The pass called `name`; E004 lists the passes there are. `source` is what named it."""
    for each in PIPELINE:
        if each.name == name:
            return each
    raise error(
        "E004",
        f"there is no pass `{name}`",
        where=source,
        notes=[f"passes, in order: {', '.join(each.name for each in PIPELINE)}"],
    )
