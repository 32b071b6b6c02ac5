"""`python -m tests.emit.regenerate`: rewrite generated/, the output that reviewers read.

One folder per target for the nano example: the graphs and programs of decode and prefill, and every
kernel they launch. No binaries. `test_generated.py` compares; it never rewrites.
"""

import shutil
from pathlib import Path

from deepinfer_compile.driver import find_target, lower, sources
from deepinfer_compile.spec.load import load_spec

REPO = Path(__file__).parents[2]
GENERATED = REPO / "generated"
SHOWN = (".cpp", ".py", ".ir")


def generated_files() -> dict[str, str]:
    """Text by path below generated/."""
    spec = load_spec(REPO / "examples" / "v41_nano.yaml", environment={})
    target = find_target("cpu")
    texts = sources(lower(spec, target), target)
    kept = {
        name: text
        for name, text in texts.items()
        if name.endswith(SHOWN) and name != "kernels/engine.cpp"
    }
    return {f"v41_nano/cpu/{name}": text for name, text in sorted(kept.items())}


def main() -> None:
    shutil.rmtree(GENERATED, ignore_errors=True)
    for name, text in generated_files().items():
        (GENERATED / name).parent.mkdir(parents=True, exist_ok=True)
        (GENERATED / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
