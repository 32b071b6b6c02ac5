"""`LLM`: DeepInfer's offline interface over a compiled engine.

from deepinfer_compile.runtime import LLM, SamplingParams
texts = LLM("nano.engine").generate(["Hello"], SamplingParams(temperature=0))
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_compile.format.manifest import TOKENIZER
from deepinfer_compile.runtime.batch import answers_of, params_of, whole
from deepinfer_compile.runtime.chat import ChatEncoder
from deepinfer_compile.runtime.compatibility import check_settings
from deepinfer_compile.runtime.errors import EngineError, NotYet, RequestError, Stopped
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.grammar.library import Library
from deepinfer_compile.runtime.grammar.pool import GrammarPool
from deepinfer_compile.runtime.interrupts import held_back
from deepinfer_compile.runtime.loader import Engine, start
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.messages import Prompts, read_prompts
from deepinfer_compile.runtime.progress import Meter
from deepinfer_compile.runtime.records import kernel_records
from deepinfer_compile.runtime.reply import Piece, Reply, RequestOutput
from deepinfer_compile.runtime.request_checks import check_drawing, check_params, check_prompt
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Emitted, Preemption
from deepinfer_compile.runtime.settings import Settings, read_settings
from deepinfer_compile.runtime.statistics import Statistics, step_flops
from deepinfer_compile.runtime.text_stream import TextStream
from deepinfer_compile.runtime.tokenizer import Tokenizer, tokenizer_text

if TYPE_CHECKING:
    from deepinfer_compile.runtime.profile_server import ProfileServer


class LLM:
    """A loaded engine that answers prompts in batches. Not for several threads at once. `with` or
    `close` ends its threads.

    `model` is an engine, folder or single file. Settings an engine fixes when it is compiled
    (max_model_len, expert_parallel_size, ...) are checked against it. `seed` is taken for
    DeepInfer's sake: a request's random numbers come from its own `seq_seed`. When the cache pages
    run out (`engine.cache_tokens`), the youngest request of the worst priority waits and goes on
    later, the same token by token; with `stop_preempted_request` it ends instead, with the reason
    `insufficient_system_resource`. Without `async_scheduling` (or by
    `DEEPINFER_ZERO_OVERHEAD_SCHEDULING=0`) the host plans no step while another runs: slower, the
    same tokens. Prompts that begin like earlier ones reuse their cache pages.
    With `disable_log_stats=False`, `statistics` are logged at level INFO every
    DEEPINFER_LOGGING_INTERVAL_STEP steps.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | None = None,
        *,
        checkpoint: str | Path | None = None,
        threads: int | None = None,
        seed: int = 0,
        decode_sequence: bool = True,
        stop_preempted_request: bool = False,
        async_scheduling: bool | None = None,
        disable_log_stats: bool = True,
        **settings: object,
    ) -> None:
        del seed
        folder = open_folder(model)
        if tokenizer is not None and Path(tokenizer) != Path(model):
            settings["tokenizer"] = tokenizer  # the engine's own is the only one
        environment = read_settings()
        self.drawing = environment.drawing
        if environment.batch_invariant:
            settings.setdefault("batch_invariant", True)
        self._asynchronous = (
            environment.async_scheduling if async_scheduling is None else async_scheduling
        )
        self._process = os.getpid()
        check_settings(folder.manifest, folder.plan, settings)
        check_drawing(folder.plan, self.drawing)
        flops = step_flops(folder.plan, kernel_records(folder.manifest, folder.plan))
        self.engine = start(folder, checkpoint=checkpoint, threads=threads)
        self.statistics = Statistics(
            flops,
            folder.manifest.machine.flops * self.engine.threads,
            interval=0 if disable_log_stats else environment.log_interval,
        )
        try:
            self._profile = _profile_server(self.engine, environment)
        except EngineError:
            self.engine.close()
            raise
        self._decode_sequence = decode_sequence
        self._preemption = Preemption.STOP if stop_preempted_request else Preemption.RECOMPUTE
        # Read now, as the folder may move; parsed on first use, as token ids need no tokenizer.
        missing = folder.files.fault(TOKENIZER)
        self._tokenizer_text = None if missing else tokenizer_text(folder.files)
        self._tokenizer: Tokenizer | None = None
        self._answering = False
        self._loop: StepLoop | None = None
        self._stopped: Stopped | None = None
        self._grammars: GrammarPool | None = None

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer. E463: it has none."""
        if self._tokenizer is None:
            limits, files = self.engine.plan.limits, self.engine.files
            ends = (limits.bos_token_id, limits.eos_token_id)
            self._tokenizer = Tokenizer(files, *ends, text=self._tokenizer_text)
        return self._tokenizer

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of texts, or of conversations as the model expects them in a chat."""
        read = read_prompts(prompts)
        if any(not prompt for prompt in read):
            raise RequestError("E030", "the prompt is empty", help="give at least one token")
        chats = [prompt for prompt in read if not isinstance(prompt, str)]
        if not chats:
            return [self.get_tokenizer().encode(text) for text in read if isinstance(text, str)]
        files = self.engine.files
        text = self._tokenizer_text or tokenizer_text(files)
        return ChatEncoder().encode(text, str(files.path / TOKENIZER), chats)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: object = None,
        priority: Sequence[int] | None = None,
    ) -> list[str] | list[list[RequestOutput]]:
        """Answer all prompts; results in request order, as texts or as lists of tokens.

        A prompt is a text, or a conversation (`runtime/messages.py`); the text of its answer begins
        inside the model's thoughts and goes on after `</think>`. One with `n` over 1 has that many
        results, one after another in its place.

        A text ends before its stop; the tokens are all that were generated. Of `priority`, one for
        each prompt, smaller numbers are served first. A request whose grammar fails ends alone;
        where texts are wanted, a warning says why.
        """
        if multi_modal_data is not None:
            raise NotYet("E021", "images are not yet served", help="give text prompts")
        batch = self._prompts(prompts, prompt_token_ids)
        params = params_of(sampling_params, len(batch))
        self._check(batch, params)
        batch, params, priority = answers_of(batch, params, priority)
        replies = self._replies(batch, params, text=self._decode_sequence)
        texts = ["" for _ in batch]
        outputs: list[list[RequestOutput]] = [[] for _ in batch]
        events = closing(self._run(batch, params, replies, priority))
        with Meter(len(batch), use_tqdm) as meter, events as running:
            for place, event in running:
                piece = replies[place].piece(place, event)
                texts[place] += piece.text
                outputs[place].append(piece.token)
                meter.add(1, piece.token.finished)
        if not self._decode_sequence:
            return outputs
        for place, one in enumerate(outputs):
            if one[-1].error:
                warnings.warn(f"answer {place}: {one[-1].error}", RuntimeWarning, stacklevel=2)
        return texts

    def stream(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """Text as it is generated; leaving the loop early ends all requests.

        One at a time: until it is taken whole or closed, others are refused (E037).
        """
        batch = self._prompts(prompts, prompt_token_ids)
        params = params_of(sampling_params, len(batch))
        self._check(batch, params)
        batch, params, priority = answers_of(batch, params, priority)
        replies = self._replies(batch, params, text=True)
        with closing(self._run(batch, params, replies, priority)) as running:
            for place, event in running:
                yield replies[place].piece(place, event)

    def hand_over(self) -> StepLoop:
        """The only step loop from now on, for who answers requests in this object's place: its own
        `generate` and `stream` are refused. E037 while one of them runs."""
        self._begin()
        return self._step_loop()

    def check_process(self) -> None:
        """E073: this is a fork of the process that loaded the engine. Its threads are not here, so
        whoever waits for one would wait for ever."""
        if self._forked:
            raise EngineError(
                "E073",
                "the engine was loaded before this process was forked: its threads are not here",
                help="load it after the fork, or start processes with the method `spawn`",
            )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's threads. In a fork there are none."""
        if self._forked:
            return
        with held_back():  # or a second call would free what the first one left running
            if self._profile is not None:
                self._profile.close()
            self._drop_loop()
            if self._grammars is not None:
                self._grammars.close()
            self.engine.close()

    def _check(self, batch: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """Refuse what cannot run before anything does: a step loop that it stops is given up, with
        all that prompts may share."""
        for prompt, one in zip(batch, params, strict=True):
            check_prompt(self.engine.plan, prompt)
            check_params(self.engine.plan, one, self.drawing)

    def _replies(
        self, batch: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, text: bool
    ) -> list[Reply]:
        """With a text for each request whose text is wanted, or watched for stop strings."""
        replies = []
        for prompt, one in zip(batch, params, strict=True):
            stream = None
            if text or one.stops:
                stream = TextStream(self.get_tokenizer(), one.stops, one.stop_ids)
            replies.append(Reply(len(prompt), prompt[-1], stream))
        return replies

    def _run(
        self,
        batch: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        replies: Sequence[Reply],
        ranks: Sequence[int],
    ) -> Generator[tuple[int, Emitted], None, None]:
        """Events as they come, with the place of their answer in the batch. E071: a step failed,
        and from now on everything is refused."""
        self._begin()
        try:
            yield from self._events(batch, params, replies, ranks)
        except EngineError:  # a request's, or of an engine that was closed
            raise
        except Exception as failure:
            self._stopped = Stopped(failure)
            raise self._stopped from failure
        finally:
            self._answering = False

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _begin(self) -> None:
        self.check_process()
        if self._stopped is not None:
            raise self._stopped
        if self._answering:  # its loop hands out the same slots and pages
            help = "take all of it or close() it first, or give its prompts and these together"
            raise RequestError("E037", "another stream of this LLM has not ended", help=help)
        self._answering = True

    def _step_loop(self) -> StepLoop:
        """One for all that is asked, as it keeps what prompts may share."""
        if self._loop is not None and self._loop.busy:  # interrupted even as it was given up
            self._drop_loop()
        if self._loop is None:
            self._loop = StepLoop(
                self.engine.plan,
                self.engine.executor,
                self._preemption,
                self._grammar_pool,
                self.drawing,
                asynchronous=self._asynchronous,
                statistics=self.statistics,
            )
        return self._loop

    def _drop_loop(self) -> None:
        if self._loop is not None:
            with held_back():  # the device may be at work for it
                self._loop.close()
                self._loop = None

    def _events(
        self,
        batch: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        replies: Sequence[Reply],
        ranks: Sequence[int],
    ) -> Iterator[tuple[int, Emitted]]:
        loop = self._step_loop()
        places: dict[int, int] = {}
        try:
            requests = zip(batch, params, replies, ranks, strict=True)
            for place, (prompt, one, reply, rank) in enumerate(requests):
                places[loop.submit(prompt, one, reply.watch, rank)] = place
            while loop.busy:
                with held_back():
                    events = loop.step()
                for event in events:
                    yield places[event.id], event
        except GeneratorExit:  # nobody wants the rest
            with held_back():
                for id in places:
                    loop.abort(id)
                while loop.busy:
                    loop.step()
            raise
        except BaseException:  # what is left of these requests serves nobody
            self._drop_loop()
            raise

    def _grammar_pool(self) -> GrammarPool:
        """Made for the first structured request, and kept with all that it compiled."""
        if self._grammars is None:
            library = Library(self.get_tokenizer(), self.engine.plan.limits.vocab_size)
            self._grammars = GrammarPool(library.compile)
        return self._grammars

    def _prompts(
        self, prompts: Prompts | None, ids: Sequence[Sequence[int]] | None
    ) -> list[list[int]]:
        """Token ids of every prompt; ids win over text, as in DeepInfer."""
        if ids is not None:
            count = len(ids) if prompts is None else len(read_prompts(prompts))
            if count != len(ids):
                message = f"{count} prompts, but {len(ids)} lists of prompt_token_ids"
                raise RequestError("E024", message)
            return [whole(one) for one in ids]
        if prompts is None:
            raise RequestError("E024", "give prompts or prompt_token_ids")
        return self.encode(prompts)


def _profile_server(engine: Engine, settings: Settings) -> ProfileServer | None:
    """None unless it was asked for. E245: its port is taken."""
    if settings.profile_port is None:
        return None
    from deepinfer_compile.runtime.profile_server import ProfileServer  # here: few ask for it

    name, folder, port = engine.manifest.name, settings.profile_dir, settings.profile_port
    return ProfileServer(engine.executor, name, folder, port)
