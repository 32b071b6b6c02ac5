"""The same tokens in every run and beside any neighbours, the way DeepInfer's users ask for it.

export DEEPINFER_BATCH_INVARIANT=1 DEEPINFER_ENABLE_MTP_VARLEN=0
deepinfer-compile examples/v41_nano.yaml --target cpu -o nano.engine
python examples/deterministic.py nano.engine
"""

import sys

from deepinfer_compile.runtime import LLM, SamplingParams

PROMPT = "The capital of France is"
RUNS = 3


def main(engine: str = "nano.engine") -> None:
    llm = LLM(engine, batch_invariant=True, decode_sequence=False)
    ours = SamplingParams(temperature=1.0, max_tokens=48, seq_seed=2026, ignore_eos=True)
    theirs = SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True)
    found = set()
    for neighbours in (0, 1, 16):
        for _ in range(RUNS):
            prompts = [f"Neighbour {i} says" for i in range(neighbours)]
            params = [theirs] * neighbours
            place = neighbours // 2
            prompts.insert(place, PROMPT)
            params.insert(place, ours)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.add(tuple(output.token_id for output in outputs[place]))
            print(f"{neighbours:2} neighbours: {[o.token_id for o in outputs[place]][:8]} ...")
    llm.close()
    print("identical" if len(found) == 1 else f"{len(found)} different answers")
    sys.exit(len(found) != 1)


if __name__ == "__main__":
    main(*sys.argv[1:2])
