"""The arena: values whose lives meet never share a byte, and bytes are reused otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_compile.plan.memory import ALIGNMENT, Life, align, place

LIVES = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 10)), max_size=40
)


def lives_of(drawn) -> list[Life]:
    return [Life(f"v{i}", size, first, first + span) for i, (size, first, span) in enumerate(drawn)]


@given(LIVES)
def test_lives_that_meet_never_overlap(drawn):
    lives = lives_of(drawn)
    offsets, total = place(lives)
    for i, a in enumerate(lives):
        assert offsets[a.name] % ALIGNMENT == 0
        assert offsets[a.name] + a.bytes <= total
        for b in lives[:i]:
            apart = (
                offsets[a.name] + a.bytes <= offsets[b.name]
                or offsets[b.name] + b.bytes <= offsets[a.name]
            )
            assert apart or not a.meets(b)


@given(LIVES)
def test_the_arena_never_exceeds_giving_every_value_its_own_bytes(drawn):
    lives = lives_of(drawn)
    _, total = place(lives)
    busiest = max(
        (sum(align(v.bytes) for v in lives if v.first <= step <= v.last) for step in range(42)),
        default=0,
    )
    assert busiest <= total <= sum(align(v.bytes) for v in lives)


def test_values_that_never_meet_share_their_bytes():
    chain = [Life(f"v{i}", 640, i, i + 1) for i in range(10)]
    _, total = place(chain)
    assert total == 2 * 640
