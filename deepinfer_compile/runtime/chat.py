"""Messages as the model expects them in a chat: DeepSeek's own encoder does all of it.

The encoder is an optional package, `deepseek-recipe`, imported when somebody chats.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_compile.format.manifest import TOKENIZER
from deepinfer_compile.runtime.errors import EngineError, RequestError
from deepinfer_compile.runtime.files import EngineFiles
from deepinfer_compile.runtime.tokenizer import check_text, tokenizer_text


class ChatEncoder:
    """User messages to token ids: each is a conversation of one turn, in thinking mode."""

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

    def encode(self, engine: EngineFiles, messages: Sequence[str]) -> list[list[int]]:
        """The prompts after which the model answers, BOS included, by the engine's tokenizer."""
        recipe = self._recipe
        for message in messages:
            check_text(message)
        try:
            tokenizer = recipe.Tokenizer.from_str(tokenizer_text(engine))
            encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
            return [
                encoding.encode(recipe.Conversation([recipe.UserMessage(message)]))
                for message in messages
            ]
        except RuntimeError as failure:  # no tokenizer, or one without the tokens of a chat
            raise EngineError(
                "E463",
                f"the engine's tokenizer cannot write chat prompts: {failure}",
                where=str(engine.path / TOKENIZER),
                help="leave out --chat, or compile a checkpoint with DeepSeek's tokenizer",
            ) from None
