"""`POST /profile`: every status, and traces of what really ran."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepinfer_compile.runtime import LLM, EngineError, SamplingParams
from deepinfer_compile.runtime.profile_server import Patience, ProfileServer
from deepinfer_compile.runtime.tracer import Traced, Tracer
from tests.runtime.pretend import PLAN, answer, pretend_engine


class FakeExecutor:
    """What the server knows of an executor; `step` is what a step loop does to a tracer."""

    def __init__(self):
        self.tracer = None
        self.asked = threading.Event()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "tracer" and value is not None:
            self.asked.set()

    def phase(self, name):
        return next(phase for phase in PLAN.phases if phase.name == name)

    def step(self, forward, rows):
        for phase, count in ((forward, rows), ("sample", 1)):
            tracer = self.tracer
            if tracer is not None and tracer.wants(phase):
                tracer.run(phase, count, 0, len(self.phase(phase).steps), lambda number: None)


@contextmanager
def serving(executor, folder, **patience):
    server = ProfileServer(executor, "made", folder, 0, Patience(**patience))
    try:
        yield server
    finally:
        server.close()


def ask(server, query="", body=None, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, f"/profile{query}", body)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def later(deed):
    """Runs in a thread of its own; returns what waits for its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(deed()))
    thread.start()

    def result():
        thread.join(30)
        return found[0]

    return result


def test_a_trace_has_an_event_for_each_launch_of_the_steps(tmp_path):
    executor = FakeExecutor()
    with serving(executor, tmp_path / "unused") as server:
        executor.step("decode", 1)  # before anybody asked
        answered = later(lambda: ask(server, f"?num_steps=3&output_dir={tmp_path}"))
        assert executor.asked.wait(10)
        for phase, rows in (("prefill", 5), ("decode", 2), ("decode", 1), ("decode", 4)):
            executor.step(phase, rows)
        status, said = answered()
    assert (status, said["status"], said["gpu_id"]) == (200, "ok", 0)
    (file,) = tmp_path.iterdir()
    assert str(file) == said["trace_file"]
    events = json.loads(file.read_text())["traceEvents"]
    assert [(e["args"]["step"], e["cat"], e["name"], e["args"]["rows"]) for e in events] == [
        (step, *one)
        for step, phase, rows in ((0, "prefill", 5), (1, "decode", 2), (2, "decode", 1))
        for one in (
            (phase, "remember", rows),
            (phase, "scale", rows),
            ("sample", "sample", 1),
        )
    ]
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)


def test_one_profile_at_a_time(tmp_path):
    executor = FakeExecutor()
    with serving(executor, tmp_path) as server:
        first = later(lambda: ask(server, "?num_steps=1"))
        assert executor.asked.wait(10)
        status, said = ask(server)
        assert (status, said["message"]) == (409, "another profile is being taken")
        executor.step("decode", 1)
        assert first()[0] == 200
        executor.asked.clear()
        second = later(lambda: ask(server, "?num_steps=1"))
        assert executor.asked.wait(10)
        executor.step("decode", 1)
        assert second()[0] == 200


def test_nothing_to_trace_is_503_and_forgotten(tmp_path):
    executor = FakeExecutor()
    with serving(executor, tmp_path, begin=0.05) as server:
        assert ask(server) == (
            503,
            {"status": "error", "message": "no step began within 0.05 s", "gpu_id": 0},
        )
        assert executor.tracer is None
    assert list(tmp_path.iterdir()) == []


def test_too_few_steps_are_503(tmp_path):
    executor = FakeExecutor()
    with serving(executor, tmp_path, end=0.05) as server:
        answered = later(lambda: ask(server, "?num_steps=2"))
        assert executor.asked.wait(10)
        executor.step("decode", 1)
        assert answered()[1]["message"] == "2 steps did not end within 0.05 s"
    assert list(tmp_path.iterdir()) == []


