"""What two engines may differ by. Every number is from section 9 of the model's specification,
"Comparing implementations honestly"; it calls them recommendations, to be calibrated.

Layers get identical inputs, so limits of single operators apply. Scores are no probes: whether a
pick that differs was within the margin cannot be told, so selections get what that section measured
of right implementations in free runs, overlap at least 0.997 and 99.5 % of routed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """`most`: of a relative L2, a part of ids or rows, or a divergence in nats."""

    most: float
    source: str


_ROUNDING = Limit(2**-7, "9.1 norm, expand and collapse: 1 bf16 ulp")
_OVERLAP = Limit(3e-3, "9.2 mean overlap 0.997")
# In the order in which a layer computes them.
LIMITS: Mapping[str, Limit] = {
    "engram_rows": Limit(0.0, "9.1 Engram rows exact"),
    "attn_in": _ROUNDING,
    "candidates": _OVERLAP,
    "selected": _OVERLAP,
    "attn_out": Limit(4e-3, "9.1 sparse attention, relative L2"),
    "ffn_in": _ROUNDING,
    "pre": _ROUNDING,
    "experts": Limit(5e-3, "9.2 routed rows 99.5 % exact"),
    "ffn_out": Limit(5e-3, "9.1 expert output, relative L2"),
    "streams": _ROUNDING,
    "hidden": _ROUNDING,
    "logits": Limit(1e-3, "9.1 logits, relative"),
}
DIVERGENCE = Limit(5e-4, "9.2 mean KL of logits in a free run")
