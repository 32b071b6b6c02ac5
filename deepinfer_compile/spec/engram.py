"""Engram's hash constants (model_v41.md section 3.12 b, c): bucket sizes, offsets, multipliers.

Each (layer, n-gram size, head) hashes into its own bucket, whose size is a prime no other bucket
has. The released walk restarts at `engram_vocab_size - 1` for each n-gram size and skips the
primes already taken; that deals out consecutive primes, which is how it is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice

import numpy as np

from deepinfer_compile.spec.schema import Engram, Model

Columns = tuple[tuple[int, ...], ...]  # [n-gram size - 2][head]

# With these bases Miller-Rabin is exact below 3.3e24, far past any table that fits a machine.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def is_prime(number: int) -> bool:
    """Deterministic Miller-Rabin."""
    if number < 2:
        return False
    for small in _WITNESSES:
        if number % small == 0:
            return number == small
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    odd = (number - 1) >> twos
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def _primes_from(start: int) -> Iterator[int]:
    number = start
    while True:
        if is_prime(number):
            yield number
        number += 1


def bucket_primes(model: Model) -> tuple[Columns, ...]:
    """Bucket sizes by [Engram layer][n-gram size - 2][head], layers as `engram_layer_ids` lists."""
    engram = model.engram
    primes = _primes_from(engram.engram_vocab_size)
    sizes = engram.engram_max_ngram_size - 1
    return tuple(
        tuple(tuple(islice(primes, engram.engram_n_heads)) for _ in range(sizes))
        for _ in engram.engram_layer_ids
    )


def rows(columns: Columns) -> int:
    """Rows that one layer's hash can address; a table may hold more."""
    return sum(sum(heads) for heads in columns)


def offsets(model: Model) -> tuple[Columns, ...]:
    """First table row of each bucket, in the shape of `bucket_primes`."""
    heads = model.engram.engram_n_heads
    found = []
    for columns in bucket_primes(model):
        sizes = [prime for row in columns for prime in row]
        starts = tuple(accumulate(sizes, initial=0))[:-1]
        found.append(tuple(starts[at : at + heads] for at in range(0, len(starts), heads)))
    return tuple(found)


def multipliers(model: Model) -> tuple[tuple[int, ...], ...]:
    """Odd factors by [Engram layer][n-gram position]; small enough that products fit int64."""
    engram = model.engram
    bound = (2**63 - 1) // engram.engram_compressed_vocab_size // 2
    return tuple(_multipliers(engram, layer, bound) for layer in engram.engram_layer_ids)


def _multipliers(engram: Engram, layer: int, bound: int) -> tuple[int, ...]:
    random = np.random.default_rng(10007 * layer)
    draws = random.integers(0, bound, size=engram.engram_max_ngram_size, dtype=np.int64)
    return tuple(int(draw) * 2 + 1 for draw in draws)
