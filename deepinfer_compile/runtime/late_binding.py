"""What a step is told when it is planned, and what only later.

A step is planned and its rows are filled while the step before it runs, so that the device need not
wait for the host. At that time the tokens which that step samples are not known.

what               when a step is planned            late
token ids          all but the newest tokens         on the device, before the forward pass:
                                                     token_id[row] = token[sample row]
positions          known: a request goes on by one   -
                   token
slots, pages       known: what a request gives back  -
                   may be handed out at once, as
                   steps run in order
a request's end    known if by length; if by a       its row was for nothing, its token is
                   token not                         dropped
masks, operands    -                                 by the host, when the step before is
of sampling                                          committed, before this one samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.request_rows import Span
from deepinfer_compile.runtime.scheduler import Work

_UNKNOWN = 0  # any token


@dataclass(frozen=True)
class Rows:
    """The spans of a step. Rows `late` take their tokens from the step before, where `sources` are
    the rows that sample them."""

    spans: tuple[Span, ...]
    late: tuple[int, ...]
    sources: tuple[int, ...]


def rows_of(
    work: Sequence[Work], tokens: Mapping[int, Sequence[int]], drawn: Mapping[int, int]
) -> Rows:
    """`tokens` of each request as far as they are known; `drawn`: the sample row of each request in
    the step before. One that is not there, as it got no token, ends: what its row says is
    nothing to anybody."""
    spans: list[Span] = []
    late: list[int] = []
    sources: list[int] = []
    end = 0
    for one in work:
        known = tokens[one.id][one.position : one.position + one.count]
        end += one.count
        if len(known) < one.count:
            assert len(known) == one.count - 1, "at most the newest token is unknown"
            known = [*known, _UNKNOWN]
            if one.id in drawn:
                late.append(end - 1)
                sources.append(drawn[one.id])
        spans.append(Span(one.slot, one.position, tuple(known)))
    return Rows(tuple(spans), tuple(late), tuple(sources))


def bind(executor: Executor, rows: Rows) -> None:
    """On the device: the step before has sampled, this one's rows are filled."""
    if rows.late:
        late, sources = np.asarray(rows.late), np.asarray(rows.sources)
        executor.rows["token_id"][late] = executor.sampled_tokens[sources]
