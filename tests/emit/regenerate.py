"""`python -m tests.emit.regenerate`: rewrite generated/, the output that reviewers read.

One folder per target for the nano example: the graphs and programs of decode and prefill, the first
kernel of every template in full, the others (the same text with other numbers) by hash. No
binaries. `test_generated.py` compares; it never rewrites.
"""

import hashlib
import shutil
from pathlib import Path

from deepinfer_compile.driver import find_target, lower, sources
from deepinfer_compile.spec.load import load_spec

REPO = Path(__file__).parents[2]
GENERATED = REPO / "generated"


def generated_files() -> dict[str, str]:
    """Text by path below generated/."""
    spec = load_spec(REPO / "examples" / "v41_nano.yaml", environment={})
    target = find_target("cpu")
    lowered = lower(spec, target)
    texts = sources(lowered, target)
    shown = {kernel.plan.template: symbol for symbol, kernel in reversed(lowered.kernels.items())}
    kept = {name: texts[name] for name in ("graph.ir", "engine.py")}
    hashes = []
    for symbol in lowered.kernels:
        name = f"kernels/{symbol}.cpp"
        if symbol in shown.values():
            kept[name] = texts[name]
        else:
            hashes.append(f"{hashlib.sha256(texts[name].encode()).hexdigest()}  {name}\n")
    kept["others.sha256"] = "".join(hashes)
    return {f"v41_nano/cpu/{name}": text for name, text in sorted(kept.items())}


def main() -> None:
    shutil.rmtree(GENERATED, ignore_errors=True)
    for name, text in generated_files().items():
        (GENERATED / name).parent.mkdir(parents=True, exist_ok=True)
        (GENERATED / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
