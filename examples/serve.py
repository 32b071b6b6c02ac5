"""Answer the requests of several clients together, until a signal; then end cleanly.

deepinfer-compile examples/v41_nano.yaml --target cpu -o nano.engine
python examples/serve.py nano.engine 64 &
kill %1    # SIGTERM: who has asked is answered, nothing more is taken in; then exit status 0
kill %1    # a second one ends what still runs at once, each with the reason `abort`

Answers are lines of JSON, metrics are text for Prometheus on stderr.
"""

import asyncio
import json
import signal
import sys

from deepinfer_compile.runtime import LLM, AsyncLLM, RequestError, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
]


async def client(llm: AsyncLLM, prompt: str, params: SamplingParams) -> None:
    """Ask one thing again and again while the server takes requests."""
    while True:
        pieces = []
        try:
            async for piece in llm.generate(prompt, params):
                pieces.append(piece)
        except RequestError as refused:
            if refused.code == "E072":  # the server is closing
                return
            raise
        answer = {
            "prompt": prompt,
            "text": "".join(piece.text for piece in pieces),
            "finish_reason": pieces[-1].token.finish_reason,
        }
        print(json.dumps(answer), flush=True)


async def serve(engine: str, max_tokens: int) -> None:
    llm = AsyncLLM(LLM(engine))
    closing: list[asyncio.Task[None]] = []

    def stop() -> None:
        """Wait for the answers on the first signal, not on the second."""
        print("aborting" if closing else "draining", file=sys.stderr, flush=True)
        closing.append(asyncio.create_task(llm.close(drain=not closing)))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    print(f"serving {engine}", file=sys.stderr, flush=True)
    await asyncio.gather(*(client(llm, prompt, params) for prompt in PROMPTS))
    await asyncio.gather(*closing)
    print(llm.metrics(), end="", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
