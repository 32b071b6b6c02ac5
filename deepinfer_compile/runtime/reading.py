"""The verbs that read an engine and execute none of it. Text is printed, facts are for --json."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from deepinfer_compile.runtime.answer import Answer
from deepinfer_compile.runtime.changes import describe_changes
from deepinfer_compile.runtime.comparison import compare
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.explanation import explain as explained
from deepinfer_compile.runtime.finishing import finish as finished
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.inspection import describe, facts_of
from deepinfer_compile.runtime.report import page, report_facts, write_page

# `verify` was asked whether the engine is intact: these are its "no", not a failure to answer.
_ANSWERS_NO = frozenset({"E451", "E452", "E453", "E454", "E455", "E457", "E458"})


def inspect(args: argparse.Namespace) -> Answer:
    """Read an engine; weights are not hashed, nothing is executed."""
    folder = open_folder(args.engine, skip_weights=True)
    if not args.json:
        print(describe(folder))
    return Answer(facts_of(folder))


def verify(args: argparse.Namespace) -> Answer:
    """Hash everything."""
    try:
        folder = open_folder(args.engine)
    except EngineError as refused:
        if refused.code not in _ANSWERS_NO:
            raise
        if not args.json:
            print(refused.render(), file=sys.stderr)
        return Answer({"ok": False, "error": refused.to_json()}, status=1)
    files = len(folder.manifest.files)
    if not args.json:
        size = f"{folder.hashed / 1e6:,.1f} MB"
        print(f"ok: {files} files, {size} as written, hashed in {folder.seconds:.2f} s")
    return Answer({"ok": True, "files": files, "bytes": folder.hashed, "seconds": folder.seconds})


def finish(args: argparse.Namespace) -> Answer:
    """Build what the compiling machine could not; nothing, where the engine is complete."""
    libraries = finished(open_folder(args.engine, skip_weights=True))
    if not args.json:
        print(f"complete: nothing to finish ({', '.join(library.path for library in libraries)})")
    return Answer({"complete": True, "libraries": [library.path for library in libraries]})


def explain(args: argparse.Namespace) -> Answer:
    """Where kernels come from."""
    explanation = explained(open_folder(args.engine, skip_weights=True), args.name)
    if not args.json:
        print(explanation.text)
    return Answer(explanation.facts)


def diff(args: argparse.Namespace) -> Answer:
    """What differs; status 1 if anything does."""
    one, two = (open_folder(path, skip_weights=True) for path in (args.engine, args.other))
    changes = compare(one, two)
    if not args.json and changes:
        print(f"- {one.path}\n+ {two.path}\n\n{describe_changes(changes)}")
    elif not args.json:
        print(f"identical: {len(one.manifest.files) + 1} files")
    facts = [asdict(change) for change in changes]
    return Answer({"identical": not changes, "changes": facts}, 1 if changes else 0)


def report(args: argparse.Namespace) -> Answer:
    """The engine as a page."""
    folder = open_folder(args.engine, skip_weights=True)
    if args.out is not None:
        write_page(folder, Path(args.out))
    elif not args.json:
        print(page(folder), end="")
    return Answer(report_facts(folder))
