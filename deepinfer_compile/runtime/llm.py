"""`LLM`: DeepInfer's offline interface over a compiled engine.

from deepinfer_compile.runtime import LLM, SamplingParams
texts = LLM("nano.engine").generate(["Hello"], SamplingParams(temperature=0))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.runtime.compatibility import check_settings
from deepinfer_compile.runtime.errors import NotYet, RequestError
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.loader import start
from deepinfer_compile.runtime.loop import StepLoop, check_prompt
from deepinfer_compile.runtime.progress import Meter
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Choice, Emitted, Preemption
from deepinfer_compile.runtime.text_stream import TextStream
from deepinfer_compile.runtime.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # DeepInfer's floor


@dataclass(frozen=True)
class RequestOutput:
    """One generated token, under DeepInfer's names. `finish_reason` is empty while running.

    `top_token_ids` are the most likely tokens, `SamplingParams.top_logprobs` of them or the whole
    vocabulary, and `top_logprobs` theirs. Log probabilities are as `SamplingParams` says, at least
    -9999. A request that ends without another token has a last output that repeats `token_id`, as
    DeepInfer does; `num_output_tokens` is then what it was.
    """

    request_id: int
    prompt_len: int
    token_id: int
    finish_reason: str
    finished: bool
    token_logprobs: float
    num_output_tokens: int
    top_logprobs: tuple[float, ...] = ()
    top_token_ids: tuple[int, ...] = ()
    draft_tok: int = 1
    accept_tok: int = 1


@dataclass(frozen=True)
class Piece:
    """The characters that can be shown since the last token, of prompt number `index`."""

    index: int
    text: str
    token: RequestOutput


class LLM:
    """A loaded engine that answers prompts in batches. Not for several threads at once.

    `model` is an engine, folder or single file. Settings an engine fixes when it is compiled
    (max_model_len, expert_parallel_size, ...) are checked against it. `seed` is taken for
    DeepInfer's sake: a request's random numbers come from its own `seq_seed`. When the cache pages
    run out (`engine.cache_tokens`), the youngest request of the worst priority waits and goes on
    later, the same token by token; with `stop_preempted_request` it ends instead, with the reason
    `insufficient_system_resource`.
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
        **settings: object,
    ) -> None:
        del seed
        folder = open_folder(model)
        if tokenizer is not None and Path(tokenizer) != Path(model):
            settings["tokenizer"] = tokenizer  # the engine's own is the only one
        check_settings(folder.manifest, folder.plan, settings)
        self.engine = start(folder, checkpoint=checkpoint, threads=threads)
        self._decode_sequence = decode_sequence
        self._preemption = Preemption.STOP if stop_preempted_request else Preemption.RECOMPUTE
        self._tokenizer: Tokenizer | None = None

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; read on first use, since token ids need none."""
        if self._tokenizer is None:
            limits = self.engine.plan.limits
            self._tokenizer = Tokenizer(self.engine.files, limits.bos_token_id, limits.eos_token_id)
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: object = None,
    ) -> list[str] | list[list[RequestOutput]]:
        """Answer all prompts; results in request order, as texts or as lists of tokens.

        A text ends before its stop; the tokens are all that were generated.
        """
        if multi_modal_data is not None:
            raise NotYet("E021", "images are not yet served", help="give text prompts")
        batch = self._prompts(prompts, prompt_token_ids)
        params = _params(sampling_params, len(batch))
        for prompt in batch:
            check_prompt(self.engine.plan, prompt)
        texts = self._texts(params, wanted=self._decode_sequence)
        outputs: list[list[RequestOutput]] = [[] for _ in batch]
        with Meter(len(batch), use_tqdm) as meter:
            for place, output in self._run(batch, params, texts):
                outputs[place].append(output)
                meter.add(1, output.finished)
        return [text.take() for text in texts if text] if self._decode_sequence else outputs

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[Piece]:
        """Text as it is generated; leaving the loop early ends all requests."""
        batch = self._prompts(prompts, prompt_token_ids)
        params = _params(sampling_params, len(batch))
        texts = self._texts(params, wanted=True)
        for index, token in self._run(batch, params, texts):
            text = texts[index]
            assert text is not None
            yield Piece(index, text.take(), token)

    def close(self) -> None:
        """Stop the engine's threads."""
        self.engine.close()

    def _texts(self, params: Sequence[SamplingParams], *, wanted: bool) -> list[TextStream | None]:
        """A text for each request whose text is wanted, or watched for stop strings."""
        return [
            TextStream(self.get_tokenizer(), one.stops, one.stop_ids)
            if wanted or one.stops
            else None
            for one in params
        ]

    def _run(
        self,
        batch: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        texts: Sequence[TextStream | None],
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Tokens as they come, with the place of their prompt in the batch."""
        loop = StepLoop(self.engine.plan, self.engine.executor, self._preemption)
        places = {
            loop.submit(prompt, one, None if text is None else text.add): place
            for place, (prompt, one, text) in enumerate(zip(batch, params, texts, strict=True))
        }
        counts = [0] * len(batch)
        last = [prompt[-1] for prompt in batch]
        while loop.busy:
            for event in loop.step():
                place = places[event.id]
                if event.choice is not None:
                    counts[place] += 1
                    last[place] = event.choice.token
                text = texts[place]
                if text is not None and event.finish is not None:
                    text.close()
                yield place, _output(event, len(batch[place]), counts[place], last[place])

    def _prompts(
        self, prompts: str | Sequence[str] | None, ids: Sequence[Sequence[int]] | None
    ) -> list[list[int]]:
        """Token ids of every prompt; ids win over text, as in DeepInfer."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        if ids is not None:
            if texts is not None and len(texts) != len(ids):
                message = f"{len(texts)} prompts, but {len(ids)} lists of prompt_token_ids"
                raise RequestError("E024", message)
            return [[int(token) for token in one] for one in ids]
        if texts is None:
            raise RequestError("E024", "give prompts or prompt_token_ids")
        if any(not text for text in texts):
            raise RequestError("E030", "the prompt is empty", help="give at least one token")
        return [self.get_tokenizer().encode(text) for text in texts]


def _params(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None:
        return [SamplingParams() for _ in range(count)]
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise RequestError("E024", f"{count} prompts, but {len(given)} sampling_params")
    return list(given)


def _output(event: Emitted, prompt_len: int, count: int, last: int) -> RequestOutput:
    """`last` is the request's newest token: this event's, if it has one."""
    choice = event.choice or Choice(last, _LEAST_LOGPROB)
    return RequestOutput(
        request_id=event.id,
        prompt_len=prompt_len,
        token_id=choice.token,
        finish_reason="" if event.finish is None else event.finish.value,
        finished=event.finish is not None,
        token_logprobs=max(choice.logprob, _LEAST_LOGPROB),
        num_output_tokens=count,
        top_logprobs=tuple(max(logprob, _LEAST_LOGPROB) for _, logprob in choice.top),
        top_token_ids=tuple(token for token, _ in choice.top),
    )
