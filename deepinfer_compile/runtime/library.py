"""The engine's shared library, called through ctypes: create, run steps, destroy.

int32_t engine_abi();
void*   engine_create(void* const* buffers, int32_t count, int32_t threads);
int32_t engine_run(void* engine, int32_t phase, int32_t rows, int32_t first, int32_t last);
void    engine_destroy(void* engine);
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from deepinfer_compile.format.manifest import ABI
from deepinfer_compile.runtime.errors import EngineError


class Library:
    """One created engine. Not for several threads at once: steps share one arena."""

    def __init__(self, path: Path, addresses: Sequence[int], threads: int) -> None:
        functions = _open(path)
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._run = functions.engine_run
        self._destroy = functions.engine_destroy
        self._engine: int | None = functions.engine_create(buffers, len(addresses), threads)
        if self._engine is None:
            message = f"the engine's library could not start with {threads} threads"
            raise EngineError("E242", message, where=str(path), help="ask for fewer threads")

    def run(self, phase: int, rows: int, first: int, last: int) -> None:
        """Steps [first, last) of a phase over `rows` rows."""
        if self._engine is None:
            raise EngineError("E021", "the engine is closed")
        status = self._run(self._engine, phase, rows, first, last)
        assert status == 0, f"engine_run(phase {phase}, rows {rows}) returned {status}"

    def close(self) -> None:
        """Join the library's threads; the engine cannot run any more."""
        if self._engine is not None:
            self._destroy(self._engine)
            self._engine = None


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path.absolute()))  # absolute: a bare name would be searched for
    except OSError as failure:
        raise EngineError(
            "E243",
            "the engine's library cannot be loaded here",
            where=str(path),
            notes=[str(failure)],
            help="the engine must lie on a file system that allows execution, on Linux x86-64",
        ) from None
    library.engine_abi.restype = ctypes.c_int32
    library.engine_abi.argtypes = ()
    found = library.engine_abi()
    if found != ABI:
        message = f"the engine's library has ABI {found}, this runtime calls {ABI}"
        raise EngineError("E454", message, where=str(path), help="recompile the engine")
    i32 = ctypes.c_int32
    library.engine_create.restype = ctypes.c_void_p
    library.engine_create.argtypes = (ctypes.POINTER(ctypes.c_void_p), i32, i32)
    library.engine_run.restype = i32
    library.engine_run.argtypes = (ctypes.c_void_p, i32, i32, i32, i32)
    library.engine_destroy.restype = None
    library.engine_destroy.argtypes = (ctypes.c_void_p,)
    return library
