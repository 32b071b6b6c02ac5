"""Finish an engine whose vendor toolchain was not on the machine that compiled it.

No target of this runtime needs it: what was compiled for them holds its libraries.
"""

from __future__ import annotations

from deepinfer_compile.format.manifest import Library
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.folder import EngineFolder


def finish(folder: EngineFolder) -> tuple[Library, ...]:
    """The libraries of a complete engine. E244: it has none, and no toolchain here makes them."""
    libraries = folder.manifest.libraries
    if not libraries:
        raise EngineError(
            "E244",
            f"the engine has no library, and this runtime knows no toolchain for target "
            f"{folder.manifest.target}",
            where=str(folder.path),
            help="finish it with a runtime that serves this target",
        )
    return libraries
