"""`deepinfer-compile`: arguments -> driver. Results on stdout; bars and errors on stderr."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from deepinfer_compile import __version__
from deepinfer_compile.diagnostics import CompileError, error

_EXAMPLES = """\
examples:
  deepinfer-compile examples/v41_nano.yaml --target cpu -o nano.engine
  deepinfer-compile --from-hf DIR --target cpu
  deepinfer-compile examples/v41_flash.yaml --plan
  deepinfer-compile examples/v41_nano.yaml --write-checkpoint nano --seed 1
exit status: 0 ok, 1 the answer is no, 2 command line or spec, 3 target or memory,
  4 checkpoint, 5 disk or network, 70 our bug, 130 interrupted
"""


# What does not change a command's result is refused with it, never ignored.
_INSTEAD = ("plan", "check", "stop_after", "emit_spec", "fetch", "write_checkpoint", "tune")
_GOES_WITH = {
    "output": ("compile",),
    "isa": ("compile",),
    "checkpoint": ("compile",),
    "pack": ("compile",),
    "tuning": ("compile",),
    "dump_ir": ("compile", "plan", "check", "stop_after"),
    "seed": ("write_checkpoint",),
}


class _Parser(argparse.ArgumentParser):
    """Reports mistakes the way everything else is reported."""

    def error(self, message: str) -> NoReturn:
        raise error("E001", message, help=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    as_json, debug = "--json" in given, "--debug" in given
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a narrow encoding must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        _leave_nothing()
    try:
        status = _run(parser().parse_args(given))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; a traceback would tell nobody anything.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as failure:
        if debug:
            traceback.print_exc()
        return _report(failure, as_json)


def _open_closed_streams() -> None:
    """Whoever closed a stream (`>&-`) wants nothing of it; Python puts None in its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _leave_nothing() -> None:
    """Told to end, or the terminal closed: as after Ctrl-C. What `nohup` ignores stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = _Parser(
        prog="deepinfer-compile",
        description="Compile a declarative model spec into a sealed inference engine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `--json` must be told apart before parsing succeeds
    )
    p.add_argument("spec", nargs="?", metavar="SPEC", help="the spec, a YAML file")
    p.add_argument("--from-hf", metavar="DIR", help="a checkpoint folder instead of a spec")
    p.add_argument("--target", metavar="T", help="what to compile for (cpu)")
    p.add_argument("-o", "--output", metavar="OUT", help="default: ./<spec>-<target>.engine")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    p.add_argument("--checkpoint", metavar="DIR", help="where the weights are")
    p.add_argument("--isa", metavar="I", help="cpu: x86-64-v3, avx512 or native; default both")
    p.add_argument("--pack", action="store_true", default=None, help="one file, not a folder")
    p.add_argument("--tuning", metavar="LOCK", help="compile with what --tune measured")
    p.add_argument("--numerics", choices=("f32", "vendor"), help="rounding policy")
    p.add_argument("--probes", action="store_true", help="a debug engine with named taps")
    p.add_argument("--dump-ir", metavar="DIR", help="also write the graphs, after every pass")
    instead = p.add_argument_group("instead of compiling").add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="print sizes, exactly")
    instead.add_argument("--check", action="store_true", help="print the rule of every operator")
    instead.add_argument("--stop-after", metavar="PASS", help="with --dump-ir: passes up to PASS")
    instead.add_argument("--emit-spec", metavar="FILE", help="write the spec with every setting")
    instead.add_argument("--fetch", action="store_true", help="download the checkpoint")
    instead.add_argument("--write-checkpoint", metavar="DIR", help="make a random checkpoint")
    instead.add_argument("--tune", metavar="LOCK", help="measure the target's choices into LOCK")
    p.add_argument("--seed", type=_seed, metavar="N", help="for --write-checkpoint")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress")
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")
    p.add_argument("--debug", action="store_true", help="tracebacks")
    p.add_argument("--version", action="version", version=_version())
    return p


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, found `{text}`")
    return int(text)


def _version() -> str:
    from deepinfer_compile.format.manifest import SCHEMA

    parts = [f"deepinfer-compile {__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "triton"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join([*parts, f"engine schema {SCHEMA}"])


def _run(a: argparse.Namespace) -> int:
    """Load the spec and do what was asked."""
    from deepinfer_compile import commands  # here: --help needs no pydantic or rich
    from deepinfer_compile.driver import find_target, find_target_for
    from deepinfer_compile.spec.hf import from_hf
    from deepinfer_compile.spec.load import default_target, load_spec

    _refuse_misuse(a)
    overrides = list(a.overrides)
    overrides += [f"engine.numerics={a.numerics}"] if a.numerics else []
    overrides += ["engine.probes=true"] if a.probes else []
    load = from_hf if a.from_hf is not None else load_spec
    spec = load(a.from_hf or a.spec, overrides=overrides)
    dump = Path(a.dump_ir) if a.dump_ir else None
    command = commands.Command(spec, a.json, a.quiet, dump)
    if a.emit_spec:
        return command.emit_spec(Path(a.emit_spec))
    if a.fetch:
        return command.fetch()
    if a.write_checkpoint:
        return command.write_checkpoint(Path(a.write_checkpoint), a.seed)
    target = None
    if a.target:
        target = find_target(a.target)
    elif accelerator := default_target():
        target = find_target_for(accelerator)
    if target is None and not a.plan:
        raise commands.no_target()
    if target is None or a.plan:
        return command.plan(target)
    for option, lock in (("--tune", a.tune), ("--tuning", a.tuning)):
        if lock is not None:
            raise commands.nothing_to_tune(target, option, lock)
    if a.stop_after:
        return command.stop_after(target, a.stop_after)
    if a.check:
        return command.check(target)
    checkpoint = Path(a.checkpoint) if a.checkpoint else None
    output = Path(a.output) if a.output else None
    return command.compile(target, output, a.isa, checkpoint, pack=bool(a.pack))


def _refuse_misuse(a: argparse.Namespace) -> None:
    empty = [_option(name) for name, value in vars(a).items() if value == ""]
    if empty:  # most often an unset variable of a shell
        raise error("E001", f"{', '.join(empty)} must not be empty")
    if (a.spec is None) == (a.from_hf is None):
        raise error("E001", "name a spec, or a checkpoint folder with --from-hf, not both")
    asked = next((name for name in _INSTEAD if getattr(a, name)), "compile")
    for name, commands in _GOES_WITH.items():
        if getattr(a, name) is not None and asked not in commands:
            wanted = " or ".join("compiling" if c == "compile" else _option(c) for c in commands)
            raise error("E001", f"{_option(name)} goes with {wanted}")
    if a.stop_after and not a.dump_ir:
        raise error("E001", "--stop-after needs --dump-ir, a folder for the graphs")


def _option(name: str) -> str:
    short = {"spec": "SPEC", "output": "-o"}
    return short[name] if name in short else f"--{name.replace('_', '-')}"


def _report(failure: Exception, as_json: bool) -> int:
    """Say what failed; the exit status."""
    status = None
    if isinstance(failure, OSError):
        where = str(failure.filename or "")
        failure = error("E502", f"cannot read or write: {failure.strerror or failure}", where=where)
    elif not isinstance(failure, CompileError):
        failure = error(
            "E000",
            f"internal error: {type(failure).__name__}: {failure}",
            help="this is our bug: run again with --debug and report what it prints",
        )
        status = 70
    assert isinstance(failure, CompileError)
    if as_json:
        problems = [d.to_json() for d in failure.diagnostics]
        try:
            print(json.dumps({"schema": 1, "errors": problems}, indent=1))
            sys.stdout.flush()
            return failure.exit_code if status is None else status
        except OSError:  # stdout itself is what failed: stderr has to do
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):  # nobody can be told; the status stands
        print("\n\n".join(d.render() for d in failure.diagnostics), file=sys.stderr)
    return failure.exit_code if status is None else status
