r"""Schemas, expressions and grammars whose outputs are checked by others than those who made them.

Random weights write on until something ends them, so strings and lists have bounds.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

Json = object

NAME = {"type": "string", "maxLength": 6}
FLAG = {"type": "boolean"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _object(required: str = "", **properties: Json) -> dict[str, Json]:
    return {"type": "object", "properties": properties, "required": required.split()}


def _list(items: Json, least: int, most: int) -> dict[str, Json]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(pattern: str) -> dict[str, Json]:
    return {"type": "string", "pattern": pattern}


_CHAIN = _object("value", value=DIGIT, next={"$ref": "#"})
_TREE = {
    "$defs": {"tree": _object("leaf", leaf=FLAG, below=_list({"$ref": "#/$defs/tree"}, 0, 1))},
    "$ref": "#/$defs/tree",
}
_PERSON = _object("name age", name=NAME, age={"type": "integer", "minimum": 0, "maximum": 130})

SCHEMAS: tuple[Json, ...] = (
    # Single values.
    *({"type": name} for name in ("null", "boolean", "integer", "number")),
    {"type": ["integer", "null"]},
    {"type": ["boolean", "null", "integer"]},
    {"const": 42},
    {"const": 'a"b\\c\n'},
    {"const": {"a": [1, {"b": None}]}},
    {"const": [True, False, None]},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, None, "x", [1], {"k": 0}]},
    {"enum": ["straße", "日本", "🙂", "a/b", "\u2028"]},
    {"enum": [""]},
    {"title": "T", "description": "D", "default": 3, "examples": [1], "type": "integer"},
    # Bounds of numbers.
    {"type": "integer", "minimum": 3, "maximum": 3},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    {"type": "integer", "minimum": 999, "maximum": 1001},
    {"type": "integer", "minimum": -1000, "maximum": -998},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": -1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "minimum": 1e-3, "maximum": 1e3},
    # Strings: lengths, patterns, formats.
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 20},
    {"type": "string", "pattern": "^a{2,4}$", "maxLength": 3},
    _text(r"^[a-z]{1,5}$"),
    _text(r"^\d{3}-\d{4}$"),
    _text(r"^(foo|bar|ba[zß])$"),
    _text(r"^\w{1,3}\s\w{1,3}$"),
    _text(r"^[A-Z][a-z]{0,4}( [A-Z][a-z]{0,4}){0,2}$"),
    _text(r"^[^\\\"\x00-\x1f]{0,5}$"),
    _text(r"^#[0-9a-fA-F]{6}$"),
    _text(r"^[\u0430-\u044f]{2,4}$"),
    _text(r"^(\+|-)?[0-9]{1,3}(\.[0-9]{1,2})?$"),
    _text(r"^\.\*\[\]\/$"),
    _text(r"^$"),
    *({"type": "string", "format": name} for name in ("uuid", "ipv4", "ipv6", "email")),
    # Objects: required, optional, unicode keys, additional and pattern properties.
    _object(),
    _object("a", a=FLAG),
    _object("", a=FLAG, b=FLAG, c=FLAG),
    _object("c a", a=FLAG, b=NAME, c=DIGIT),
    _PERSON,
    _object("größe 名前", größe=DIGIT, 名前=NAME),
    {"type": "object", "properties": {"🙂": FLAG, "a b": FLAG, "": FLAG}, "required": ["🙂", ""]},
    {
        "type": "object",
        "properties": {'quo"te': DIGIT, "back\\slash": FLAG},
        "required": ['quo"te'],
    },
    {"type": "object", "properties": {"a~b/c": DIGIT}, "required": ["a~b/c"]},
    {"type": "object", "properties": {"$ref": DIGIT, "type": FLAG}, "required": ["$ref", "type"]},
    _object("a", a=FLAG) | {"additionalProperties": False},
    _object("a", a=FLAG) | {"additionalProperties": DIGIT, "maxProperties": 3},
    {"type": "object", "additionalProperties": FLAG, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": FLAG}}
    | {"maxProperties": 1},
    {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "additionalProperties": False}
    | {"maxProperties": 2},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": FLAG}, "maxProperties": 2}
    | {"additionalProperties": False},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": DIGIT},
    _object("a", a={}) | {"properties": {"a": {"type": "null"}}},
    # Lists.
    _list(DIGIT, 0, 0),
    _list(DIGIT, 3, 3),
    _list(FLAG, 1, 4),
    _list(NAME, 0, 2),
    _list(_list(DIGIT, 1, 2), 1, 2),
    _list({"enum": ["a", "b"]}, 2, 5),
    _list({"type": ["null", "boolean"]}, 0, 3),
    _list(_PERSON, 1, 2),
    {"type": "array", "prefixItems": [DIGIT, FLAG], "minItems": 2},
    {"type": "array", "prefixItems": [DIGIT, NAME], "items": FLAG, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}], "items": False},
    # Nesting.
    _object("a", a=_object("b", b=_object("c", c=_object("d", d=DIGIT)))),
    _object("rows", rows=_list(_object("cells", cells=_list(DIGIT, 1, 2)), 1, 2)),
    _object("ok data", ok=FLAG, data={"anyOf": [_PERSON, {"type": "null"}]}),
    _object(
        "m", m={"type": "object", "additionalProperties": _list(FLAG, 0, 1), "maxProperties": 1}
    ),
    _object("kind point", kind={"enum": ["p"]}, point=_object("x y", x=DIGIT, y=DIGIT)),
    # anyOf, oneOf, allOf.
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"anyOf": [NAME, _list(DIGIT, 0, 2), _object("a", a=FLAG)]},
    {"anyOf": [{"const": "a"}, {"const": "ab"}, {"const": "abc"}]},
    {"anyOf": [_object("a", a=FLAG), _object("b", b=DIGIT)]},
    {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"const": 3}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [_object("t", t={"const": "a"}, x=FLAG), _object("t", t={"const": "b"}, y=DIGIT)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    {"allOf": [_object("a", a=FLAG), _object("b", b=DIGIT)], "additionalProperties": False}
    | {"properties": {"a": {}, "b": {}}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"maxLength": 3}], "$defs": {"a": {"type": "string"}}},
    {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]},
    {"type": "object", "properties": {"a": FLAG}, "required": ["a"], "maxProperties": 2}
    | {"anyOf": [{"properties": {"b": FLAG}, "required": ["b"]}, {"required": ["a"]}]},
    # References.
    {"$defs": {"digit": DIGIT}, "$ref": "#/$defs/digit"},
    {"definitions": {"n": NAME}, **_object("x y", x={"$ref": "#/definitions/n"}, y=FLAG)},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": FLAG}}
    | {"$ref": "#/$defs/a"},
    {"$defs": {"ü/x~y": FLAG}, **_object("a", a={"$ref": "#/$defs/ü~1x~0y"})},
    _object("a b", a=DIGIT, b={"$ref": "#/properties/a"}),
    _CHAIN,
    _TREE,
    {"$defs": {"l": {"anyOf": [{"type": "null"}, _list({"$ref": "#/$defs/l"}, 1, 1)]}}}
    | {"$ref": "#/$defs/l"},
    {
        "$defs": {
            "even": _object("n", n=DIGIT, odd={"$ref": "#/$defs/odd"}),
            "odd": _object("s", s=FLAG, even={"$ref": "#/$defs/even"}),
        },
        "$ref": "#/$defs/even",
    },
    {
        "$defs": {
            "sum": {
                "anyOf": [
                    DIGIT,
                    _object("op l r", op={"enum": ["+", "-"]}, l={"$ref": "#/$defs/sum"}, r=DIGIT),
                ]
            }
        },
        "$ref": "#/$defs/sum",
    },
    # As tools and Pydantic write them.
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Weather",
        "description": "Call a tool",
        **_object(
            "name arguments",
            name={"const": "get_weather", "type": "string"},
            arguments=_object(
                "city",
                city=_text("^[A-Z][a-z]{2,8}$"),
                unit={"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}], "default": None},
            ),
        ),
    },
    {
        "$defs": {"Item": _object("sku qty", sku=_text("^[A-Z]{2}[0-9]{3}$"), qty=DIGIT)},
        **_object("items total", items=_list({"$ref": "#/$defs/Item"}, 1, 2), total=DIGIT),
    },
)

REGEXES: tuple[str, ...] = (
    "abc",
    "()",
    "a?b+c{2,3}",
    "(yes|no|maybe)",
    r"\d{4}-\d{2}-\d{2}",
    r"[A-Za-z_]\w{0,7}",
    r"[^a-zA-Z0-9]{1,4}",
    r"^\d{1,3}(,\d{3}){0,2}$",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"#[0-9a-f]{6}",
    r"[+-]?\d{1,5}(\.\d{1,3})?([eE][+-]?\d{1,2})?",
    r"(a|b){8}",
    r"(ab|a)(bc|c)",
    r"x*y",
    r"(x+x+)+y",
    r".{1,6}",
    r"a.c",
    r"[ÄÖÜäöüß]{1,5}",
    r"[а-я]{2,6}",
    r"(日|本|語){1,4}",
    r"(🙂|🙃)+",
    r"\s{1,3}\S{1,3}",
    r"\\\"\/\.",
    r"(?i:select) [a-z]{1,5}",
    r"(?:https?)://[a-z]{2,8}\.(com|org)(/[a-z]{0,4}){0,2}",
    r"[\w.]{1,8}@[\w]{1,8}\.[a-z]{2,3}",
    r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?",
    r"<(b|i)>[^<>]{0,9}</(b|i)>",
    r"\[(\d(,\d){0,4})?\]",
    r"a{0}b{1}c{2,}",
    r"[\]\-\^]{1,3}",
    r"\x41\x{42}\u0043",
)


def _balanced(text: str) -> bool:
    while "()" in text or "[]" in text:
        text = text.replace("()", "").replace("[]", "")
    return text == ""


def _arithmetic(text: str) -> bool:
    allowed = (ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult)
    tree = ast.parse(re.sub(r"\b0+(?=\d)", "", text), mode="eval")  # Python has no 007
    return " " not in text and all(isinstance(node, allowed) for node in ast.walk(tree))


def _json(text: str) -> bool:
    return isinstance(json.loads(text), dict | list)


def _copies(text: str) -> bool:
    half = (len(text) - 1) // 2
    return text[half] == "|" and text[:half] == text[half + 1 :][::-1]


def _letters(text: str) -> bool:
    count = len(text) // 2
    return count > 0 and text == "a" * count + "b" * count


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _nested_word(text: str) -> bool:
    inner = text.lstrip("(")
    depth = len(text) - len(inner)
    return re.fullmatch(r"[a-z]{1,3}ing[!?]*" + r"\)" * depth, inner) is not None


# Each with one who decides, without the grammar, whether a text is in it.
GRAMMARS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ('root ::= "hello" | "bye"', _matches("hello|bye")),
    ('root ::= "a" root "b" | "ab"', _letters),
    (
        """
        # Arithmetic, alternatives on lines of their own.
        root   ::= term
                 | root [+\\-] term
        term   ::= factor | term "*" factor
        factor ::= [0-9]{1,3} | "(" root ")"
        """,
        _arithmetic,
    ),
    ('root ::= ("(" root ")" | "[" root "]")?', _balanced),
    (
        r"""root ::= object | array
        value ::= object | array | string | number | "true" | "false" | "null"
        object ::= "{" (pair ("," pair){0,1})? "}"
        pair ::= string ":" value
        array ::= "[" (value ("," value){0,1})? "]"
        string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt]){0,5} "\""
        number ::= "-"? ("0" | [1-9] [0-9]{0,4}) ("." [0-9]{1,3})?""",
        _json,
    ),
    ('root ::= [xyz] "|" | pair\npair ::= "|"', _matches(r"[xyz]?\|")),
    ('root ::= "|" | "0" root "0" | "1" root "1"', _copies),
    (
        r'root ::= [\u00e4-\u00fc]{2} "\U0001F642" [^\x00-\x7f] "\x41\t\"\\"',
        _matches('[ä-ü]{2}🙂[^\x00-\x7f]A\t"\\\\'),
    ),
    (
        'root ::= stmt{1,3}\nstmt ::= name " = " name ";\\n"\nname ::= [a-z] [a-z0-9_]{0,3}',
        _matches(r"([a-z][a-z0-9_]{0,3} = [a-z][a-z0-9_]{0,3};\n){1,3}"),
    ),
    # The class alone would swallow the letters that must follow it.
    ('root ::= "(" root ")" | [a-z]{1,3} "ing" ("!" | "?")*', _nested_word),
    (
        'root ::= greet-ing ", " who.name\ngreet-ing ::= "Hi" | "Yo"\nwho.name ::= [A-Z] [a-z]{2,}',
        _matches("(Hi|Yo), [A-Z][a-z]{2,}"),
    ),
    ('root ::= line+\nline ::= "- " [^\\n]{1,8} "\\n"', _matches(r"(- [^\n]{1,8}\n)+")),
)
