"""A stand-in for the Hugging Face hub on 127.0.0.1: as much of its API as a snapshot needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """One repository `owner/name`, and how the hub misbehaves."""

    files: Mapping[str, bytes]
    repo: str = "owner/name"
    token: str = ""  # when set, every request must carry it
    cut: dict[str, int] = field(default_factory=dict)  # first answer for a file ends early
    broken: set[str] = field(default_factory=set)  # files that answer 500
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    endpoint: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            _answer(self, hub)

        def do_GET(self) -> None:
            _answer(self, hub)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = request.path.partition("?")[0]
    hub.requests.append((request.command, path, request.headers.get("Range", "")))
    if hub.token and request.headers.get("Authorization") != f"Bearer {hub.token}":
        return _send(request, 401, b'{"error": "Invalid username or password."}')
    api, resolve = f"/api/models/{hub.repo}/", f"/{hub.repo}/resolve/"
    if path in (f"{api}revision/main", f"{api}revision/{COMMIT}"):
        siblings = [{"rfilename": name} for name in hub.files]
        facts = {"id": hub.repo, "sha": COMMIT, "siblings": siblings}
        return _send(request, 200, json.dumps(facts).encode())
    if path == f"{api}tree/{COMMIT}":
        rows = [
            {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
            for name, data in hub.files.items()
        ]
        return _send(request, 200, json.dumps(rows).encode())
    if path.startswith(api):
        return _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
    if path.startswith(resolve):
        name = path.removeprefix(resolve).partition("/")[2]
        if name in hub.files:
            return _file(request, hub, name)
    return _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})


def _file(request: BaseHTTPRequestHandler, hub: Hub, name: str) -> None:
    data = hub.files[name]
    headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    if request.command == "GET" and name in hub.broken:
        return _send(request, 500, b"")
    begin = request.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
    if begin:
        headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return _send(request, 206, data[int(begin) :], headers)
    if request.command == "GET" and name in hub.cut:
        return _send(request, 200, data, headers, cut=hub.cut.pop(name))
    return _send(request, 200, data, headers)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    cut: int | None = None,
) -> None:
    request.send_response(status)
    for key, value in (headers or {}).items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:cut])
    if cut is not None:
        request.close_connection = True


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
