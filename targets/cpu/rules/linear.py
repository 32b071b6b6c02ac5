"""Matrix products: dense, grouped and per expert."""

from __future__ import annotations

from deepinfer_compile.target import KernelRule

RULES: tuple[KernelRule, ...] = ()
