"""Rows to records of codes and scales."""

from __future__ import annotations

from deepinfer_compile.target import KernelRule

RULES: tuple[KernelRule, ...] = ()
