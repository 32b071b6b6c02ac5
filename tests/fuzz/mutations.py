"""Damage, drawn from a seed: bytes that flip, lines that move, numbers that become absurd."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable

Json = object

_NUMBERS = (0, 1, -1, 2, 3, 7, 8, 31, 32, 33, 64, 1000, 2**31, 2**32, 2**63, 2**64, 10**30)
_NEST = "5,000 lists in one another"
_ABSURD: tuple[Json, ...] = (
    _NEST,
    None,
    True,
    "",
    "x",
    "../../etc/passwd",
    "\0",
    "é" * 300,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"": None},
    [0] * 50,
)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four edits: a flipped bit, a new byte, a span cut, doubled or blanked, a short end."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        first = rng.randrange(len(out) + 1)
        last = min(len(out), first + rng.choice((1, 2, 8, 60, 500)))
        kind = rng.randrange(6)
        if kind == 0 and first < len(out):
            out[first] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[first:first] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        elif kind == 2:
            del out[first:last]
        elif kind == 3:
            out[first:first] = out[first:last]
        elif kind == 4:
            out[first:last] = bytes(last - first)
        elif rng.random() < 0.3:
            del out[first:]
    return bytes(out)


def mutate_lines(rng: random.Random, text: str) -> str:
    """One or two edits of whole lines: dropped, doubled, swapped, indented otherwise, joined."""
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(1, 2)):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0:
            lines[i] = ""
        elif kind == 1:
            lines.insert(j, lines[i])
        elif kind == 2:
            lines[i], lines[j] = lines[j], lines[i]
        elif kind == 3:
            lines[i] = " " * rng.randint(0, 6) + lines[i].lstrip(" ")
        else:
            lines[i] = lines[i].rstrip("\n")
    return "".join(lines)


def mutate_json(rng: random.Random, value: Json) -> Json:
    """A copy with one to three values replaced, removed, added or exchanged."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, 3)):
        places = _places(root)
        holder, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind <= 2:
            holder[key] = _other(rng, holder[key])
        elif kind == 3 and holder is not root:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice(("", "extra", "__class__", str(key) + "s"))] = holder[key]
        else:
            elsewhere, other = rng.choice(places)
            holder[key] = copy.deepcopy(elsewhere[other])
    return root[0]


def _other(rng: random.Random, value: Json) -> Json:
    if isinstance(value, int | float) and rng.random() < 0.7:
        near: tuple[Callable[[], Json], ...] = (
            lambda: rng.choice(_NUMBERS),
            lambda: -value,
            lambda: value * 2,
            lambda: value + rng.choice((-1, 1)),
        )
        return rng.choice(near)()
    if isinstance(value, str) and value and rng.random() < 0.5:
        return mutate_bytes(rng, value.encode()).decode("utf-8", "replace")
    return rng.choice(_ABSURD)


def json_text(value: Json) -> str:
    """JSON of a mutated value; deep nests are written here, where no encoder recurses."""
    return json.dumps(value).replace(json.dumps(_NEST), "[" * 5000 + "]" * 5000)


def _places(root: list[Json]) -> list[tuple[dict | list, str | int]]:
    """Every (container, key) below `root`, without recursion: mutations may be deep."""
    found: list[tuple[dict | list, str | int]] = []
    waiting: list[dict | list] = [root]
    while waiting:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], dict | list) and len(found) < 100_000:
                waiting.append(holder[key])
    return found


def mutate_file(rng: random.Random, name: str, data: bytes) -> bytes:
    """A JSON file by its bytes or its values; of a safetensors file, the header only."""
    if name.endswith(".safetensors"):
        return _mutate_header(rng, data)
    if name.endswith(".json") and rng.random() < 0.6:
        return json_text(mutate_json(rng, json.loads(data))).encode()
    return mutate_bytes(rng, data)


def _mutate_header(rng: random.Random, data: bytes) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end]
    if rng.random() < 0.6:
        header = json_text(mutate_json(rng, json.loads(header))).encode()
    else:
        header = mutate_bytes(rng, header)
    length = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 2**40, 2**63, 2**64 - 1))
    content = data[end:] if rng.random() < 0.9 else data[end : end + rng.randrange(len(data))]
    return length.to_bytes(8, "little") + header + content
