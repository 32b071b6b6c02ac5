"""Options of the verbs that run an engine."""

from __future__ import annotations

import argparse


def filled(text: str) -> str:
    """A name or path. An empty one, most often an unset variable of a shell, would be read as the
    folder that we are in."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def bench_options(bench: argparse.ArgumentParser) -> None:
    def counts(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(word) for word in text.split(","))
        except ValueError:
            message = f"expected counts such as 1,8, found `{text}`"
            raise argparse.ArgumentTypeError(message) from None

    weight_options(bench)
    bench.add_argument(
        "--rows",
        type=counts,
        metavar="N,N,...",
        help="decode rows; default smallest bucket and most",
    )
    bench.add_argument("--prompt", type=int, metavar="N", help="tokens; default one chunk")
    bench.add_argument(
        "--context", type=int, metavar="N", help="tokens before each row; default 256 or fewer"
    )
    bench.add_argument(
        "--tokens", type=int, default=16, metavar="N", help="decode steps of a run; default 16"
    )
    bench.add_argument("--runs", type=int, default=5, metavar="N", help="repetitions; default 5")
    bench.add_argument("--csv", type=filled, metavar="FILE", help="write the tables there too")


def run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument("--prompt", action="append", help="repeatable; without it, stdin is read")
    run.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    run.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    run.add_argument("--top-p", type=float, default=1.0, metavar="P", help="mass kept; default 1")
    run.add_argument("--top-k", type=int, default=-1, metavar="K", help="tokens kept; default all")
    run.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="of the best one's; default 0"
    )
    run.add_argument("--seed", type=int, metavar="N", help="64 bits; default random")
    run.add_argument("--stop", action="append", metavar="TEXT", help="end before it; repeatable")
    run.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: N most likely tokens of each place"
    )
    run.add_argument(
        "--chat",
        action="store_true",
        help="prompts are a user's messages; the reasoning is printed too",
    )
    weight_options(run)


def weight_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--checkpoint", type=filled, metavar="DIR", help="where the weights are")
