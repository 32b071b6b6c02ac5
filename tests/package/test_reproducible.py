"""The same spec gives the same bytes, in either form, whoever compiles it, wherever, whenever."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime.cli import main as engine_command
from tests.engines import nano_engine

REPO = Path(__file__).parents[2]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def hashes(engine: Path) -> dict[str, str]:
    return {
        path.relative_to(engine).as_posix(): sha256(path.read_bytes())
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
    command = f"{sys.executable} -m deepinfer_compile {spec} --target cpu --pack -o x -q"
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
        ["sh", "-c", f"umask 077; exec {command}"],
        cwd=folder,
        env=other,
        check=True,
        capture_output=True,
        timeout=600,
    )
    assert (folder / "x").stat().st_mode & 0o777 == 0o644
    write_single_file(first, tmp_path / "packed")
    with zipfile.ZipFile(folder / "x") as archive:
        found = {name: sha256(archive.read(name)) for name in archive.namelist()}
    assert found == hashes(first)
    assert (folder / "x").read_bytes() == (tmp_path / "packed").read_bytes()
    assert engine_command(["diff", str(first), str(folder / "x")]) == 0


def test_an_engine_names_no_place_and_no_host():
    host = socket.gethostname()
    names = [str(REPO), str(Path.home()), "/tmp/"]
    names += [host] if len(host) > 5 else []  # a short one may be there by chance
    for path in nano_engine().rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for name in names:
                assert name.encode() not in content, (path, name)
