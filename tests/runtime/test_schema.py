"""JSON schemas before they are compiled: what is closed, and where a fault is."""

from __future__ import annotations

import json

import pytest

from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.fault import fault_place
from deepinfer_compile.runtime.grammar.schema import closed, read_schema

A = {"properties": {"a": {}}}
B = {"properties": {"b": {}}}
SHUT = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expect"),
    [
        (True, True),
        ({"type": "object"}, {"type": "object"}),
        (A, A | SHUT),
        (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
        ({"prefixItems": [A]}, {"prefixItems": [A | SHUT], "items": False}),
        ({"items": [A, B]}, {"items": [A | SHUT, B | SHUT]}),
        ({"additionalProperties": A}, {"additionalProperties": A | SHUT}),
        ({"properties": {"x": A}}, {"properties": {"x": A | SHUT}} | SHUT),
        ({"anyOf": [A, B]}, {"anyOf": [A | SHUT, B | SHUT]}),
        # Merged: neither may close what the other adds to.
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        (A | {"anyOf": [B, {}]}, A | {"anyOf": [B, {}]}),
        ({"allOf": [{"properties": {"x": A}}]}, {"allOf": [{"properties": {"x": A | SHUT}}]}),
        (
            {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A, "b": B}},
            {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A, "b": B | SHUT}},
        ),
        (
            B | {"$ref": "#/$defs/a~1", "$defs": {"a/": A}},
            B | {"$ref": "#/$defs/a~1", "$defs": {"a/": A}},
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": A | SHUT}}),
        (
            {"$ref": "#/$defs/é", "$defs": {"é": A}},
            {"$ref": "#/$defs/%C3%A9"} | {"$defs": {"é": A | SHUT}},
        ),
        # Not schemas, whatever they look like.
        ({"const": A, "enum": [A], "default": A}, {"const": A, "enum": [A], "default": A}),
        ({"properties": {"properties": A}}, {"properties": {"properties": A | SHUT}} | SHUT),
    ],
)
def test_objects_and_tuples_are_closed_unless_they_are_merged(schema, expect):
    before = json.dumps(schema)
    assert closed(schema) == expect
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "object",\n "x" 1}', "the schema is no JSON: line 2, column 6: Expecting ':'"),
        ("[1]", "a schema is an object, true or false, found [1]"),
        ('{"type": "null", "a": {"b": 1, "b": 2}}', "the schema has twice in one object: b"),
        ('{"maximum": Infinity}', "the schema is no JSON: Infinity is no number of it"),
        ("[" * 100_000, "the schema is nested too deeply to be read"),
    ],
)
def test_what_is_no_schema_is_told(text, message):
    with pytest.raises(GrammarError, match="so_args: ") as caught:
        read_schema(text)
    assert str(caught.value).removeprefix("so_args: ").startswith(message)


def resolved(schema, document):
    while isinstance(schema, dict) and (target := schema.get("$ref")):
        schema = document
        for key in target.removeprefix("#").split("/")[1:]:
            schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema


def has_bad(schema):
    """A library that only says that somewhere, in what is reached, there is something bad."""

    def look(part, seen):
        part = resolved(part, schema)
        if id(part) in seen or not isinstance(part, dict | list):
            return False
        seen.add(id(part))
        inner = part.values() if isinstance(part, dict) else part
        used = [v for k, v in part.items() if k != "$defs"] if isinstance(part, dict) else inner
        return (isinstance(part, dict) and part.get("bad")) or any(look(p, seen) for p in used)

    return "bad" if look(schema, set()) else ""


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"bad": True}, "#"),
        ({"properties": {"a": {}, "b": {"items": {"bad": True}}}}, "#/properties/b/items"),
        ({"anyOf": [{}, {"properties": {"x": {"bad": True}}}]}, "#/anyOf/1/properties/x"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"bad": True}}}}, "#/$defs/a/items"),
        (
            {
                "$defs": {
                    "unused": {"bad": True},
                    "t": {"anyOf": [{"items": {"$ref": "#/$defs/t"}}, {"not": {"bad": 1}}]},
                },
                "properties": {"x": {"$ref": "#/$defs/t"}},
            },
            "#/$defs/t/anyOf/1/not",
        ),
    ],
)
def test_the_innermost_faulty_part_is_found(schema, place):
    assert fault_place(schema, has_bad) == place
