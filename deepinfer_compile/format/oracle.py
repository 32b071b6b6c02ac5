"""`oracle/`: what must agree on this machine before an engine is ready (docs/oracle.md).

oracle.json            a prompt, where to look while it runs, its log probabilities; fingerprints
values.safetensors     what must be there, `<run>/<buffer>`: floats in bf16, else as stored
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

ORACLE = "oracle/oracle.json"
VALUES = "oracle/values.safetensors"
_BLOCKS = 1024
_BLOCK_BYTES = 16 << 10


@dataclass(frozen=True)
class Point:
    """Once `step` steps of a phase have run, `buffers` hold what `part` of the model made."""

    part: str
    step: int
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Oracle:
    """`tokens`: the first `prefilled` in one prefill, then a decode step each; none: no prompt.

    `next_tokens` and `logprobs` are the greedy choice after each token. Errors are of a row, and of
    a log probability. `weights` has the fingerprint of every weight buffer that comes from a
    checkpoint, by the buffer's name.
    """

    tokens: tuple[int, ...]
    prefilled: int
    points: Mapping[str, tuple[Point, ...]]
    next_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    most_error: float
    most_logprob_error: float
    weights: Mapping[str, str]

    @property
    def runs(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """Phase, position and tokens of each run of a forward phase."""
        if not self.tokens:
            return ()
        rest = range(self.prefilled, len(self.tokens))
        return (
            ("prefill", 0, self.tokens[: self.prefilled]),
            *(("decode", at, self.tokens[at : at + 1]) for at in rest),
        )


class Part(Protocol):
    """A run of bytes: an array of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Part: ...
    def tobytes(self) -> bytes: ...


def fingerprint(parts: Sequence[Part]) -> str:
    """Of `parts` laid one after another: every byte of up to 16 MiB; of more, 1024 blocks of 16 KiB
    spread evenly, so no wrong run of a thousandth of the bytes is missed, and no more is read."""
    ends = list(accumulate(len(part) for part in parts))
    size = ends[-1]
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for begin, end in _sampled(size):
        while begin < end:
            i = bisect_right(ends, begin)
            first = ends[i] - len(parts[i])
            stop = min(end, ends[i])
            digest.update(parts[i][begin - first : stop - first].tobytes())
            begin = stop
    return digest.hexdigest()[:32]


def _sampled(size: int) -> Iterator[tuple[int, int]]:
    if size <= _BLOCKS * _BLOCK_BYTES:
        yield 0, size
        return
    for i in range(_BLOCKS):
        begin = i * (size - _BLOCK_BYTES) // (_BLOCKS - 1)
        yield begin, begin + _BLOCK_BYTES
