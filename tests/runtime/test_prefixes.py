"""Prompts that begin like earlier ones: the same bits, and nothing of anybody else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer_compile.runtime import LLM, SamplingParams
from deepinfer_compile.runtime.scheduler.prefixes import page_names

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, top_logprobs=256)


@pytest.fixture(scope="module")
def llm(nano_engine):
    with_ids = LLM(nano_engine, threads=2, decode_sequence=False)
    yield with_ids
    with_ids.close()


def prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def asked(llm, tokens):
    """What the engine says: tokens, log probabilities of the whole vocabulary to the bit; and how
    many tokens it reused."""
    (outputs,) = llm.generate(prompt_token_ids=[tokens], sampling_params=GREEDY, use_tqdm=False)
    said = [(o.token_id, o.token_logprobs, o.top_token_ids, o.top_logprobs) for o in outputs]
    (reused,) = {o.num_cached_tokens for o in outputs}
    return said, reused


def cold(llm, tokens):
    """From an engine that keeps nothing, in memory full of rubbish."""
    llm._drop_loop()
    rng = np.random.default_rng(len(tokens))
    for state in llm.engine.plan.states:
        area = llm.engine.executor.view(state.buffer).view(np.uint8)
        area[...] = rng.integers(0, 256, area.shape, dtype=np.uint8)
    said, reused = asked(llm, tokens)
    assert reused == 0
    return said


@pytest.mark.parametrize("length", [65, 128, 129, 200, 400])
def test_a_prompt_asked_again_gives_the_same_bits(llm, length):
    tokens = prompt(length, length)
    first = cold(llm, tokens)
    again, reused = asked(llm, tokens)
    assert (again, reused) == (first, (length - 1) // 64 * 64)


def test_the_smallest_prefix_is_one_page(llm):
    llm._drop_loop()
    shared = prompt(1, 64)
    asked(llm, [*shared, 5])
    assert asked(llm, [*shared, 6])[1] == 64
    assert asked(llm, [*shared[:63], 6, 7])[1] == 0


@pytest.mark.parametrize("common", [63, 64, 65, 100, 127, 128, 150])
def test_a_prompt_that_parts_in_the_middle_of_a_page_sees_nothing_of_the_other(llm, common):
    """Whatever the other's pages and window hold: the bits are those of a cold engine."""
    one, other = prompt(2, 190), prompt(3, 190)
    other[:common] = one[:common]
    alone = [cold(llm, tokens) for tokens in (one, other)]
    llm._drop_loop()
    for round in range(3):
        found = [asked(llm, tokens) for tokens in (one, other)]
        assert [said for said, _ in found] == alone
        whole = 128 if common >= 128 else 0
        assert [reused for _, reused in found] == ([128, 128] if round else [0, whole])


def test_many_that_share_a_beginning_run_together(llm):
    shared = prompt(4, 150)
    batch = [[*shared, *prompt(10 + i, 3 * i + 1)] for i in range(8)]
    alone = [cold(llm, tokens) for tokens in batch]
    llm._drop_loop()
    for round in range(2):
        outputs = llm.generate(prompt_token_ids=batch, sampling_params=GREEDY, use_tqdm=False)
        for i, (one, said) in enumerate(zip(outputs, alone, strict=True)):
            found = [(o.token_id, o.token_logprobs, o.top_token_ids, o.top_logprobs) for o in one]
            assert found == said
            assert one[0].num_cached_tokens == (128 if round or i else 0)


def test_a_name_stands_for_all_the_tokens_before():
    a, b = [1] * 8 + [2] * 8, [3] * 8 + [2] * 8
    assert len(page_names(a[:15], 8)) == 1
    assert page_names(a, 8)[:1] == page_names(a[:9], 8)
    assert len({*page_names(a, 8), *page_names(b, 8)}) == 4
