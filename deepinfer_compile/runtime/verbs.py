"""What each verb of `deepinfer-engine` does. Text is printed as it comes; facts are for --json."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from deepinfer_compile.runtime import reading
from deepinfer_compile.runtime.answer import Answer
from deepinfer_compile.runtime.bench import ask as bench_ask
from deepinfer_compile.runtime.bench import report as bench_report
from deepinfer_compile.runtime.bench import run_bench
from deepinfer_compile.runtime.bench.text import text as bench_text
from deepinfer_compile.runtime.columns import Row, columns
from deepinfer_compile.runtime.doctor import doctor as examine
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.golden import write_golden
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.numdiff import report as numdiff_report
from deepinfer_compile.runtime.numdiff import run_numdiff
from deepinfer_compile.runtime.printer import Printer
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.settings import Found, found_settings, unknown_settings
from deepinfer_compile.runtime.text_file import check_outside


def run(args: argparse.Namespace) -> Answer:
    """Generate for all prompts together; the first unfinished one is printed as it grows."""
    params = _sampling(args)
    if not args.prompt and (sys.stdin is None or sys.stdin.isatty()):
        raise RequestError("E030", "no prompt", help='give --prompt "..." or pipe text in')
    begin = time.perf_counter()
    llm = LLM(args.engine, checkpoint=args.checkpoint)
    prompts = args.prompt or [_stdin()]
    loaded = time.perf_counter()
    printer = Printer(len(prompts), silent=args.json)
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for piece in llm.stream(turns if args.chat else prompts, params):
        printer.add(piece)
    ended = time.perf_counter()
    llm.close()
    count = printer.count
    rate = count / (ended - loaded)
    if not args.quiet and not args.json:
        sys.stdout.flush()
        _note(
            f"{count} tokens, {rate:.1f} tokens/s, first after {printer.first - loaded:.2f} s; "
            f"loaded in {loaded - begin:.2f} s for {llm.engine.isa}, "
            f"weights: {llm.engine.source.reason}"
        )
    outputs = [
        {"prompt": prompt, **output}
        for prompt, output in zip(prompts, printer.outputs(args.logprobs is not None), strict=True)
    ]
    seconds = {"load": loaded - begin, "generate": ended - loaded, **llm.engine.seconds}
    return Answer({"outputs": outputs, "tokens_per_second": rate, "seconds": seconds})


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """The options as parameters; what would have no effect is refused."""
    filters = {"--top-p": args.top_p != 1, "--top-k": args.top_k != -1, "--min-p": args.min_p != 0}
    idle = [name for name, given in filters.items() if given]
    if args.temperature == 0 and idle:
        message = f"{', '.join(idle)}: nothing to filter at temperature 0"
        raise RequestError("E020", message, help="give --temperature too")
    if args.logprobs is not None and not args.json:
        raise RequestError("E020", "--logprobs are printed with --json", help="add --json")
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        top_logprobs=args.logprobs or 0,
        seq_seed=args.seed,
        stop=args.stop,
    )


def _stdin() -> str:
    try:
        text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as bad:
        place, help = f"stdin, byte {bad.start + 1}", "give text in UTF-8"
        raise RequestError("E030", "the prompt is not UTF-8", where=place, help=help) from None
    if not text:
        raise RequestError("E030", "the prompt is empty", help='give --prompt "..."')
    return text


def doctor(args: argparse.Namespace) -> Answer:
    """Found and needed, side by side, and what the environment sets; the status is the worst
    check's. Of variables that nothing reads, a warning."""
    checks = examine(Path(args.engine) if args.engine is not None else None)
    environment, unknown = found_settings(), unknown_settings()
    if not args.json:
        rows = [("no" if c.status else "ok", c.name, c.found, c.needed) for c in checks]
        print(columns([("", "", "found", "needed"), *rows]))
        print(f"\nenvironment\n{columns(_variables(environment))}")
    if not args.quiet:
        for name, nearest in unknown:
            _note(f"warning: nothing reads `{name}`; did you mean `{nearest}`?")
    status = max(check.status for check in checks)
    facts = {
        "ok": not status,
        "checks": [{**asdict(check), "ok": not check.status} for check in checks],
        "environment": [
            {**asdict(one.variable), "value": one.value, "source": one.source}
            for one in environment
        ],
        "unknown_environment": [{"name": name, "nearest": near} for name, near in unknown],
    }
    return Answer(facts, status)


def _variables(environment: Sequence[Found]) -> list[Row]:
    rows: list[Row] = [("variable", "value", "from", "kind", "default", "")]
    for one in environment:
        about = one.variable
        rows.append((about.name, one.value, one.source, about.kind, about.default, about.help))
    return rows


def golden(args: argparse.Namespace) -> Answer:
    """Candidate tensors for every golden file."""
    out = Path(args.out)
    check_outside(Path(args.engine), out)
    engine = load_engine(args.engine, checkpoint=args.checkpoint)
    written = write_golden(engine.executor, Path(args.vectors), out)
    engine.close()
    if not args.json:
        for path in written:
            print(path)
    return Answer({"written": [str(path) for path in written]})


def bench(args: argparse.Namespace) -> Answer:
    """Time steps and kernels; what does not fit the engine is refused before it is loaded."""
    folder = open_folder(args.engine)
    file = None if args.csv is None else Path(args.csv)
    ask = bench_ask.settle(
        folder.plan, args.rows, args.prompt, args.context, args.tokens, args.runs, file
    )
    if file is not None:
        check_outside(folder.path, file)
    report = run_bench(folder, ask, args.checkpoint, progress=not args.quiet)
    if file is not None:
        bench_report.write_csv(report, file)
    if not args.json:
        print(bench_text(report))
    return Answer(bench_report.facts(report))


def numdiff(args: argparse.Namespace) -> Answer:
    """Compare two engines with probes; 1 when a figure is outside its limit."""
    found = run_numdiff(
        args.engine, args.other, args.checkpoint, args.prompt, progress=not args.quiet
    )
    about = (found.verdict, found.a, found.b, found.pieces)
    if not args.json:
        print(numdiff_report.text(*about))
    return Answer(numdiff_report.facts(*about), status=0 if found.verdict.ok else 1)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


VERBS: Mapping[str, Callable[[argparse.Namespace], Answer]] = {
    "run": run,
    "inspect": reading.inspect,
    "verify": reading.verify,
    "explain": reading.explain,
    "diff": reading.diff,
    "report": reading.report,
    "finish": reading.finish,
    "doctor": doctor,
    "golden": golden,
    "bench": bench,
    "numdiff": numdiff,
}
