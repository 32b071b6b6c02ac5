"""Fingerprints: what they see, what they read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer_compile.format.oracle import fingerprint

MIB = 1 << 20


class Counting:
    """`size` bytes that are zero but in `wrong`; counts what is read."""

    def __init__(self, size, wrong=range(0)):
        self.size, self.wrong, self.read = size, wrong, 0

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        begin, end, _ = key.indices(self.size)
        self.read += end - begin
        hit = max(begin, self.wrong.start) < min(end, self.wrong.stop)
        return np.full(end - begin, hit, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 31, 4096, 16 * MIB])
def test_every_byte_of_up_to_16_mib_counts(size):
    content = np.zeros(size, dtype=np.uint8)
    before = fingerprint([content])
    for at in {0, size // 2, size - 1}:
        content[at] ^= 1
        assert fingerprint([content]) != before
        content[at] ^= 1
    assert fingerprint([content]) == before


def test_where_parts_end_does_not_matter_but_their_size_does():
    content = np.frombuffer(random.Random(0).randbytes(50_000), dtype=np.uint8)
    whole = fingerprint([content])
    assert fingerprint([content[:1], content[1:1], content[1:49_999], content[49_999:]]) == whole
    assert fingerprint([content, np.zeros(1, dtype=np.uint8)]) != whole


@pytest.mark.parametrize("size", [16 * MIB + 1, 300 * MIB + 7, 1 << 40])
def test_of_more_16_mib_are_read_and_no_long_wrong_run_is_missed(size):
    right = Counting(size)
    before = fingerprint([right])
    assert right.read == 16 * MIB
    draw = random.Random(size)
    length = size // 1000
    starts = [0, size - length, *(draw.randrange(size - length) for _ in range(6))]
    for start in starts:
        assert fingerprint([Counting(size, range(start, start + length))]) != before


def test_every_expert_of_a_stack_is_read():
    experts = [Counting(400_000) for _ in range(384)]
    fingerprint(experts)
    assert all(expert.read for expert in experts)
    assert sum(expert.read for expert in experts) == 16 * MIB
