"""The example scripts run as they say."""

import ast
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from deepinfer_compile.runtime import LLM, SamplingParams
from tests import engines

REPO = Path(__file__).parents[2]


def run(script, engine):
    command = [sys.executable, "-W", "error", str(REPO / "examples" / script), str(engine)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_offline_inference_prints_prompts_and_texts_and_repeats_them(nano_engine):
    first, second = (run("offline_inference.py", nano_engine) for _ in range(2))
    assert first.stderr == ""
    lines = first.stdout.splitlines()
    assert [line.startswith("Prompt: '") for line in lines] == [True] * 3
    assert all(len(line.partition("generated text: ")[2]) > 20 for line in lines)
    assert second.stdout == first.stdout  # its sampling is seeded


def test_deterministic_needs_an_engine_that_was_checked_and_repeats_itself(nano_engine):
    script = str(REPO / "examples" / "deterministic.py")
    command = [sys.executable, "-W", "error", script]
    checked = engines.example_engine(
        "v41_nano",
        "engine.batch_invariant=true",
        "engine.probes=true",
        "engine.max_requests=64",
        "engine.cache_tokens=8192",
    )
    done = subprocess.run([*command, str(checked)], capture_output=True, text=True, check=True)
    *runs, last = done.stdout.splitlines()
    assert (len(runs), last) == (9, "identical")
    assert len({line.partition(": ")[2] for line in runs}) == 1
    refused = subprocess.run([*command, str(nano_engine)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "batch_invariant=True: the engine was compiled with False" in refused.stderr


def test_structured_output_prints_texts_of_every_form(nano_engine):
    out = run("structured_output.py", nano_engine).stdout.splitlines()
    order, date, total, choice = (
        ast.literal_eval(line.partition("generated text: ")[2]) for line in out
    )
    parsed = json.loads(order)
    assert parsed["item"] in ("tea", "coffee", "cake")
    assert parsed["count"] in range(1, 10)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", date)
    assert re.fullmatch(r"[0-9+()]+", total)
    assert eval(total, {"__builtins__": {}}) >= 2
    thought, _, answer = choice.rpartition("</think>")
    assert thought
    assert answer in ("yes", "no")


class Server:
    """`serve.py` as a process; answers are read while it runs."""

    def __init__(self, engine, max_tokens):
        script = str(REPO / "examples" / "serve.py")
        command = [sys.executable, "-W", "error", script, str(engine), str(max_tokens)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stderr.readline() == f"serving {engine}\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.stderr.readline()

    def rest(self):
        """The answers that follow, the last words and the exit status."""
        answers = [json.loads(line) for line in self.process.stdout]
        return answers, self.process.stderr.read(), self.process.wait(60)


def ended(metrics, reason):
    pattern = rf'request_success_total{{.*finished_reason="{reason}"}} (\d+)'
    return int(re.search(pattern, metrics)[1])


def test_serve_answers_everybody_who_asked_before_sigterm(nano_engine):
    """Who was answered has asked again before the signal is seen, so answers are on their way."""
    with Server(nano_engine, 100) as server:
        first = server.answer()
        assert server.signal() == "draining\n"
        rest, metrics, status = server.rest()
    answers = [first, *rest]
    assert status == 0
    assert len(answers) > 4
    prompts = sorted({answer["prompt"] for answer in answers})
    llm = LLM(nano_engine)
    texts = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False
    )
    llm.close()
    expect = dict(zip(prompts, texts, strict=True))
    assert all(answer["text"] == expect[answer["prompt"]] for answer in answers)
    assert len(answers) == ended(metrics, "length") + ended(metrics, "stop")
    assert ended(metrics, "abort") == 0
    assert 'num_requests_running{model_name="v41_nano"} 0' in metrics


def test_serve_ends_at_once_on_a_second_signal(nano_engine):
    with Server(nano_engine, 900) as server:
        assert server.signal(signal.SIGINT) == "draining\n"
        begin = time.monotonic()
        assert server.signal() == "aborting\n"
        rest, metrics, status = server.rest()
    assert status == 0
    assert time.monotonic() - begin < 5
    aborted = [answer for answer in rest if answer["finish_reason"] == "abort"]
    assert ended(metrics, "abort") == len(aborted) > 0
