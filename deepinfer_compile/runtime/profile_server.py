"""DeepInfer's profile endpoint: `POST /profile` answers when a Chrome trace is on disk.

    curl -X POST 'http://localhost:6070/profile?num_steps=5'
    {"status": "ok", "message": "...", "gpu_id": 0, "trace_file": "traces/profile-nano-....json"}

`num_steps` (1 to 50, default 20) and `output_dir` come from the query or a JSON object, which wins.
400: bad input. 409: another profile is being taken. 503: no step began in time, or they did not
end. It listens on this machine only, as whoever reaches it chooses where files are written.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.text_file import write_text
from deepinfer_compile.runtime.tracer import Traced, Tracer

_MOST_STEPS = 50
_MOST_BYTES = 1 << 16  # of a request's body
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for the first step, and from there for the last: DeepInfer's."""

    begin: float = 30.0
    end: float = 600.0


@dataclass(frozen=True)
class _Ask:
    num_steps: int
    output_dir: Path


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        self.status = status
        super().__init__(message)


class ProfileServer:
    """One for an engine, in threads of its own. Port 0 is any free one. E245: it is taken."""

    def __init__(
        self,
        executor: Executor,
        name: str,
        folder: Path,
        port: int,
        patience: Patience | None = None,
    ) -> None:
        self._executor = executor
        self._name = name
        self._folder = folder
        self._patience = patience or Patience()
        self._busy = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server._answer(self)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        try:
            self._http = ThreadingHTTPServer((_HOST, port), Handler)
        except (OSError, OverflowError) as failure:
            help = "set DEEPINFER_PROFILE_HTTP_PORT_BASE to a free port"
            message = f"the profile server cannot listen on port {port}: {failure}"
            raise EngineError("E245", message, help=help) from None
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="deepinfer-profile", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._http.server_port

    def close(self) -> None:
        """Who waits for a profile gets 503."""
        tracer = self._executor.tracer
        if tracer is not None:
            tracer.cancel()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _answer(self, http: BaseHTTPRequestHandler) -> None:
        try:
            file = self._profile(_read(http, self._folder))
            status, said = HTTPStatus.OK, {"status": "ok", "message": "the trace is on disk"}
            said |= {"trace_file": str(file)}
        except _Refused as refused:
            status, said = refused.status, {"status": "error", "message": str(refused)}
        except Exception as failure:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            said = {"status": "error", "message": f"{type(failure).__name__}: {failure}"}
        body = json.dumps({**said, "gpu_id": 0}).encode()
        with suppress(OSError):  # who asked may be gone
            http.send_response(status)
            http.send_header("Content-Type", "application/json")
            http.send_header("Content-Length", str(len(body)))
            http.end_headers()
            http.wfile.write(body)

    def _profile(self, ask: _Ask) -> Path:
        if not self._busy.acquire(blocking=False):
            raise _Refused(HTTPStatus.CONFLICT, "another profile is being taken")
        try:
            launches = self._trace(ask.num_steps)
            file = ask.output_dir / f"profile-{self._name}-{time.time_ns() // 1_000_000}.json"
            write_text(file, "".join(self._chrome(launches)))
            return file
        finally:
            self._busy.release()

    def _trace(self, steps: int) -> tuple[Traced, ...]:
        tracer = Tracer(steps)
        self._executor.tracer = tracer
        try:
            for event, seconds, what in (
                (tracer.begun, self._patience.begin, "no step began"),
                (tracer.done, self._patience.end, f"{steps} steps did not end"),
            ):
                if not tracer.wait(event, seconds) and tracer.cancel():
                    message = f"{what} within {seconds:g} s"
                    raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, message)
        finally:
            self._executor.tracer = None
        return tracer.launches

    def _chrome(self, launches: tuple[Traced, ...]) -> Iterator[str]:
        """Chrome's trace format, an event for each launch, spelled one by one: the step loop gets
        its turns meanwhile."""
        yield '{"displayTimeUnit": "ms", "traceEvents": ['
        for i, one in enumerate(launches):
            kernel = self._executor.phase(one.phase).steps[one.launch].at(one.rows).kernel
            event = {
                "name": kernel,
                "cat": one.phase,
                "ph": "X",
                "ts": one.began / 1000,
                "dur": (one.ended - one.began) / 1000,
                "pid": 0,
                "tid": 0,
                "args": {"step": one.step, "launch": one.launch, "rows": one.rows},
            }
            yield (",\n" if i else "\n") + json.dumps(event)
        yield "\n]}\n"


def _read(http: BaseHTTPRequestHandler, folder: Path) -> _Ask:
    """What is asked; `_Refused` with everything that is wrong with it."""
    url = urlsplit(http.path)
    if url.path != "/profile":
        raise _Refused(HTTPStatus.NOT_FOUND, f"no such page: {url.path}; ask /profile")
    found: dict[str, object] = {**dict(parse_qsl(url.query, keep_blank_values=True)), **_body(http)}
    steps, place = _steps(found.pop("num_steps", 20)), found.pop("output_dir", str(folder))
    problems = [f"unknown: {name}" for name in found]
    if steps is None:
        problems.append(f"num_steps: a whole number from 1 to {_MOST_STEPS}")
    if not isinstance(place, str) or not Path(place).is_dir():
        problems.append("output_dir: a folder of this machine")
    if steps is None or problems:
        raise _Refused(HTTPStatus.BAD_REQUEST, "; ".join(problems))
    return _Ask(steps, Path(str(place)))


def _steps(given: object) -> int | None:
    """From a query a text, from JSON a number; true is none."""
    if isinstance(given, str) and given.isascii() and given.isdigit():
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= _MOST_STEPS:
        return given
    return None


def _body(http: BaseHTTPRequestHandler) -> dict[str, object]:
    try:
        length = int(http.headers.get("Content-Length") or 0)
        if not 0 <= length <= _MOST_BYTES:
            raise ValueError
        body = json.loads(http.rfile.read(length)) if length else {}
        if isinstance(body, dict):
            return body
    except ValueError:
        pass
    message = f"the body is no JSON object of at most {_MOST_BYTES} bytes"
    raise _Refused(HTTPStatus.BAD_REQUEST, message)
