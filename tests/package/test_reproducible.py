"""The same spec gives the same bytes, whoever compiles it, wherever, whenever."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.engines import nano_engine

REPO = Path(__file__).parents[2]


def hashes(engine: Path) -> dict[str, str]:
    return {
        path.relative_to(engine).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(engine.rglob("*"))
        if path.is_file()
    }


def test_another_environment_gives_the_same_bytes(tmp_path):
    """Another hash seed, time zone, locale, folder, home, scratch folder, umask and spelling."""
    first = nano_engine()
    folder = tmp_path / "a folder"
    scratch = tmp_path / "scratch"
    for place in (folder, scratch):
        place.mkdir()
    spec = os.path.relpath(REPO / "examples" / "v41_nano.yaml", folder)
    command = f"umask 077; exec {sys.executable} -m deepinfer_compile {spec} --target cpu -o x -q"
    other = {
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "12345",
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "SOURCE_DATE_EPOCH": "1",
    }
    subprocess.run(
        ["sh", "-c", command], cwd=folder, env=other, check=True, capture_output=True, timeout=600
    )
    assert hashes(folder / "x") == hashes(first)
    modes = {p.stat().st_mode & 0o777 for p in (folder / "x").rglob("*") if p.is_file()}
    assert modes == {0o644}


def test_an_engine_names_no_place_and_no_host():
    host = socket.gethostname()
    names = [str(REPO), str(Path.home()), "/tmp/"]
    names += [host] if len(host) > 5 else []  # a short one may be there by chance
    for path in nano_engine().rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for name in names:
                assert name.encode() not in content, (path, name)