def test_closing_answers_who_waits(tmp_path):
    executor = FakeExecutor()
    with serving(executor, tmp_path) as server:
        answered = later(lambda: ask(server))
        assert executor.asked.wait(10)
    assert answered()[0] == 503


STEPS = "num_steps: a whole number from 1 to 50"


@pytest.mark.parametrize(
    ("query", "body", "message"),
    [
        ("?num_steps=0", None, STEPS),
        ("?num_steps=51", None, STEPS),
        ("?num_steps=2.0", None, STEPS),
        ("?num_steps=", None, STEPS),
        ("", '{"num_steps": true}', STEPS),
        ("?num_steps=3", '{"num_steps": null}', STEPS),  # the body wins
        ("?output_dir=/nowhere", None, "output_dir: a folder of this machine"),
        ("", '{"output_dir": 3}', "output_dir: a folder of this machine"),
        ("?steps=3", '{"num_steps": 0}', f"unknown: steps; {STEPS}"),
        ("", "[3]", "the body is no JSON object of at most 65536 bytes"),
        ("", "{", "the body is no JSON object of at most 65536 bytes"),
        ("", b"\xff", "the body is no JSON object of at most 65536 bytes"),
        ("", " " * 65537, "the body is no JSON object of at most 65536 bytes"),
    ],
)
def test_bad_input_is_400(tmp_path, query, body, message):
    with serving(FakeExecutor(), tmp_path) as server:
        assert ask(server, query, body) == (
            400,
            {"status": "error", "message": message, "gpu_id": 0},
        )


def test_other_pages_are_404(tmp_path):
    with serving(FakeExecutor(), tmp_path) as server:
        assert ask(server, "r")[0] == 404


def test_a_trace_that_cannot_be_written_is_500(tmp_path):
    executor = FakeExecutor()
    with serving(executor, tmp_path) as server:
        server._name = "no/such"
        answered = later(lambda: ask(server, "?num_steps=1"))
        assert executor.asked.wait(10)
        executor.step("decode", 1)
        assert answered()[0] == 500


def test_a_last_step_that_samples_nothing_ends_with_the_next():
    """As a chunk of a prompt does."""
    times = iter(range(10))
    tracer = Tracer(1, lambda: next(times))
    assert tracer.wants("prefill")
    tracer.run("prefill", 8, 0, 1, lambda number: None)
    assert not tracer.done.is_set()
    assert not tracer.wants("prefill")
    assert tracer.done.is_set()
    assert tracer.launches == (Traced(0, "prefill", 0, 8, 0, 1),)
    assert not tracer.cancel()


def test_an_engine_is_profiled_while_it_answers_and_answers_the_same(tmp_path, monkeypatch):
    path = pretend_engine(tmp_path / "e")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("DEEPINFER_PROFILE_HTTP_ENABLE", "1")
    monkeypatch.setenv("DEEPINFER_PROFILE_HTTP_PORT_BASE", str(port))
    monkeypatch.setenv("DEEPINFER_TORCH_PROFILER_DIR", str(tmp_path))
    with LLM(path, threads=1, decode_sequence=False) as llm:
        with pytest.raises(EngineError, match=rf"E245.*port {port}: ") as refused:
            LLM(path, threads=1)
        assert "DEEPINFER_PROFILE_HTTP_PORT_BASE" in refused.value.help
        answered = later(lambda: ask(llm._profile, method="GET"))
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        while llm.engine.executor.tracer is None:
            pass
        (tokens,) = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=params)
        status, said = answered()
    assert [one.token_id for one in tokens] == answer([5, 6], 50, ignore_eos=True)
    assert status == 200
    events = json.loads(Path(said["trace_file"]).read_text())["traceEvents"]
    assert [event["args"]["step"] for event in events] == [n for n in range(20) for _ in range(3)]
    times = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    assert times == sorted(times)
    with pytest.raises(ConnectionRefusedError):
        ask(llm._profile)


def test_nothing_listens_unless_asked(tmp_path):
    with LLM(pretend_engine(tmp_path / "e"), threads=1) as llm:
        assert llm._profile is None
