"""What a request asks that an engine could never do: refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.grammar.library import check_installed
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.settings import Drawing

_SHOWN = 5


def check_prompt(plan: EnginePlan, prompt: Sequence[int]) -> None:
    """Refuse what could never run, with what was found and what the engine holds."""
    limits = plan.limits
    if not prompt:
        raise RequestError("E030", "the prompt is empty", help="give at least one token")
    check_tokens(plan, prompt, "token ids")
    if len(prompt) >= limits.max_context:
        raise RequestError(
            "E032",
            f"the prompt has {len(prompt)} tokens, this engine takes {limits.max_context - 1}",
            notes=[f"max_context {limits.max_context} includes at least one generated token"],
            help="shorten the prompt, or compile with a larger engine.max_context",
        )


def check_tokens(plan: EnginePlan, tokens: Sequence[int], what: str) -> None:
    """Refuse ids that name no token, all at once."""
    vocabulary = plan.limits.vocab_size
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        shown = ", ".join(str(token) for token in outside[:_SHOWN])
        more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
        raise RequestError(
            "E031",
            f"{what} outside the vocabulary: {shown}{more}",
            notes=[f"this engine knows 0 to {vocabulary - 1}"],
        )


def check_drawing(plan: EnginePlan, drawing: Drawing) -> None:
    """Refuse a blacklist of tokens that the engine has not."""
    check_tokens(plan, drawing.blacklist, "DEEPINFER_DECODE_TOKEN_BLACKLIST has token ids")


def check_params(plan: EnginePlan, params: SamplingParams, drawing: Drawing) -> None:
    """Refuse tokens that the engine has not, and what no installed package can do."""
    check_tokens(plan, params.stop_ids, "stop_token_ids")
    check_tokens(plan, params.golden_ids, "golden_token_ids")
    check_tokens(plan, params.biased_ids, "logit_bias has token ids")
    never = sorted(set(params.golden_ids).intersection(drawing.blacklist))
    if never:
        raise RequestError(
            "E033",
            "sampling parameters cannot be served",
            notes=[f"golden_token_ids holds {never}, which DEEPINFER_DECODE_TOKEN_BLACKLIST bans"],
        )
    if params.structure is not None:
        check_tokens(plan, params.structure.tokens, "so_args has token ids")
        check_installed()
