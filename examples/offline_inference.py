"""Generate text from a compiled engine.

deepinfer-compile examples/v41_nano.yaml --target cpu -o nano.engine
python examples/offline_inference.py nano.engine
"""

import sys

from deepinfer_compile.runtime import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "The future of AI is",
]


def main(engine: str = "nano.engine") -> None:
    llm = LLM(engine)
    sampling_params = SamplingParams(temperature=0.8, max_tokens=32, seq_seed=0)
    for prompt, text in zip(PROMPTS, llm.generate(PROMPTS, sampling_params), strict=True):
        print(f"Prompt: {prompt!r}, generated text: {text!r}")
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
