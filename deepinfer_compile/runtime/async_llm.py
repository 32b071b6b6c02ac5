"""`AsyncLLM`: an engine that answers requests as they come, for asyncio.

    llm = AsyncLLM(LLM("nano.engine"))
    async for piece in llm.generate("Hello", SamplingParams(max_tokens=40)):
        print(piece.text, end="", flush=True)
    await llm.close()

Requests of any number of tasks run together. Leaving the loop early, or cancelling its task, ends
the request; so does `abort`, after which the loop gets its last piece. To end on SIGTERM with every
request answered: `loop.add_signal_handler(SIGTERM, lambda: create_task(llm.close(drain=True)))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import cast

from deepinfer_compile.runtime.batch import whole
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.messages import Conversation
from deepinfer_compile.runtime.metrics import Metrics
from deepinfer_compile.runtime.reply import Piece, Reply
from deepinfer_compile.runtime.request_checks import check_params, check_prompt
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.statistics import Stats
from deepinfer_compile.runtime.text_stream import TextStream
from deepinfer_compile.runtime.worker import Ticket, Worker


class AsyncLLM:
    """A loaded engine with a thread that runs its steps. It takes `llm` over, which refuses to
    answer from now on (E037); `close` closes it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._metrics = Metrics()
        self._worker = Worker(llm.hand_over(), self._metrics)
        self._named: dict[str, list[Ticket]] = {}

    async def generate(
        self,
        prompt: str | Conversation | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Piece]:
        """The answer, piece by piece; of `n` answers side by side, where `Piece.index` says which.
        `prompt`: text, a conversation or token ids. `request_id` is for `abort`.

        RequestError before anything runs, EngineError E073 in a fork; E071 when the engine fails
        meanwhile.
        """
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        events = asyncio.get_running_loop()
        tickets = self._tickets(
            prompt,
            sampling_params or SamplingParams(),
            priority,
            lambda piece: events.call_soon_threadsafe(pieces.put_nowait, piece),
        )
        if request_id is not None and self._named.setdefault(request_id, tickets) is not tickets:
            message = f"request_id {request_id!r} is that of a running request"
            raise RequestError("E036", message, help="give every request an id of its own")
        try:
            for ticket in tickets:
                self._worker.submit(ticket)
            running = len(tickets)
            while running:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                running -= piece.token.finished
                yield piece
        finally:
            for ticket in tickets:
                self._worker.abort(ticket)
            if request_id is not None:
                del self._named[request_id]

    def abort(self, request_id: str) -> bool:
        """End a request: its last piece has the reason `abort`, that of each of its answers. False
        when there is none of this id: it may just have ended."""
        tickets = self._named.get(request_id)
        for ticket in tickets or ():
            self._worker.abort(ticket)
        return tickets is not None

    def metrics(self) -> str:
        """What the engine has done and is doing, as text for Prometheus."""
        labels = {"model_name": self._llm.engine.manifest.name}
        return self._metrics.text(self._worker.load, self._llm.statistics.flops, labels)

    def stats(self) -> Stats:
        """What the last steps did."""
        return self._llm.statistics.stats(self._worker.load)

    async def close(self, *, drain: bool = False) -> None:
        """Take no more requests; end those that run, or with `drain` wait for them."""
        await asyncio.to_thread(self._worker.close, drain=drain)
        self._llm.close()

    def _tickets(
        self,
        prompt: str | Conversation | Sequence[int],
        params: SamplingParams,
        priority: int,
        deliver: Callable[[Piece | Exception], object],
    ) -> list[Ticket]:
        self._llm.check_process()
        plan, tokenizer = self._llm.engine.plan, self._llm.get_tokenizer()
        tokens = self._tokens(prompt)
        check_prompt(plan, tokens)
        check_params(plan, params, self._llm.drawing)
        tickets = []
        for index, one in enumerate(params.answers):
            text = TextStream(tokenizer, one.stops, one.stop_ids)
            reply = Reply(len(tokens), tokens[-1], text)
            tickets.append(Ticket(tokens, one, priority, reply, deliver, index))
        return tickets

    def _tokens(self, prompt: str | Conversation | Sequence[int]) -> list[int]:
        """One prompt's token ids; E024, E031 or E039 when it is of no kind or of several."""
        if isinstance(prompt, str) or any(isinstance(item, Mapping) for item in prompt):
            (tokens,) = self._llm.encode(cast("str | Conversation", prompt))
            return tokens
        return whole(cast("Sequence[int]", prompt))
