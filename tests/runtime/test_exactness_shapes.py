"""Chunking changes no bit at the lengths where top-k and candidates bind: micro and kshape.

kshape has the real model's heads, window and top-k: 3,000 tokens are 1,500 entries of ratio 2, so
512 of them are selected, and 3,000 of ratio 1, past the 1,024 that fit its candidate blocks.
"""

from __future__ import annotations

import pytest

from deepinfer_compile.runtime.loader import load_engine
from tests.engines import example_engine
from tests.runtime.drive import Solo, chunks_of, poison

# One worker: the reference of 3,000 tokens takes minutes, and once is enough.
pytestmark = pytest.mark.xdist_group("exactness_shapes")

NEW = 6
LATE = 149  # tokens after a state was saved; odd: a group of two is pending there


@pytest.fixture(scope="module", params=[("v41_micro", 330), ("v41_kshape", 3000)])
def case(request):
    name, length = request.param
    engine = load_engine(example_engine(name), threads=2)
    yield name, engine.executor, [(i * i * 31 + i // 7) % 480 + 3 for i in range(length)]
    engine.close()


def run(executor, prompt, chunks, decoded):
    """Prefill in `chunks`, the last `decoded` tokens through decode; then generate."""
    poison(executor)
    solo = Solo(executor, list(prompt)).feed(chunks).feed([1] * decoded, "decode")
    assert solo.done == len(prompt)
    saved = solo.save()
    tokens = solo.generate(NEW, 1 if decoded else chunks[-1])
    return tokens, solo.logprobs, saved, solo.save()


@pytest.fixture(scope="module")
def reference(case):
    """The prompt in the largest chunks, and the state that was saved in passing."""
    _, executor, prompt = case
    poison(executor)
    chunks = chunks_of(len(prompt) - LATE, executor.phase("prefill").max_rows)
    solo = Solo(executor, list(prompt)).feed(chunks)
    passing = solo.save()
    solo.feed([LATE])
    saved = solo.save()
    tokens = solo.generate(NEW, LATE)
    return (tokens, solo.logprobs, saved, solo.save()), passing


@pytest.fixture(scope="module")
def one_shot(reference):
    return reference[0]


def test_odd_chunks_and_single_tokens_give_the_same_bits(case, one_shot):
    _, executor, prompt = case
    ring = max(s.length for s in executor.plan.states if s.name.endswith("window"))
    chunks = [1, ring - 1, ring + 1, 2 * ring + 1, 3]
    decoded = 25
    rest = len(prompt) - sum(chunks) - decoded
    assert rest > 0
    chunks += chunks_of(rest, executor.phase("prefill").max_rows - 3)
    assert run(executor, prompt, chunks, decoded) == one_shot


def test_a_request_resumes_elsewhere_from_saved_state(case, reference):
    _, executor, prompt = case
    one_shot, saved = reference
    poison(executor)
    count = len(executor.rows["page_table"][0])
    pages = tuple(range(executor.plan.limits.pages - 1, 0, -1))[:count]
    resumed = Solo(executor, list(prompt)).moved(saved, 2, pages)
    resumed.known = list(prompt)
    resumed.feed([LATE])
    tokens = resumed.generate(NEW, LATE)
    assert (tokens, resumed.logprobs, resumed.save()) == (one_shot[0], one_shot[1], one_shot[3])


@pytest.mark.slow
def test_token_by_token_gives_the_same_bits(case, one_shot):
    _, executor, prompt = case
    assert run(executor, prompt, [1], len(prompt) - 1) == one_shot
