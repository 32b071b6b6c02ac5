"""Hold a compiled engine to a JSON schema, a regular expression, and a grammar behind a thought.

deepinfer-compile examples/v41_nano.yaml --target cpu -o nano.engine
python examples/structured_output.py nano.engine
"""

import json
import sys

from deepinfer_compile.runtime import LLM, SamplingParams

ORDER = {
    "type": "object",
    "properties": {
        "item": {"enum": ["tea", "coffee", "cake"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["item", "count"],
}
SUM = """
root ::= term ("+" term){1,3}
term ::= [0-9] | "(" root ")"
"""


def main(engine: str = "nano.engine") -> None:
    llm = LLM(engine)
    tokenizer = llm.get_tokenizer()
    # Think freely, then answer: a newline ends the thought if the model does not.
    thought = {
        "trigger_token_ids": tokenizer.encode("</think>", add_bos=False),
        "bound_token_id": tokenizer.encode("\n", add_bos=False)[0],
    }
    prompts_and_so_args = [
        ("One order, please: ", {"schema_type": "json", "schema": json.dumps(ORDER)}),
        ("A date: ", {"schema_type": "regex", "schema": r"20\d\d-(0[1-9]|1[0-2])-[0-2][1-8]"}),
        ("Add something up: ", {"schema_type": "ebnf", "schema": SUM}),
        ("Yes or no? ", {"schema_type": "regex", "schema": "yes|no", **thought}),
    ]
    params = [
        SamplingParams(temperature=0.8, max_tokens=400, seq_seed=0, so_args=so_args)
        for _, so_args in prompts_and_so_args
    ]
    prompts = [prompt for prompt, _ in prompts_and_so_args]
    for prompt, text in zip(prompts, llm.generate(prompts, params), strict=True):
        print(f"Prompt: {prompt!r}, generated text: {text!r}")
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
