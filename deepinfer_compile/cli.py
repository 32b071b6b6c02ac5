"""`deepinfer-compile`: arguments -> driver. Results on stdout; bars and errors on stderr."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except CompileError as failed:
        return _report(failed, arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; a traceback would tell nobody anything.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as failure:
        return _bug(failure, arguments)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="deepinfer-compile",
        description="Compile a declarative model spec into a sealed inference engine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("spec", nargs="?", metavar="SPEC", help="the spec, a YAML file")
    p.add_argument("--from-hf", metavar="DIR", help="a checkpoint folder instead of a spec")
    p.add_argument("--target", metavar="T", help="what to compile for (cpu)")
    p.add_argument("-o", "--output", metavar="OUT", help="default: ./<spec>-<target>.engine")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    p.add_argument("--checkpoint", metavar="DIR", help="where the weights are")
    p.add_argument("--isa", metavar="I", help="instruction set (cpu: x86-64-v3, avx512)")
    p.add_argument("--numerics", metavar="P", help="rounding policy: f32, vendor")
    p.add_argument("--probes", action="store_true", help="a debug engine with named taps")
    p.add_argument("--dump-ir", metavar="DIR", help="also write the graphs as text")
    instead = p.add_argument_group("instead of compiling").add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="print sizes, exactly")
    instead.add_argument("--check", action="store_true", help="print the rule of every operator")
    instead.add_argument("--emit-spec", metavar="FILE", help="write the spec with every setting")
    instead.add_argument("--fetch", action="store_true", help="download the checkpoint")
    instead.add_argument("--write-checkpoint", metavar="DIR", help="make a random checkpoint")
    p.add_argument("--seed", type=int, metavar="N", help="for --write-checkpoint")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress")
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")
    p.add_argument("--debug", action="store_true", help="tracebacks")
    p.add_argument("--version", action="version", version=_version())
    return p


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
    from deepinfer_compile.driver import find_target
    from deepinfer_compile.spec.hf import from_hf
    from deepinfer_compile.spec.load import default_target, load_spec

    if (a.spec is None) == (a.from_hf is None):
        raise error("E001", "name a spec, or a checkpoint folder with --from-hf, not both")
    if a.seed is not None and a.write_checkpoint is None:
        raise error("E001", "--seed goes with --write-checkpoint")
    overrides = list(a.overrides)
    overrides += [f"engine.numerics={a.numerics}"] if a.numerics else []
    overrides += ["engine.probes=true"] if a.probes else []
    load = from_hf if a.from_hf is not None else load_spec
    spec = load(a.from_hf or a.spec, overrides=overrides)
    command = commands.Command(spec, a.json, a.quiet)
    if a.emit_spec:
        return command.emit_spec(Path(a.emit_spec))
    if a.fetch:
        return command.fetch()
    if a.write_checkpoint:
        return command.write_checkpoint(Path(a.write_checkpoint), a.seed)
    target = None
    if name := a.target or default_target():
        source = "--target" if a.target else "environment DEEPINFER_ACCELERATOR"
        target = find_target(name, source)
    if a.plan:
        return command.plan(target)
    if target is None:
        raise commands.no_target()
    if a.check:
        return command.check(target)
    checkpoint = Path(a.checkpoint) if a.checkpoint else None
    dump_ir = Path(a.dump_ir) if a.dump_ir else None
    output = Path(a.output) if a.output else None
    return command.compile(target, output, a.isa, checkpoint, dump_ir)


def _report(failed: CompileError, a: argparse.Namespace) -> int:
    if a.debug:
        traceback.print_exc()
    if a.json:
        problems = [d.to_json() for d in failed.diagnostics]
        print(json.dumps({"schema": 1, "errors": problems}, indent=1))
    else:
        print("\n\n".join(d.render() for d in failed.diagnostics), file=sys.stderr)
    return failed.exit_code


def _bug(failure: Exception, a: argparse.Namespace) -> int:
    if a.debug:
        traceback.print_exc()
    report = error(
        "E000",
        f"internal error: {type(failure).__name__}: {failure}",
        help="this is our bug: run again with --debug and report what it prints",
    )
    _report(report, a)
    return 70
