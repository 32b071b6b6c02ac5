"""`so_args`, as DeepInfer's users write it.

{"schema_type": "json" | "regex" | "ebnf", "schema": str,
 "trigger_token_ids": [int, ...], "bound_token_id": int}      the last two may be left out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_MOST_TOKENS = 2**31 - 1
_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


class SchemaType(StrEnum):
    """The language of a schema."""

    JSON = "json"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True)
class Structure:
    """Generation is free until the tokens of `trigger`, then follows `schema`. Token `bound` ends
    the free part: what is missing of the trigger is forced."""

    type: SchemaType
    schema: str
    trigger: tuple[int, ...] = ()
    bound: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids that were named."""
        return self.trigger if self.bound is None else (*self.trigger, self.bound)


def structure_of(args: Mapping[str, object]) -> Structure:
    """`args`, in which `problems` found none."""
    trigger, bound = args.get("trigger_token_ids"), args.get("bound_token_id")
    assert isinstance(trigger, Sequence | None)
    assert isinstance(bound, int | None)
    return Structure(
        SchemaType(str(args["schema_type"])), str(args["schema"]), tuple(trigger or ()), bound
    )


def problems(args: object) -> list[str]:
    """Everything that keeps `args` from being served, each with what was found."""
    if not isinstance(args, Mapping):
        return [f"so_args must be a mapping, found {args!r}"]
    kind, schema = args.get("schema_type"), args.get("schema")
    trigger, bound = args.get("trigger_token_ids"), args.get("bound_token_id")
    types = ", ".join(type.value for type in SchemaType)
    checks = (
        ("schema_type", kind, kind in tuple(SchemaType), f"one of {types}"),
        ("schema", schema, isinstance(schema, str) and schema != "", "a text that is not empty"),
        ("trigger_token_ids", trigger, trigger is None or _tokens(trigger), "token ids"),
        ("bound_token_id", bound, bound is None or _token(bound), "a token id"),
    )
    found = [
        f"so_args: {name} must be {accepts}, found {value!r}"
        for name, value, holds, accepts in checks
        if not holds
    ]
    if bound is not None and not trigger:
        found.append("so_args: bound_token_id needs trigger_token_ids, which it would force")
    known = ", ".join(_KEYS)
    return found + [
        f"so_args: {key!r} is no key of it: {known}" for key in args if key not in _KEYS
    ]


def _tokens(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(_token(entry) for entry in value)
    )


def _token(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_TOKENS
