"""Hashed n-gram tables and their gate."""

from __future__ import annotations

from deepinfer_compile.target import KernelRule

RULES: tuple[KernelRule, ...] = ()
