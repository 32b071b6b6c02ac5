"""What a verb of `deepinfer-engine` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """`facts` are what --json prints."""

    facts: Mapping[str, object]
    status: int = 0
