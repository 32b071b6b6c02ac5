"""Load and run an engine: `LLM`, `AsyncLLM`, `SamplingParams`, and the errors they raise.

Imports of ours: `deepinfer_compile.format` alone. Nothing here compiles, downloads or writes.
"""

from deepinfer_compile.runtime.async_llm import AsyncLLM
from deepinfer_compile.runtime.errors import (
    EngineError,
    NotCompiled,
    NotReady,
    NotYet,
    RequestError,
)
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.reply import RequestOutput
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Finish

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineError",
    "Finish",
    "NotCompiled",
    "NotReady",
    "NotYet",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
