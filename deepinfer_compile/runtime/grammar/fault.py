"""Where in a JSON schema a fault is: the library says only what is wrong.

A part that is faulty alone, in the same words as the whole, holds the fault; so does one of its own
parts, and so on, until none does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from deepinfer_compile.runtime.grammar.schema import Json, children, quoted, rebuilt, reference

_INSIDE = "/$defs/whole"  # where the schema is put, so that a part of it can be looked at alone


def fault_place(schema: Json, fault: Callable[[Json], str]) -> str:
    """The JSON pointer of the innermost part of `schema` that is faulty in the whole's words;
    `fault` tells what is wrong with a schema, and "" of a good one."""
    message = fault(schema)
    parts = dict(_parts("#", schema))
    at, seen = "#", {"#"}

    def faulty(place: str) -> bool:
        target = quoted(f"#{_INSIDE}{place[1:]}")
        alone: Json = {"$defs": {"whole": _moved(schema, seen)}, "$ref": target}
        return fault(alone).replace(_INSIDE, "") == message

    while True:
        target = reference(parts[at])
        inside = [at + path for path in children(parts[at]) if "/$defs/" not in path]
        inside += [target] if target is not None else []
        wrong = (p for p in inside if p in parts and p not in seen and faulty(p))
        if (inner := next(wrong, None)) is None:
            return at
        seen.add(inner)
        at = inner


def _parts(at: str, schema: Json) -> Iterator[tuple[str, Json]]:
    yield at, schema
    for path, child in children(schema).items():
        yield from _parts(at + path, child)


def _moved(schema: Json, open: Container[str]) -> Json:
    """A schema as it is `_INSIDE` another. References to `open` places are left out: their fault
    is known, and a part is not to blame for it."""
    moved = rebuilt(schema, lambda _, child: _moved(child, open))
    if isinstance(moved, dict) and (target := reference(schema)) is not None:
        if target in open:
            del moved["$ref"]
        else:
            moved["$ref"] = quoted(f"#{_INSIDE}{target[1:]}")
    return moved
