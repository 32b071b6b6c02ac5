"""Pictures of an engine as inline SVG.

Lengths are rounded to a hundredth, so the same engine has the same picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from deepinfer_compile.runtime.launches import Life
from deepinfer_compile.runtime.markup import Markup

_WIDTH, _HEIGHT = 1000, 300
_BAR = 160
# Drawn into each shape: a picture keeps its colours where a style sheet does not reach.
_COLOURS = {"weights": "#4878a8", "state": "#d08030", "io": "#60a060", "arena": "#a070b0"}
_FRAME = "frame"


def stacked_bar(sizes: Mapping[str, int]) -> Markup:
    """Shares of a whole, one after another; names are those of memory classes."""
    whole, start, parts = max(1, sum(sizes.values())), 0.0, []
    for name, size in sizes.items():
        width = _WIDTH * size / whole
        shape = _rectangle(name, start, 0, width, 30, f"{name}: {size:,} bytes, {size / whole:.1%}")
        parts.append(shape)
        start += width
    return _svg(_WIDTH, 30, parts)


def bar(share: float, kind: str = "weights") -> Markup:
    """A number as a length, 1 being the longest."""
    return _svg(_BAR, 10, [_rectangle(kind, 0, 0, _BAR * share, 10, f"{share:.1%}")])


def liveness(lives: Sequence[Life], steps: int, size: int) -> Markup:
    """Bytes of the arena downwards, steps to the right: a value is a rectangle, as long as it
    lives and as high as it is large. None may overlap."""
    across, down = _WIDTH / max(1, steps), _HEIGHT / max(1, size)
    parts = [_rectangle(_FRAME, 0, 0, _WIDTH, _HEIGHT, f"{steps} steps, {size:,} bytes")]
    for life in lives:
        buffer, count = life.buffer, life.last - life.first + 1
        span = f"steps {life.first} to {life.last}, {buffer.bytes:,} bytes at {buffer.offset:,}"
        parts.append(
            _rectangle(
                "arena",
                life.first * across,
                buffer.offset * down,
                count * across,
                buffer.bytes * down,
                f"{buffer.name}: {span}",
            )
        )
    return _svg(_WIDTH, _HEIGHT, parts)


def _rectangle(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    fill = "none" if kind == _FRAME else _COLOURS[kind]
    line = "gray" if kind == _FRAME else "white"
    paint = f'fill="{fill}" stroke="{line}" stroke-width="0.5"'
    return f'<rect class="{kind}" {place} {paint}><title>{escape(title)}</title></rect>'


def _svg(width: int, height: int, parts: Sequence[str]) -> Markup:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return Markup(f"<svg {size}>\n" + "\n".join(parts) + "\n</svg>")
