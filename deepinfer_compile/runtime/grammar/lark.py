"""EBNF rules in Lark, which the matcher reads.

    item ::= [a-z]+ "!"?                       start: r0
    root ::= "(" root ")" | item "," root  =>  r0: T1 r0 T2 | T3 r0 | ...
                                               T0: /[a-z]+/ (/!/)?     T3: T0 /,/     ...

Lark's terminals are regular expressions, matched as far as they go. Cutting a regular part into
several would let the first swallow what the second needs, so whatever is regular becomes one: rules
that never lead to themselves, and neighbours within a rule. What is left is said in
docs/structured.md: a terminal does not give back to a recursive rule behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_compile.runtime.grammar.ebnf import (
    ROOT,
    Choice,
    Class,
    Literal,
    Name,
    Node,
    Repeat,
    Sequence,
    names_in,
)


def lark_of(rules: Mapping[str, Node]) -> str:
    """The grammar of `rules`, which `read_ebnf` made."""
    writer = _Writer(rules)
    return f"start: {writer.node(Name(ROOT))}\n" + "".join(f"{line}\n" for line in writer.lines())


def _regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """Rules that lead to no recursion."""
    regular: set[str] = set()
    while more := {n for n, node in rules.items() if set(names_in(node)) <= regular} - regular:
        regular |= more
    return regular


class _Writer:
    """Rules keep their order as r0, r1, ... or T0, T1, ...; parts get terminals after those."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._regular = _regular_rules(rules)
        self._rules = rules
        self._numbers = {name: i for i, name in enumerate(rules)}
        self._terminals: dict[Node, int] = {}

    def lines(self) -> list[str]:
        """All rules, then the terminals that they needed."""
        lines = []
        for name, node in self._rules.items():
            body = self._expression(node) if name in self._regular else self._parts(node)
            lines.append(f"{self._symbol(name)}: {body}")
        parts = (f"T{i}: {self._expression(node)}" for node, i in self._terminals.items())
        return [*lines, *parts]

    def node(self, node: Node) -> str:
        """A node in a rule: a terminal if all of it is regular."""
        if isinstance(node, Name):
            return self._symbol(node.rule)
        if set(names_in(node)) <= self._regular:
            number = len(self._rules) + len(self._terminals)
            return f"T{self._terminals.setdefault(node, number)}"
        return f"({self._parts(node)})"

    def _parts(self, node: Node) -> str:
        match node:
            case Sequence(parts):
                return " ".join(self.node(part) for part in self._merged(parts))
            case Choice(parts):
                return " | ".join(self.node(part) for part in parts)
            case Repeat(part):
                return self.node(part) + _count(node)
        return self.node(node)

    def _merged(self, parts: tuple[Node, ...]) -> list[Node]:
        """Regular neighbours as one part."""
        merged: list[Node] = []
        run: list[Node] = []
        for part in parts:
            if set(names_in(part)) <= self._regular:
                run.append(part)
                continue
            merged += [*_joined(run), part]
            run = []
        return [*merged, *_joined(run)]

    def _expression(self, node: Node) -> str:
        """A regular node inside a terminal."""
        match node:
            case Literal(text):
                return f"/{''.join(map(_character, text))}/" if text else '""'
            case Class(ranges, negated):
                inner = "".join(f"{_character(a)}-{_character(b)}" for a, b in ranges)
                return f"/[{'^' * negated}{inner}]/" if inner else r"/[\x{0}-\x{10FFFF}]/"
            case Name(rule):
                return self._symbol(rule)
            case Sequence(parts):
                return " ".join(self._inner(part) for part in parts) or '""'
            case Choice(parts):
                return " | ".join(self._inner(part) for part in parts)
            case Repeat(part):
                return self._inner(part) + _count(node)

    def _inner(self, node: Node) -> str:
        text = self._expression(node)
        return f"({text})" if isinstance(node, Sequence | Choice | Repeat) else text

    def _symbol(self, rule: str) -> str:
        return f"{'T' if rule in self._regular else 'r'}{self._numbers[rule]}"


def _joined(run: list[Node]) -> list[Node]:
    return run if len(run) < 2 else [Sequence(tuple(run))]


def _count(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _character(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"
