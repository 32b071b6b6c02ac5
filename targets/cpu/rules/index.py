"""Index scores of compressed entries."""

from __future__ import annotations

from deepinfer_compile.target import KernelRule

RULES: tuple[KernelRule, ...] = ()
