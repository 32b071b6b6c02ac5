"""A page of tables and pictures in one HTML file: no script, nothing from elsewhere.

The page is well-formed XML too, so that anything can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }
h2 { margin-top: 2em; }
td, th { padding: 0.1em 0.8em 0.1em 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: 12px; }
summary { cursor: pointer; font-weight: bold; margin: 0.5em 0; }
.wide { overflow-x: auto; }
"""


class Markup(str):
    """Text that is HTML already; all other text is escaped."""


def page(title: str, sections: Iterable[tuple[str, Sequence[Markup]]]) -> str:
    """The whole file: each section under its own heading."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    for heading, body in sections:
        parts += [f"<h2>{escape(heading)}</h2>", *body]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), right: Sequence[int] = ()
) -> Markup:
    """Rows of cells; `right` are the columns of numbers."""
    lines = [_row("th", head, right)] if head else []
    lines += [_row("td", row, right) for row in rows]
    return Markup('<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>")


def _row(tag: str, cells: Sequence[str], right: Sequence[int]) -> str:
    shown = []
    for i, cell in enumerate(cells):
        opened = f'{tag} class="number"' if i in right else tag
        shown.append(f"<{opened}>{cell if isinstance(cell, Markup) else escape(cell)}</{tag}>")
    return f"<tr>{''.join(shown)}</tr>"


def code(name: str) -> Markup:
    """A name of the engine."""
    return Markup(f"<code>{escape(name)}</code>")


def paragraph(words: str) -> Markup:
    return Markup(f"<p>{escape(words)}</p>")


def folded(summary: str, body: Sequence[Markup]) -> Markup:
    """Shown once the reader asks for it."""
    inner = "\n".join(body)
    return Markup(f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>")
