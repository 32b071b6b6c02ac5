"""A sealed engine: it runs with nothing but itself, writes nothing, and imports no compiler."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_compile.package.single_file import write_single_file

PROMPT = "The future of AI is"
# Each would mean that the runtime compiles, downloads or reads a spec.
FORBIDDEN = (
    "jinja2",
    "ruamel",
    "pydantic",
    "networkx",
    "triton",
    "huggingface_hub",
    "deepinfer_targets",
    "deepinfer_templates",
    *(
        f"deepinfer_compile.{part}"
        for part in (
            *("spec", "ir", "build", "plan", "emit", "driver", "package", "checkpoint", "passes"),
            *("target", "diagnostics", "cli", "commands"),
        )
    ),
)
_SCRIPT = """
import sys
from deepinfer_compile.runtime.cli import main
status = main(sys.argv[1:])
print("modules", *sorted(sys.modules), file=sys.stderr)
sys.exit(status)
"""


def run(engine, *arguments, environment=None, wrapper=(), cwd="/"):
    command = [*wrapper, sys.executable, "-B", "-c", _SCRIPT, "run", str(engine)]
    command += ["--prompt", PROMPT, "--max-tokens", "24", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.fixture(scope="module")
def expected(nano_engine):
    done = run(nano_engine, "-q")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=["folder", "single file"])
def either(request, nano_engine, tmp_path_factory):
    """The engine in each of its forms."""
    if request.param == "folder":
        return nano_engine
    packed = tmp_path_factory.mktemp("packed") / "nano.engine"
    write_single_file(nano_engine, packed)
    return packed


@pytest.fixture
def read_only_copy(either, tmp_path):
    """Moved and renamed, without a single writable bit."""
    copy = tmp_path / "somewhere else" / "renamed"
    copy.parent.mkdir()
    (shutil.copytree if either.is_dir() else shutil.copyfile)(either, copy)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield copy
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755)


def snapshot_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_size,
            path.lstat().st_mtime_ns,
            path.stat().st_mode,
        )
        for path in (folder, *folder.rglob("*"))
    }


@functools.cache
def _unshare() -> tuple[str, ...]:
    """A prefix that runs a command without any network, or () where that is not permitted."""
    for prefix in (("unshare", "-n"), ("unshare", "-rn")):
        if shutil.which(prefix[0]):
            done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
            if done.returncode == 0:
                return (shutil.which("unshare") or "", prefix[1])
    return ()


def test_an_empty_environment_and_a_read_only_renamed_engine_are_enough(read_only_copy, expected):
    before = snapshot_of(read_only_copy)
    environment = {"PATH": "", "TMPDIR": "/nonexistent", "HF_HUB_OFFLINE": "0"}
    done = run(read_only_copy, "-q", environment=environment)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    assert snapshot_of(read_only_copy) == before


def test_no_network_is_needed(nano_engine, expected):
    if not _unshare():
        pytest.skip("waits for a machine that permits unshare -n")
    done = run(nano_engine, "-q", wrapper=_unshare())
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_no_compiler_module_is_imported(nano_engine):
    done = run(nano_engine, "-q")
    modules = done.stderr.split()[1:]
    assert "deepinfer_compile.runtime.executor" in modules
    loaded = [m for m in modules for f in FORBIDDEN if m == f or m.startswith(f"{f}.")]
    assert loaded == []


def test_no_process_is_started_and_no_file_is_written(either, tmp_path):
    """The audit hooks of Python see what its libraries open and start."""
    script = tmp_path / "watched.py"
    script.write_text(
        "import os, sys\n"
        "def watch(event, args):\n"
        "    if event in ('os.exec', 'os.fork', 'os.posix_spawn', 'os.system', 'subprocess.Popen',"
        " 'socket.connect', 'socket.bind', 'os.mkdir', 'os.rename', 'os.remove', 'os.symlink'):\n"
        "        raise RuntimeError(event)\n"
        "    if event == 'open' and isinstance(args[2], int):\n"
        "        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):\n"
        "            raise RuntimeError(f'open {args}')\n"
        "sys.addaudithook(watch)\n" + _SCRIPT
    )
    command = [sys.executable, "-B", str(script), "run", str(either), "--prompt", PROMPT]
    done = subprocess.run(
        [*command, "--max-tokens", "4", "-q", "--debug"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:2000]


def test_another_working_directory_and_a_relative_path_work(nano_engine, expected):
    done = run(nano_engine.name, "-q", cwd=nano_engine.parent)
    assert (done.returncode, done.stdout) == (0, expected)


def broken(engine: Path, copy: Path) -> Path:
    shutil.copytree(engine, copy)
    return copy


def cli(*arguments):
    command = [sys.executable, "-m", "deepinfer_compile.runtime", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def edited(engine: Path, **facts: object) -> Path:
    path = engine / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return engine


def test_a_flipped_byte_in_any_kind_of_file_is_refused(nano_engine, tmp_path):
    engine = broken(nano_engine, tmp_path / "flipped")
    names = ["kernels/engine.x86-64-v3.so", "weights/model.safetensors", "tokenizer/tokenizer.json"]
    for name in names:
        content = bytearray((engine / name).read_bytes())
        content[len(content) // 2] ^= 0x10
        (engine / name).write_bytes(content)
    done = cli("run", engine, "--prompt", "x")
    assert done.returncode == 4
    assert done.stdout == ""
    for name in names:
        assert f"   = {name}: sha256 differs\n" in done.stderr
    assert cli("verify", engine).returncode == 1


def test_a_missing_binary_is_refused(nano_engine, tmp_path):
    engine = broken(nano_engine, tmp_path / "missing")
    (engine / "kernels/engine.x86-64-v3.so").unlink()
    done = cli("run", engine, "--prompt", "x")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "\n".join(
        [
            "error[E452]: the engine's files are not those its manifest names",
            f"  --> {engine}",
            "   = kernels/engine.x86-64-v3.so: missing",
            "   = help: copy the engine again, or recompile it",
            "",
        ]
    )


@pytest.mark.parametrize(
    ("facts", "status", "message"),
    [
        ({"schema": 5}, 4, "error[E451]: the engine has schema 5, this runtime reads up to 4\n"),
        (
            {"driver": "cuda"},
            3,
            "error[E240]: the engine is for target cpu, driver cuda; this runtime has cpu\n",
        ),
        (
            {
                "libraries": [
                    {
                        "path": "kernels/engine.x86-64-v3.so",
                        "isa": "z15",
                        "features": ["avx2", "vxe2"],
                    }
                ]
            },
            3,
            "error[E241]: the engine's code needs a CPU with z15; this is x86_64 Linux",
        ),
    ],
)
def test_engines_for_something_else_are_refused(nano_engine, tmp_path, facts, status, message):
    engine = edited(broken(nano_engine, tmp_path / "other"), **facts)
    done = cli("run", engine, "--prompt", "x")
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(message)
    as_json = cli("run", engine, "--prompt", "x", "--json")
    assert json.loads(as_json.stdout)["error"]["code"] in message
    assert as_json.stderr == ""


def test_too_long_a_prompt_names_found_and_limit(nano_engine):
    done = cli("run", nano_engine, "--prompt", "x y " * 2000)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this engine takes 1023" in done.stderr


def test_a_closed_pipe_ends_a_generation_silently(nano_engine):
    command = f"{sys.executable} -m deepinfer_compile.runtime run {nano_engine} --prompt x"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} -q --max-tokens 900 | head -c 1"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_inspect_names_what_was_compiled(nano_engine):
    text = cli("inspect", nano_engine)
    assert (text.returncode, text.stderr) == (0, "")
    facts = json.loads(cli("inspect", nano_engine, "--json").stdout)
    assert facts["limits"]["max_context"] == 1024
    kinds = {state["name"].rpartition(".")[2] for state in facts["states"]}
    assert kinds == {"window", "kv_pages", "index_pages", "tail", "history"}
    for kernel in facts["kernels"]:
        assert kernel["name"] in text.stdout
        assert kernel["spec"], kernel["name"]
        assert kernel["uses"] > 0


def test_an_interrupt_ends_with_130_and_no_traceback(nano_engine):
    command = [sys.executable, "-m", "deepinfer_compile.runtime", "run", str(nano_engine), "-q"]
    command += ["--prompt", "x", "--temperature", "1", "--seed", "2", "--max-tokens", "1000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Background jobs of a shell ignore SIGINT, and hand that on to their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)  # it is generating
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""
