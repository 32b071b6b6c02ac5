"""Sparse attention with a sink, decode and prefill."""

from __future__ import annotations

from deepinfer_compile.target import KernelRule

RULES: tuple[KernelRule, ...] = ()
