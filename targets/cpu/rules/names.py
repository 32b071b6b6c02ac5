"""Attribute values as parts of kernel names, which hold letters, digits and underscores only."""

from __future__ import annotations

import hashlib


def number(value: float) -> str:
    """`value` spelled out, distinct for distinct values: 160000.0 is 160000, 1e-06 is 1em06."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value)).replace("-", "m")
    return repr(float(value)).replace(".", "p").replace("-", "m").replace("+", "")


def digest(*values: object) -> str:
    """Eight hex digits that stand for a table too long to spell."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
