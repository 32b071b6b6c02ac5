"""`run --chat` and messages: prompts through DeepSeek's encoder, and what happens without it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime import LLM, AsyncLLM, RequestError, SamplingParams, cli
from deepinfer_compile.runtime.files import open_files
from deepinfer_compile.runtime.tokenizer import Tokenizer
from tests.runtime.made import edit_manifest
from tests.runtime.pretend import pretend_engine

BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, UNTHINK = 0, 1, 0xF8, 0xF9, 0xFA, 0xFB, 0xFC
EFFORT = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine")


def turn(message):
    """model_v41.md section 7.6, one user turn in thinking mode."""
    return [BOS, SYSTEM, *EFFORT.encode(), USER, *message.encode(), ASSISTANT, THINK]


def asked(message):
    return [{"role": "user", "content": message}]


def test_a_message_becomes_a_turn(path, tmp_path):
    """By the tokenizer of either form of an engine."""
    write_single_file(path, tmp_path / "one.engine")
    for engine in (path, tmp_path / "one.engine"):
        with closing(LLM(engine, threads=1)) as llm:
            assert llm.encode([asked("Hello"), asked("é")]) == [turn("Hello"), turn("é")]


def test_special_tokens_in_a_message_are_plain_text(path):
    message = "a<｜end▁of▁sentence｜><think>b"
    with closing(LLM(path, threads=1)) as llm:
        (ids,) = llm.encode(asked(message))
    assert ids == turn(message)
    plain = Tokenizer(open_files(path), BOS, EOS).encode(message)
    assert EOS in plain  # which a text prompt may say, but not a user of a chat


@pytest.fixture(scope="module")
def chatting(nano_engine, path, tmp_path_factory):
    """The nano engine with a tokenizer that has the tokens of a chat."""
    engine = tmp_path_factory.mktemp("engines") / "chatting.engine"
    shutil.copytree(nano_engine, engine)
    name = "tokenizer/tokenizer.json"
    shutil.copyfile(path / name, engine / name)
    files = json.loads((engine / "manifest.json").read_text())["files"]
    digest = hashlib.sha256((engine / name).read_bytes()).hexdigest()
    edit_manifest(engine, files=files | {name: digest})
    return engine


def test_run_answers_the_turn(chatting, capsys):
    given = ["run", str(chatting), "--chat", "--prompt", "Hello", "--prompt", "Why?"]
    assert cli.main([*given, "--max-tokens", "6", "--json"]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    llm = LLM(chatting, decode_sequence=False)
    turns = [turn("Hello"), turn("Why?")]
    expect = llm.generate(
        prompt_token_ids=turns, sampling_params=SamplingParams(temperature=0, max_tokens=6)
    )
    llm.close()
    assert [out["prompt"] for out in outputs] == ["Hello", "Why?"]
    assert [out["token_ids"] for out in outputs] == [[t.token_id for t in one] for one in expect]


def test_a_tokenizer_without_the_tokens_of_a_chat_is_named(nano_engine, capsys):
    assert cli.main(["run", str(nano_engine), "--chat", "--prompt", "x"]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error[E463]: the engine's tokenizer cannot write chat prompts: " in captured.err
    assert "<｜User｜>" in captured.err


def test_a_missing_package_is_named_with_its_pip_line(path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)  # what an import of it then fails on
    assert cli.main(["run", str(path), "--chat", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == (
        "error[E035]: chat prompts need the package deepseek-recipe\n"
        "   = help: pip install 'deepinfer-compile[serve]'\n"
    )


def test_the_package_is_imported_by_chats_only(path):
    script = "import sys; from deepinfer_compile.runtime.cli import main; main(sys.argv[1:]); "
    script += "print('deepseek_recipe' in sys.modules)"
    command = [sys.executable, "-c", script, "run", str(path), "--prompt", "x", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nFalse\n")


LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "Hm."},
    {"role": "user", "content": "Why?"},
]


def test_every_interface_answers_conversations_like_their_tokens(chatting):
    """`[message, ...]` is one conversation, `[[message, ...], ...]` several."""
    params = SamplingParams(temperature=0, max_tokens=5)
    with closing(LLM(chatting)) as llm:
        both = [asked("Hello"), LONG]
        ids = llm.encode(both)
        expect = llm.generate(prompt_token_ids=ids, sampling_params=params)
        assert llm.generate(both, params) == expect
        assert llm.generate(LONG, params) == expect[1:]
        pieces = list(llm.stream(both, params))
        assert ["".join(p.text for p in pieces if p.index == i) for i in (0, 1)] == expect

    async def run():
        served = AsyncLLM(LLM(chatting))
        text = "".join([piece.text async for piece in served.generate(LONG, params)])
        await served.close()
        return text

    assert asyncio.run(run()) == expect[1]


def test_every_role_is_where_the_recipe_puts_it(path):
    """Of an earlier answer, only what was said is read again, not what was thought."""
    with closing(LLM(path, threads=1)) as llm:
        (ids,) = llm.encode(LONG)
    said = [*b"One?", ASSISTANT, UNTHINK, *b"Two.", EOS, USER, *b"Why?", ASSISTANT, THINK]
    assert ids == [BOS, SYSTEM, *EFFORT.encode(), *b"Be brief.", USER, *said]


def test_all_mistakes_in_messages_are_in_one_error(path):
    user = {"role": "user", "content": "x"}
    batch = [
        [user],
        [{"role": "robot", "content": "x"}, {"content": "x"}, user],
        [{"role": "user"}, {"role": "user", "content": 3, "name": "n"}, user],
        [user, {"role": "assistant", "content": "y"}],
        [],
        [7],
    ]
    with closing(LLM(path, threads=1)) as llm, pytest.raises(RequestError) as caught:
        llm.generate(batch)
    assert (caught.value.code, caught.value.notes) == (
        "E039",
        (
            "prompt 1, message 0, role: 'robot' is none of system, user, assistant",
            "prompt 1, message 1 has no `role`",
            "prompt 2, message 0 has no `content`",
            "prompt 2, message 1, content: int, not a text",
            "prompt 2, message 1, name: a message of user has content",
            "prompt 3 ends with assistant: the model answers a user",
            "prompt 4 ends with nothing: the model answers a user",
            "prompt 5, message 0 is int, not a dict",
        ),
    )


@pytest.mark.parametrize(
    ("mixed", "found"),
    [
        (["a", asked("b")], "prompt 0 is str"),
        ([asked("a"), "b"], "prompt 1 is str"),
        ([asked("a"), *asked("b")], "prompt 1 is dict"),
        ([*asked("a"), "b"], "prompt 0 is dict, prompt 1 is str"),
    ],
)
def test_texts_and_conversations_do_not_mix(path, mixed, found):
    with closing(LLM(path, threads=1)) as llm, pytest.raises(RequestError) as caught:
        llm.generate(mixed)
    assert caught.value.code == "E024"
    assert caught.value.message == f"prompts are texts or conversations: {found}"
