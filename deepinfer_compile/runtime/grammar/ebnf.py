r"""EBNF as xgrammar and llama.cpp write it, read into rules.

    root ::= "(" list? ")"          # a comment
    list ::= item ("," item)*
           | [^\x00-\x1f()] {2,5}

A rule ends where the next one begins, so an alternative may start a line. Literals and classes take
the escapes \n \r \t \" \' \\ \] \[ \- \^ \/ \xHH \uHHHH and \UHHHHHHHH.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepinfer_compile.runtime.grammar.errors import GrammarError

ROOT = "root"

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<rule>[A-Za-z_][\w.-]*)(?=(?:\s|\#[^\n]*)*::=)
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<literal>"(?:[^"\\\n]|\\.)*")
      | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<sign>::=|[()|*+?])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in "\"'\\][-^/"}
_LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True)
class Literal:
    """These characters."""

    text: str


@dataclass(frozen=True)
class Class:
    """One character within `ranges`, both ends included, or with `negated` one outside."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool


@dataclass(frozen=True)
class Name:
    """Another rule."""

    rule: str


@dataclass(frozen=True)
class Sequence:
    """One part after another; none is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of the alternatives."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`part`, `least` to `most` times; None is no bound."""

    part: Node
    least: int
    most: int | None


Node = Literal | Class | Name | Sequence | Choice | Repeat
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def names_in(node: Node) -> Iterator[str]:
    """The rules a node refers to."""
    match node:
        case Name(rule):
            yield rule
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from names_in(part)
        case Repeat(part):
            yield from names_in(part)


def read_ebnf(text: str) -> dict[str, Node]:
    """The rules by name, in order. GrammarError: what is wrong, with line and column."""
    reader = _Reader(text)
    rules = reader.rules()
    if ROOT not in rules:
        raise GrammarError(f"no rule `{ROOT}`: it is where a text begins")
    missing = sorted({name for node in rules.values() for name in names_in(node)} - rules.keys())
    if missing:
        raise GrammarError("; ".join(f"{reader.place(name)}: no rule `{name}`" for name in missing))
    endless = [name for name in rules if name not in _ending(rules)]
    if endless:
        listed = ", ".join(f"`{name}`" for name in endless)
        raise GrammarError(f"no text ever ends in {listed}: every alternative leads back to it")
    return rules


def _ending(rules: Mapping[str, Node]) -> set[str]:
    """Rules that have a finite text."""
    ending: set[str] = set()

    def ends(node: Node) -> bool:
        match node:
            case Name(rule):
                return rule in ending
            case Sequence(parts):
                return all(ends(part) for part in parts)
            case Choice(parts):
                return any(ends(part) for part in parts)
            case Repeat(part, least):
                return least == 0 or ends(part)
        return True

    while more := {name for name, node in rules.items() if ends(node)} - ending:
        ending |= more
    return ending


class _Reader:
    """Recursive descent over the tokens; `_at` is the one that is looked at."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind != "end":
            name = self._value
            if self._kind != "rule":
                raise self._error("expected `name ::=`")
            if name in rules:
                raise self._error(f"rule `{name}` is defined twice")
            self._at += 2  # ::= follows, as the name is a rule's
            rules[name] = self._choice()
        return rules

    def place(self, name: str) -> str:
        """Where a name is first used."""
        uses = (at for kind, value, at in self._tokens if (kind, value) == ("name", name))
        return self._line_and_column(next(uses))

    def _choice(self) -> Node:
        parts = [self._sequence()]
        while self._value == "|":
            self._at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._kind in ("name", "literal", "class") or self._value == "(":
            parts.append(self._repeated(self._part()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node:
        kind, value = self._kind, self._value
        if kind == "name":
            self._at += 1
            return Name(value)
        if kind == "literal":
            text = "".join(character for character, _ in self._characters(value[1:-1]))
            self._at += 1
            return Literal(text)
        if kind == "class":
            return self._class(value[1:-1])
        opened = self._at
        self._at += 1
        inner = self._choice()
        if self._value != ")":
            where = self._line_and_column(self._tokens[opened][2])
            raise self._error(f"expected `)` for the `(` of {where}")
        self._at += 1
        return inner

    def _repeated(self, part: Node) -> Node:
        while self._value in _COUNTS or self._kind == "count":
            if self._kind == "count":
                first, comma, last = self._value[1:-1].partition(",")
                least = int(first)
                most = int(last) if last.strip() else None if comma else least
            else:
                least, most = _COUNTS[self._value]
            if most is not None and most < least:
                raise self._error(f"at most {most} is less than at least {least}")
            part = Repeat(part, least, most)
            self._at += 1
        return part

    def _class(self, inner: str) -> Class:
        negated = inner.startswith("^")
        characters = list(self._characters(inner[negated:]))
        ranges: list[tuple[str, str]] = []
        i = 0
        while i < len(characters):
            first = last = characters[i][0]
            if i + 2 < len(characters) and characters[i + 1] == ("-", False):
                last = characters[i + 2][0]
                i += 2
            if last < first:
                raise self._error(f"the range from {first!r} to {last!r} is empty")
            ranges.append((first, last))
            i += 1
        if not ranges and not negated:
            raise self._error("this class has no characters")
        self._at += 1
        return Class(tuple(ranges), negated)

    def _characters(self, inner: str) -> Iterator[tuple[str, bool]]:
        """Characters, and whether each was escaped."""
        at = 0
        while at < len(inner):
            if inner[at] != "\\":
                yield inner[at], False
                at += 1
                continue
            escape = _ESCAPE.match(inner, at)
            digits = escape and (escape[1] or escape[2] or escape[3])
            if digits and int(digits, 16) <= _LAST_CHARACTER:
                character = chr(int(digits, 16))
            elif escape and escape[4] in _LETTERS:
                character = _LETTERS[escape[4]]
            else:
                raise self._error(f"`{inner[at : at + 2]}` begins no escape that is known")
            if "\ud800" <= character <= "\udfff":
                raise self._error(f"U+{ord(character):04X} is half a character, not one")
            assert escape is not None
            yield character, True
            at = escape.end()

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _value(self) -> str:
        return self._tokens[self._at][1]

    def _split(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                shown = self._text[at : at + 10].split("\n")[0]
                raise GrammarError(f"{self._line_and_column(at)}: no EBNF begins with `{shown}`")
            kind = found.lastgroup
            assert kind is not None
            if kind != "space":
                yield kind, found[0], at
            at = found.end()
        yield "end", "", at

    def _error(self, message: str) -> GrammarError:
        _, value, at = self._tokens[self._at]
        found = f"`{value}`" if value else "the end"
        return GrammarError(f"{self._line_and_column(at)}: {message}, found {found}")

    def _line_and_column(self, at: int) -> str:
        before = self._text[:at]
        return f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}"
