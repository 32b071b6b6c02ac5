"""`--fetch` and the search for a fetched checkpoint, against a stand-in hub in another process.

The hub's client reads its environment when it is imported, so each attempt is a fresh process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepinfer_compile.checkpoint.locate import locate
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.schema import Checkpoint
from tests.checkpoint.hub import COMMIT, Hub, serving
from tests.checkpoint.models import REPO

FILES = {
    "config.json": b'{"architectures": []}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 400,
    "README.md": b"not wanted",
    "original/model.safetensors": b"not wanted either",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}
FETCH = """
from deepinfer_compile.checkpoint.fetch import fetch
answer = fetch(repo, revision)
"""
LOCATE = """
from deepinfer_compile.checkpoint.locate import locate
from deepinfer_compile.spec.schema import Checkpoint
answer = locate(Checkpoint(repo=repo, revision=revision), spec="flash.yaml")
"""
FULL_DISK = """
import shutil
usage = shutil.disk_usage
shutil.disk_usage = lambda place: usage(place)._replace(free=100_000)
"""


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    answer: str
    errors: str

    def files(self) -> dict[str, bytes]:
        folder = Path(self.answer)
        return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@dataclass
class Attempts:
    """Runs of one user: one hub, one cache."""

    hub: Hub
    home: Path

    def run(
        self, body: str = FETCH, repo: str = "owner/name", revision: str = "main", **more: str
    ) -> Outcome:
        script = (
            f"import sys\nfrom deepinfer_compile.diagnostics import CompileError\n"
            f"repo, revision = {repo!r}, {revision!r}\n"
            "try:\n" + "\n".join(f"    {line}" for line in body.splitlines()) + "\n"
            "except CompileError as failure:\n"
            "    print(failure, file=sys.stderr)\n"
            "    sys.exit(failure.exit_code)\n"
            "print(answer)\n"
        )
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hf"),
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=REPO,
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Outcome(done.returncode, done.stdout.strip(), done.stderr)


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Attempts]:
    with serving(Hub(dict(FILES))) as hub:
        yield Attempts(hub, tmp_path)


def downloads(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET"]


def test_fetch_brings_the_wanted_files_and_locate_finds_them(user: Attempts) -> None:
    before = user.run(LOCATE)
    assert before.exit_code == 4
    assert "run `deepinfer-compile flash.yaml --fetch`" in before.errors
    assert not user.hub.requests  # looking never touches the network

    fetched = user.run()
    assert (fetched.exit_code, fetched.errors) == (0, "")  # no bars where no one looks
    assert fetched.files() == {name: FILES[name] for name in WANTED}
    assert Path(fetched.answer).name == COMMIT

    user.hub.requests.clear()
    by_commit = LOCATE + f"assert locate(Checkpoint(repo=repo, revision={COMMIT!r})) == answer"
    assert user.run(by_commit).answer == fetched.answer
    assert user.run(LOCATE, revision="other").exit_code == 4
    assert not user.hub.requests


def test_a_dropped_connection_continues_where_it_broke(user: Attempts) -> None:
    """The client keeps whole pieces of 10 MiB, so more than one has to arrive first."""
    weights = bytes(range(256)) * (12 << 12)
    user.hub.files = {**FILES, "model.safetensors": weights}
    user.hub.cut["model.safetensors"] = 11 << 20
    fetched = user.run()
    assert fetched.exit_code == 0, fetched.errors
    assert fetched.files()["model.safetensors"] == weights
    assert [r for _, _, r in user.hub.requests if r] == [f"bytes={10 << 20}-"]


def test_a_failed_fetch_keeps_what_arrived(user: Attempts) -> None:
    user.hub.broken.add("model.safetensors")
    failed = user.run()
    assert failed.exit_code == 5
    assert "error[E507]: the download failed" in failed.errors
    assert "files that arrived are kept" in failed.errors
    partial = user.run(LOCATE)
    assert (partial.exit_code, "or not all of it" in partial.errors) == (4, True)

    user.hub.broken.clear()
    arrived = {name for name in downloads(user.hub) if name in ("config.json", "tokenizer.json")}
    user.hub.requests.clear()
    fetched = user.run()
    assert fetched.files() == {name: FILES[name] for name in WANTED}
    assert not arrived & set(downloads(user.hub))
    assert "model.safetensors" in downloads(user.hub)


def test_offline_needs_a_complete_cache(user: Attempts) -> None:
    offline = user.run(HF_HUB_OFFLINE="1")
    assert offline.exit_code == 5
    assert "error[E506]" in offline.errors
    assert "unset HF_HUB_OFFLINE" in offline.errors
    assert not user.hub.requests
    fetched = user.run()
    assert user.run(HF_HUB_OFFLINE="1").answer == fetched.answer


def test_an_unreachable_hub_is_a_network_error(user: Attempts) -> None:
    # Port 9 is never listening here; the cache is empty.
    failed = user.run(HF_ENDPOINT="http://127.0.0.1:9")
    assert failed.exit_code == 5
    assert "error[E506]: the hub cannot be reached" in failed.errors


def test_a_private_repository_needs_its_token(user: Attempts) -> None:
    user.hub.token = "hf_secret"
    refused = user.run()
    assert refused.exit_code == 5
    assert "error[E504]" in refused.errors
    assert "set HF_TOKEN" in refused.errors
    wrong = user.run(HF_TOKEN="hf_wrong")
    assert (wrong.exit_code, "hf_wrong" in wrong.errors) == (5, False)
    assert user.run(HF_TOKEN="hf_secret").exit_code == 0


@pytest.mark.parametrize(
    ("repo", "revision", "code"),
    [
        ("owner/other", "main", "E505"),
        ("owner/name", "v9", "E505"),
        ("owner/na me", "main", "E505"),
    ],
)
def test_what_does_not_exist_is_named(user: Attempts, repo: str, revision: str, code: str) -> None:
    failed = user.run(repo=repo, revision=revision)
    assert failed.exit_code == 5
    assert f"error[{code}]" in failed.errors
    assert f" --> {repo}@{revision}" in failed.errors


def test_a_repository_without_weights_is_refused(user: Attempts) -> None:
    user.hub.files = {"config.json": b"{}"}
    failed = user.run()
    assert (failed.exit_code, "holds no safetensors files" in failed.errors) == (5, True)


def test_the_disk_is_checked_before_the_first_byte(user: Attempts) -> None:
    failed = user.run(FULL_DISK + FETCH)
    assert failed.exit_code == 5
    assert "error[E501]" in failed.errors
    assert "100000 are free" in failed.errors
    assert not [path for path in downloads(user.hub) if path in WANTED]


def test_locate_prefers_the_folder_given_by_hand(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    checkpoint = Checkpoint(path=str(theirs))
    assert locate(checkpoint, ours) == ours
    assert locate(checkpoint) == theirs
    for override, setting in ((tmp_path / "no", "--checkpoint"), (None, "checkpoint.path")):
        with pytest.raises(CompileError, match=f"the folder of {setting} does not exist") as caught:
            locate(Checkpoint(path=str(tmp_path / "gone")), override)
        assert caught.value.exit_code == 4


def test_locate_tells_how_to_make_synthetic_weights(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        locate(Checkpoint(synthetic=3), spec="nano.yaml")
    assert caught.value.exit_code == 4
    assert "deepinfer-compile nano.yaml --write-checkpoint DIR --seed 3" in str(caught.value)
    assert locate(Checkpoint(synthetic=3), tmp_path) == tmp_path
