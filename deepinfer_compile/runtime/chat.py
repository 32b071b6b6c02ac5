"""Messages as the model expects them in a chat: DeepSeek's own encoder does all of it.

The encoder is an optional package, `deepseek-recipe`, imported when somebody chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer_compile.runtime.errors import EngineError, RequestError
from deepinfer_compile.runtime.messages import Role, Turn
from deepinfer_compile.runtime.tokenizer import check_text

if TYPE_CHECKING:
    from deepseek_recipe import Message


class ChatEncoder:
    """Conversations to token ids: what the model reads before it answers, in thinking mode."""

    def __init__(self) -> None:
        try:
            import deepseek_recipe
        except ImportError:
            raise RequestError(
                "E035",
                "chat prompts need the package deepseek-recipe",
                help="pip install 'deepinfer-compile[serve]'",
            ) from None
        self._recipe = deepseek_recipe

    def encode(
        self, tokenizer: str, where: str, conversations: Sequence[Sequence[Turn]]
    ) -> list[list[int]]:
        """The prompts after which the model answers, BOS included. `tokenizer`: an engine's
        tokenizer.json, which lies at `where`. E463: it has no tokens of a chat."""
        recipe = self._recipe
        for turn in (turn for turns in conversations for turn in turns):
            check_text(turn.content + (turn.reasoning or ""))
        try:
            inner = recipe.Tokenizer.from_str(tokenizer)
            encoding = recipe.DeepseekV41Encoding().with_tokenizer(inner)
            return [
                encoding.encode(recipe.Conversation([self._message(turn) for turn in turns]))
                for turns in conversations
            ]
        except RuntimeError as failure:  # no tokenizer, or one without the tokens of a chat
            raise EngineError(
                "E463",
                f"the engine's tokenizer cannot write chat prompts: {failure}",
                where=where,
                help="give texts (no --chat), or compile a checkpoint with DeepSeek's tokenizer",
            ) from None

    def _message(self, turn: Turn) -> Message:
        match turn.role:
            case Role.SYSTEM:
                return self._recipe.SystemMessage(turn.content)
            case Role.USER:
                return self._recipe.UserMessage(turn.content)
            case Role.ASSISTANT:
                return self._recipe.AssistantMessage(turn.content, turn.reasoning)
