"""What a request may generate next: free text, the rest of its trigger, then its grammar.

    trigger (7, 8), bound 5      tokens   3  7  5  8 |  {  "  a ...  }  EOS | 9 ...
                                 may be   any ...  8 |  the grammar         | any, with ignore_eos

A part of the trigger that overlaps its beginning counts (Knuth, Morris, Pratt). Without a trigger
the grammar begins at once. After it only the end token may follow, and after that one, if the
request goes on, anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.grammar.asked import Structure
from deepinfer_compile.runtime.grammar.library import Matcher

Words = NDArray[np.int32]


@dataclass(frozen=True)
class _Free:
    """Before the grammar: tokens of the trigger that were seen, and whether the rest is forced."""

    seen: int
    forced: bool


class Constraint:
    """One request. Tokens are taken as they are generated, and may be taken back."""

    def __init__(self, structure: Structure, matcher: Matcher, eos_token_id: int) -> None:
        self._structure = structure
        self._matcher = matcher
        self._eos = eos_token_id
        self._failure = _failure_table(structure.trigger)
        self._before = [_Free(0, False)]  # one more than tokens taken before the grammar
        self._inside = 0  # tokens the matcher has taken
        self._after = 0  # the end token and what follows it

    @property
    def finished(self) -> bool:
        """The grammar has ended, and the end token was generated."""
        return self._after > 0

    def fill(self, words: Words) -> bool:
        """Whether the next token has a mask, which is then written to `words` i32[ceil(V/32)].

        GrammarError: nothing may follow."""
        if self._triggered:
            if self.finished:
                return False
            self._matcher.fill(words)
            return True
        state = self._before[-1]
        if state.forced:
            token = self._structure.trigger[state.seen]
            words[:] = 0
            words.view(np.uint32)[token // 32] = 1 << token % 32
        return state.forced

    def fill_ahead(self, drafts: Sequence[int], words: Words) -> list[bool]:
        """Masks of the next token and of those after each draft, in rows of `words`, up to the
        first draft that is forbidden; whether each has a mask. Nothing is taken."""
        masked = [self.fill(words[0])]
        taken = 0
        try:
            for draft in drafts:
                if not self.take(draft):
                    break
                taken += 1
                masked.append(self.fill(words[taken]))
        finally:
            self.back(taken)
        return masked

    def take(self, token: int) -> bool:
        """Go on by a token; false, and nothing changes, if it is forbidden here."""
        if self.finished:
            self._after += 1
        elif not self._triggered:
            state = self._before[-1]
            if state.forced and token != self._structure.trigger[state.seen]:
                return False
            self._before.append(self._next(state, token))
        elif token == self._eos:
            if not self._matcher.may_end():
                return False
            self._after = 1
        elif self._matcher.take(token):
            self._inside += 1
        else:
            return False
        return True

    def back(self, count: int) -> None:
        """Forget the last `count` tokens."""
        after = min(count, self._after)
        inside = min(count - after, self._inside)
        before = count - after - inside
        assert before < len(self._before), f"{before} tokens before the grammar"
        self._matcher.back(inside)
        self._after -= after
        self._inside -= inside
        del self._before[len(self._before) - before :]

    @property
    def _triggered(self) -> bool:
        return self._before[-1].seen == len(self._structure.trigger)

    def _next(self, state: _Free, token: int) -> _Free:
        trigger, seen = self._structure.trigger, state.seen
        while seen and trigger[seen] != token:
            seen = self._failure[seen - 1]
        seen += trigger[seen] == token
        return _Free(seen, state.forced or token == self._structure.bound)


def _failure_table(trigger: Sequence[int]) -> list[int]:
    """For each beginning of the trigger, the longest shorter one that it ends with."""
    table = [0] * len(trigger)
    length = 0
    for i in range(1, len(trigger)):
        while length and trigger[i] != trigger[length]:
            length = table[length - 1]
        length += trigger[i] == trigger[length]
        table[i] = length
    return table
