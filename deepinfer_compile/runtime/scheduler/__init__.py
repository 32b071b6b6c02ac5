"""Which rows run next: a pure function of the state and what happened.

    plan(state, events)   -> state, StepPlan      what to run, and requests that end without running
    commit(state, step, sampled) -> state, events tokens, each request's last one with its reason

A step may be planned before the one before it is committed: planning takes it that every sampled
token continues its request. Where it turns out to end it, the later step's row of that request is
for nothing and its token is dropped. Steps run in the order of their plans, so what a request gives
back may be handed out again while its last row has yet to run.

No clock, no tensors, no randomness, and no tokens but those just sampled: a request is its length.
Values that every row of a step makes anew are named tuples: frozen dataclasses take four times as
long to make.

Requests have a rank, by priority, then by arrival. The best ranked waiting one is admitted when a
slot and the pages of its tokens are free; pages for what it generates are taken one at a time. When
none is left, the worst ranked running request is preempted: it waits again and all its tokens go
through the model once more, or it ends (`Preemption`). The best ranked request is never preempted
and the pool holds any one request, so a full pool cannot dead-lock. Prefill and decode steps
alternate while both have work, so neither starves. Every request ends with exactly one event that
has a reason.

Full pages of prompts are kept for requests that begin alike (`prefixes`). So that one can go on
after them, prefill stops at the end of a prompt's last full page, and where a prompt parts from
others, and the slot is saved there; but before the prompt's last token, which always has to run.
A request waits while another is at work on what both begin with.

    traffic.py    requests and what becomes of them      step.py       what is to run
    state.py      all that is known between steps        admission.py  who gets slots and pages
    pool.py       these given, and taken back            prefixes.py   pages that prompts share
    planning.py   `plan` and `commit`                    free_list.py  numbers that are free
    shards.py     mappings that are cheap to change
"""

from deepinfer_compile.runtime.scheduler.planning import commit, plan
from deepinfer_compile.runtime.scheduler.pool import load
from deepinfer_compile.runtime.scheduler.state import (
    Capacity,
    Load,
    Preemption,
    State,
    idle,
    initial,
)
from deepinfer_compile.runtime.scheduler.step import Copy, Grown, Kind, StepPlan, Work
from deepinfer_compile.runtime.scheduler.traffic import (
    Abort,
    Choice,
    Emitted,
    Failure,
    Finish,
    Request,
)

__all__ = [
    "Abort",
    "Capacity",
    "Choice",
    "Copy",
    "Emitted",
    "Failure",
    "Finish",
    "Grown",
    "Kind",
    "Load",
    "Preemption",
    "Request",
    "State",
    "StepPlan",
    "Work",
    "commit",
    "idle",
    "initial",
    "load",
    "plan",
]
