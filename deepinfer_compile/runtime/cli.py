"""`deepinfer-engine VERB ENGINE`: arguments in, exit status out.

Results go to stdout; bars, notes and errors to stderr. With --json, stdout is one object, errors
included. Status: 0 ok, 1 the answer is no, 2 to 5 by error stage, 70 our bug, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import NoReturn

from deepinfer_compile import __version__
from deepinfer_compile.format.manifest import SCHEMA
from deepinfer_compile.runtime import verbs
from deepinfer_compile.runtime.errors import EngineError, NotYet
from deepinfer_compile.runtime.options import bench_options, filled, run_options, weight_options

JSON_SCHEMA = 1
_NOT_YET = ("serve",)
_EXAMPLES = """\
examples:
  deepinfer-engine run nano.engine --prompt "Hello"
  echo "Hello" | deepinfer-engine run nano.engine --max-tokens 32
  deepinfer-engine run flash.engine --chat --prompt "Hello" --temperature 1 --top-p 0.95
  deepinfer-engine inspect nano.engine
  deepinfer-engine verify nano.engine --json
  deepinfer-engine explain nano.engine layers.0.window
  deepinfer-engine diff nano.engine other.engine
  deepinfer-engine report nano.engine -o nano.html
  deepinfer-engine doctor nano.engine
  deepinfer-engine bench nano.engine --rows 1,8 --csv nano.csv
  deepinfer-engine numdiff f32.engine vendor.engine --checkpoint DIR
  deepinfer-engine golden probes.engine --checkpoint DIR --vectors DIR -o candidate
exit status: 0 ok, 1 the answer is no, 2 command line or request, 3 target, device or memory,
  4 engine or checkpoint, 5 disk, 70 our bug, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    """Reports mistakes the way everything else is reported."""

    def error(self, message: str) -> NoReturn:
        help = f"see {self.prog} --help"
        raise EngineError("E020", message, help=help)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in given, "--debug" in given
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a narrow terminal must not end a generation
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has what it wanted. Without this, the interpreter complains while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except EngineError as refused:
        if debug:
            traceback.print_exc()
        _report(refused, as_json)
        return refused.exit_code
    except OSError as failure:
        if debug:
            traceback.print_exc()
        message = failure.strerror or str(failure)
        disk = EngineError("E552", message, where=str(failure.filename or ""))
        _report(disk, as_json)
        return disk.exit_code
    except Exception as bug:
        if debug:
            traceback.print_exc()
        message = f"{type(bug).__name__}: {bug}"
        help = "this is our bug: report it with the output of --debug"
        _report(EngineError("E070", message, help=help), as_json)
        return 70


def _run(given: Sequence[str]) -> int:
    first = next((word for word in given if not word.startswith("-")), "")
    if first in _NOT_YET:
        served = ", ".join(verbs.VERBS)
        raise NotYet("E021", f"`{first}` is not yet built", help=f"what works: {served}")
    args = parser().parse_args(given)
    if args.verb is None:
        raise EngineError("E020", "a verb is needed", help="see deepinfer-engine --help")
    answer = verbs.VERBS[args.verb](args)
    if args.json:
        print(json.dumps({"schema": JSON_SCHEMA, **answer.facts}, ensure_ascii=False))
    return answer.status


def _report(error: EngineError, as_json: bool) -> None:
    if as_json:
        try:
            print(json.dumps({"schema": JSON_SCHEMA, "error": error.to_json()}, ensure_ascii=False))
            sys.stdout.flush()
            return
        except OSError:  # stdout itself is what failed: stderr has to do
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):  # nobody can be told; the status stands
        print(error.render(), file=sys.stderr)


def _open_closed_streams() -> None:
    """Whoever closed a stream (`>&-`) wants nothing of it; Python puts None in its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _common() -> _Parser:
    """Options of every verb, before it or after. Made anew for each parser: parents share their
    actions, so a default set on one would overwrite what another was given."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-q", "--quiet", action="store_true", help="no notes on stderr")
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    common.add_argument("--debug", action="store_true", help="tracebacks")
    return common


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = _Parser(
        prog="deepinfer-engine",
        description="Run and read compiled engines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_common()],
        allow_abbrev=False,  # `--json` must be told apart before parsing succeeds
    )
    parser.add_argument("--version", action="version", version=version())
    parser.set_defaults(quiet=False, json=False, debug=False)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    def verb(name: str, text: str, engine: str | None = None) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(
            name, help=text, description=text, parents=[_common()], allow_abbrev=False
        )
        text = "an engine: folder or single file"
        sub.add_argument("engine", metavar="ENGINE", type=filled, help=text, nargs=engine)
        return sub

    run_options(verb("run", "generate text"))
    verb("inspect", "what was compiled: limits, memory, state, kernels; executes nothing")
    verb("verify", "are all files as they were written? executes nothing; exit 1 if not")
    explain = verb("explain", "where kernels come from, and why; executes nothing")
    text = "a kernel or a buffer; without it, all kernels"
    explain.add_argument("name", metavar="NAME", nargs="?", help=text)
    diff = verb("diff", "what differs between two engines? executes nothing; exit 1 if anything")
    diff.add_argument("other", metavar="OTHER", type=filled, help="another engine")
    report = verb("report", "the engine as one HTML page, on stdout or in a file; executes nothing")
    text = "where to write the page"
    report.add_argument("-o", dest="out", type=filled, metavar="FILE", help=text)
    verb("finish", "build what the compiling machine had no tools for; executes nothing")
    verb("doctor", "can this machine run the engine? without ENGINE: what is found here", "?")
    golden = verb("golden", "write what an engine with probes computes for golden prompts")
    weight_options(golden)
    for name, dest, text in (
        ("--vectors", "vectors", "golden_*.safetensors"),
        ("-o", "out", "where to write"),
    ):
        golden.add_argument(name, dest=dest, required=True, type=filled, metavar="DIR", help=text)
    bench_options(verb("bench", "time whole steps and every kernel on this machine"))
    numdiff = verb("numdiff", "compare two engines with probes, layer by layer; exit 1 if outside")
    text = "what is compared with the first"
    numdiff.add_argument("other", metavar="ENGINE", type=filled, help=text)
    numdiff.add_argument("--prompt", type=int, metavar="N", help="random tokens; default 256")
    weight_options(numdiff)
    return parser


def version() -> str:
    """Ours, and what decides whether an engine loads."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "absent"
    return (
        f"deepinfer-engine {__version__} "
        f"(Python {platform.python_version()}, torch {torch}, schema {SCHEMA})"
    )
