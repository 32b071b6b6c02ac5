"""LLM, step loop and command line over a pretended model: every token is checked."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime import LLM, EngineError, RequestError, SamplingParams, cli
from deepinfer_compile.runtime.executor import Walk
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.request_rows import Span, fill_rows, set_pages
from deepinfer_compile.runtime.snapshot import restore_state, save_state
from tests.runtime.pretend import PLAN, answer, most_likely, next_token, pretend_engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine")


@pytest.fixture(scope="module")
def llm(path):
    llm = LLM(path, threads=1, decode_sequence=False)
    yield llm
    llm.close()


def greedy(count=16, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


def tokens(outputs):
    return [[token.token_id for token in one] for one in outputs]


prompts = st.lists(st.lists(st.integers(2, 255), min_size=1, max_size=40), min_size=1, max_size=6)


@given(prompts, st.integers(1, 30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_batch_answers_as_each_prompt_alone(llm, batch, count, ignore):
    outputs = llm.generate(prompt_token_ids=batch, sampling_params=greedy(count, ignore_eos=ignore))
    assert tokens(outputs) == [answer(p, count, ignore_eos=ignore) for p in batch]


def test_each_prompt_has_its_own_parameters_and_order_is_kept(llm):
    batch = [[7] * 30, [9], [3, 4, 5]]
    params = [
        greedy(20, ignore_eos=True),
        SamplingParams(temperature=0.7, seq_seed=2**64 - 3, max_tokens=1),
        SamplingParams(temperature=1.0, seq_seed=99, max_tokens=9, ignore_eos=True),
    ]
    outputs = llm.generate(prompt_token_ids=batch, sampling_params=params)
    assert tokens(outputs) == [
        answer(batch[0], 20, ignore_eos=True),
        answer(batch[1], 1, 0.7, 2**64 - 3),
        answer(batch[2], 9, 1.0, 99, ignore_eos=True),
    ]
    first = outputs[0][0].request_id
    assert [one[0].request_id for one in outputs] == [first, first + 1, first + 2]


def test_filters_reach_the_rows_of_their_request(llm):
    filters = [(0.5, 7, 0.0), (1.0, -1, 0.25), (0.125, 2**31 - 1, 1.0)]
    params = [
        SamplingParams(seq_seed=3, max_tokens=9, top_p=p, top_k=k, min_p=m, ignore_eos=True)
        for p, k, m in filters
    ]
    outputs = llm.generate(prompt_token_ids=[[9, 9]] * 3, sampling_params=params)
    expect = [answer([9, 9], 9, 1.0, 3, ignore_eos=True, filters=f) for f in filters]
    assert tokens(outputs) == expect
    assert len({tuple(one) for one in expect}) == 3


def test_lists_are_as_long_as_each_request_asked(llm):
    params = [greedy(4, ignore_eos=True, top_logprobs=n) for n in (0, 5, 1000)]
    outputs = llm.generate(prompt_token_ids=[[9], [8], [7]], sampling_params=params)
    for one, count in zip(outputs, (0, 5, 1000), strict=True):
        for token in one:
            ids, logprobs = most_likely(token.token_id, token.token_logprobs, count)
            assert (token.top_token_ids, token.top_logprobs) == (ids, logprobs)


def spelled(generated):
    """What the pretended tokens say: bytes, without the special ones."""
    return bytes(t for t in generated if t not in (0, 1, *range(0xF8, 0xFD))).decode(
        errors="replace"
    )


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_text_and_the_request(path, length):
    """Any piece of what would be generated, with a neighbour that goes on."""
    whole = answer([0, *b"Hello"], 40, ignore_eos=True)
    other = answer([0, *b"a"], 40, ignore_eos=True)
    llm = LLM(path, threads=1)
    pieces_of_it = [spelled(whole)[i : i + length] for i in range(0, 36, 3)]
    stops = [piece for piece in pieces_of_it if len(piece) == length and "�" not in piece]
    assert len(stops) > 2
    for stop in stops:
        params = [greedy(40, ignore_eos=True, stop=["never", stop]), greedy(40, ignore_eos=True)]
        text, beside = llm.generate(["Hello", "a"], params)
        assert text == spelled(whole)[: spelled(whole).index(stop)]
        assert beside == spelled(other)
        pieces = [p for p in llm.stream(["Hello", "a"], params) if p.index == 0]
        assert "".join(p.text for p in pieces) == text
        assert [p.token.finish_reason for p in pieces] == [""] * (len(pieces) - 1) + ["stop"]
        generated = [p.token.token_id for p in pieces]
        assert generated == whole[: len(generated)]
        assert stop in spelled(generated)
        assert stop not in spelled(generated[:-1])
    llm.close()


def test_token_results_stop_at_strings_too(llm, path):
    whole = answer([5, 6], 20, ignore_eos=True)
    stop = spelled(whole)[7]
    params = greedy(20, ignore_eos=True, stop=stop)
    (one,) = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=params)
    found = [token.token_id for token in one]
    assert found == whole[: len(found)]
    assert stop in spelled(found)
    assert one[-1].finish_reason == "stop"


def test_stop_tokens_end_a_request_even_when_the_end_token_does_not(path):
    whole = answer([0, *b"Hello"], 30, ignore_eos=True)
    llm = LLM(path, threads=1)
    params = greedy(30, ignore_eos=True, stop_token_ids=[whole[6], 255])
    pieces = list(llm.stream("Hello", params))
    found = [piece.token.token_id for piece in pieces]
    assert found == whole[: whole.index(whole[6]) + 1]
    assert pieces[-1].token.finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == spelled(found[:-1])
    with pytest.raises(RequestError, match="stop_token_ids outside the vocabulary: 256, 999"):
        llm.generate("a", greedy(stop_token_ids=[5, 256, 999]))
    llm.close()


def test_what_was_held_back_is_text_when_the_request_ends(path):
    whole = spelled(answer([0, *b"Hello"], 12, ignore_eos=True))
    llm = LLM(path, threads=1)
    params = greedy(12, ignore_eos=True, stop=whole[-2:] + "more")
    assert llm.generate("Hello", params) == [whole]
    llm.close()


def test_outputs_carry_deepinfers_fields(llm):
    (one,) = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=greedy(3, ignore_eos=True))
    first, _, last = one
    assert (first.prompt_len, first.finished, first.finish_reason) == (2, False, "")
    assert (last.finished, last.finish_reason, last.num_output_tokens) == (True, "length", 3)
    assert first.token_logprobs == next_token([5, 6])[1]


def test_texts_come_back_in_request_order(path):
    llm = LLM(path, threads=1)
    texts = llm.generate(["Hello", "a"], greedy(12))
    tokenizer = llm.get_tokenizer()
    assert texts == [
        tokenizer.decode(answer([0, *b"Hello"], 12)),
        tokenizer.decode(answer([0, *b"a"], 12)),
    ]
    assert llm.generate("a", greedy(12)) == texts[1:]
    llm.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        llm.generate("a")


def test_text_streams_before_the_last_token_exists(path):
    llm = LLM(path, threads=1)
    stream = llm.stream(["Hello"], greedy(40, ignore_eos=True))
    ran = []
    run = llm.engine.executor.run
    llm.engine.executor.run = lambda *step: (ran.append(step), run(*step))
    next(stream)
    assert len(ran) <= 4, "one prefill, one decode step while its token is handed out"
    rest = "".join(piece.text for piece in stream)
    whole = llm.get_tokenizer().decode(answer([0, *b"Hello"], 40, ignore_eos=True))
    assert rest.endswith(whole[-3:])
    llm.close()


def test_requests_that_join_later_change_nobody(llm):
    executor = llm.engine.executor
    loop = StepLoop(PLAN, executor)
    batch = [[7] * 20, [9, 9], [4], [5, 5, 5]]
    arrived, found = {}, {}
    for step in range(200):
        if step % 3 == 0 and len(arrived) < len(batch):
            prompt = batch[len(arrived)]
            arrived[loop.submit(prompt, greedy(15, ignore_eos=True))] = prompt
        for event in loop.step():
            found.setdefault(event.id, []).append(event.choice.token)
    assert not loop.busy
    assert found == {i: answer(p, 15, ignore_eos=True) for i, p in arrived.items()}


@pytest.mark.parametrize("stop", [False, True])
def test_when_pages_run_out_the_youngest_waits_or_ends(tmp_path, stop):
    """Both fit when they begin; together they need eight pages of five."""
    limits = dataclasses.replace(PLAN.limits, pages=6)
    engine = pretend_engine(tmp_path / "e", dataclasses.replace(PLAN, limits=limits))
    llm = LLM(engine, threads=1, decode_sequence=False, stop_preempted_request=stop)
    batch = [[7] * 20, [9] * 18]
    outputs = llm.generate(prompt_token_ids=batch, sampling_params=greedy(40, ignore_eos=True))
    llm.close()
    alone = [answer(prompt, 40, ignore_eos=True) for prompt in batch]
    assert tokens(outputs)[0] == alone[0]
    if not stop:
        assert tokens(outputs)[1] == alone[1]
        return
    *made, end = outputs[1]
    assert [output.token_id for output in made] == alone[1][: len(made)]
    assert 0 < len(made) < 40
    assert (end.finished, end.finish_reason) == (True, "insufficient_system_resource")
    assert (end.token_id, end.num_output_tokens) == (made[-1].token_id, len(made))


def test_a_better_priority_is_served_first(llm):
    """Three requests for two slots: the third to come takes the place of the worst."""
    loop, ended = StepLoop(PLAN, llm.engine.executor), []
    ids = [
        loop.submit([5] * 9, greedy(12, ignore_eos=True), priority=1),
        loop.submit([6] * 9, greedy(12, ignore_eos=True), priority=2),
    ]
    loop.step()
    loop.step()
    ids.append(loop.submit([7] * 9, greedy(12, ignore_eos=True)))
    found = {}
    while loop.busy:
        for event in loop.step():
            found.setdefault(event.id, []).append(event.choice.token)
            ended += [event.id] if event.finish else []
    assert ended == [ids[0], ids[2], ids[1]]
    for id, token in zip(ids, (5, 6, 7), strict=True):
        whole = answer([token] * 9, 12, ignore_eos=True)
        assert found[id] == whole[-len(found[id]) :]


def test_an_aborted_request_ends_once_and_frees_its_slot(llm):
    loop = StepLoop(PLAN, llm.engine.executor)
    first = loop.submit([5], greedy(40, ignore_eos=True))
    loop.step()
    loop.abort(first)
    loop.abort(first)
    events = [event for _ in range(3) for event in loop.step()]
    assert [(e.id, e.finish) for e in events] == [(first, "abort")]
    assert not loop.busy


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ([], "E030", "the prompt is empty"),
        ([5, 256, -1], "E031", "token ids outside the vocabulary: 256, -1"),
        ([5] * 64, "E032", "the prompt has 64 tokens, this engine takes 63"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompt, code, message):
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt_token_ids=[[5], prompt])
    assert (caught.value.code, caught.value.message) == (code, message)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("ids", [[[0.5]], [["x"]], [[None]]])
def test_token_ids_are_whole_numbers(llm, ids):
    with pytest.raises(RequestError, match="token ids are whole numbers"):
        llm.generate(prompt_token_ids=ids)


def test_prompts_are_texts(llm):
    with pytest.raises(RequestError, match="prompts are texts"):
        llm.generate([3])


def test_arguments_that_do_not_fit_together_are_refused(llm):
    with pytest.raises(RequestError, match="2 prompts, but 1 lists"):
        llm.generate(["a", "b"], prompt_token_ids=[[1]])
    with pytest.raises(RequestError, match="1 prompts, but 2 sampling_params"):
        llm.generate("a", [greedy(), greedy()])
    with pytest.raises(RequestError, match="give prompts or prompt_token_ids"):
        llm.generate()
    with pytest.raises(EngineError, match="images are not yet served"):
        llm.generate("a", multi_modal_data=[{}])


def test_settings_are_checked_before_loading(path):
    with pytest.raises(RequestError) as caught:
        LLM(path, max_model_len=4096, expert_parallel_size=8)
    assert len(caught.value.notes) == 2
    LLM(model=path, max_model_len=64, trust_remote_code=True).close()


def test_a_full_context_is_served_to_its_last_place(llm):
    outputs = llm.generate(prompt_token_ids=[[5] * 60], sampling_params=greedy(99, ignore_eos=True))
    assert tokens(outputs) == [answer([5] * 60, 4, ignore_eos=True)]


def feed(executor, slot, known, first, phase="prefill"):
    rows = fill_rows(executor, [Span(slot, first, tuple(known[first:]))])
    executor.forward(phase, rows)


def test_saved_state_goes_on_in_another_slot_and_other_pages(path):
    engine = load_engine(path, threads=1)
    executor = engine.executor
    known = [(i * 37) % 250 + 2 for i in range(40)]
    for cut in (1, 3, 16, 17, 31, 39):
        set_pages(executor, 1, (1, 2, 3))
        for first in range(0, cut, 8):
            feed(executor, 1, known[: min(first + 8, cut)], first)
        snapshot = save_state(executor, 1, (1, 2, 3), cut)
        executor.memory["state"][:] = 0xEE  # nothing may be left to lean on
        restore_state(executor, snapshot, 2, (7, 4, 5))
        set_pages(executor, 2, (7, 4, 5))
        assert save_state(executor, 2, (7, 4, 5), cut) == snapshot
        feed(executor, 2, known[: cut + 1], cut, "decode")
        executor.rows["sample_row"][0] = 0
        executor.rows["temperature"][0] = 0
        assert executor.sample(1).token.tolist() == [next_token(known[: cut + 1])[0]]
    engine.close()


def test_snapshots_do_not_depend_on_what_lay_there_before(path):
    engine = load_engine(path, threads=1)
    set_pages(engine.executor, 1, (1, 2))
    feed(engine.executor, 1, [5, 6], 0)
    clean = save_state(engine.executor, 1, (1, 2), 2)
    engine.executor.memory["state"][:] = 0xEE
    feed(engine.executor, 1, [5, 6], 0)
    assert save_state(engine.executor, 1, (1, 2), 2) == clean
    assert {name: len(saved) for name, saved in clean.states.items()} == {"ring": 16, "pages": 8}
    engine.close()


def test_probes_are_read_and_replaced_between_steps(path):
    engine = load_engine(path, threads=1)
    executor = engine.executor
    set_pages(executor, 1, (1,))
    rows = fill_rows(executor, [Span(1, 0, (5, 6, 7))])
    probe = executor.probe("prefill", "layers.0.pre")
    walk = Walk(executor, "prefill", rows)
    walk.to(probe.step)
    value = executor.read(probe, rows)
    assert value.shape == (3, 1)
    executor.inject(probe, rows, np.ones((3, 1), dtype=np.int32))
    walk.finish()
    hidden = executor.view(9)
    assert hidden[:3].view(np.uint32).ravel().tolist() == [2654435761] * 3
    with pytest.raises(EngineError, match=r"no probe `layers\.1\.pre`"):
        executor.probe("prefill", "layers.1.pre")
    engine.close()


def test_too_many_rows_name_the_limit(llm):
    with pytest.raises(EngineError, match="decode of 5 rows: this engine runs 1 to 4"):
        llm.engine.executor.forward("decode", 5)


def test_memory_is_exactly_the_plan(llm):
    sizes = {kind.value: area.nbytes for kind, area in llm.engine.executor.memory.items()}
    assert sizes == {"state": 704, "io": 14784, "arena": 0}


def test_run_prints_text_on_stdout_and_notes_on_stderr(path, capsys):
    arguments = ["run", str(path), "--prompt", "Hello", "--prompt", "abc", "--max-tokens", "9"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    llm = LLM(path, threads=1)
    texts = llm.generate(["Hello", "abc"], greedy(9))
    llm.close()
    assert captured.out == f"{texts[0]}\n{texts[1]}\n"
    assert "tokens/s" in captured.err
    assert cli.main([*arguments, "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in facts["outputs"]] == texts
    assert facts["outputs"][0]["token_ids"] == answer([0, *b"Hello"], 9)


def test_run_reads_stdin_when_no_prompt_is_given(path):
    command = [sys.executable, "-m", "deepinfer_compile.runtime", "run", str(path), "-q"]
    given = [*command, "--max-tokens", "5"]
    piped = subprocess.run(given, input="Hello\n", capture_output=True, text=True, check=False)
    named = subprocess.run(
        [*given, "--prompt", "Hello"], capture_output=True, text=True, check=False
    )
    assert (piped.returncode, piped.stderr) == (0, "")
    assert piped.stdout == named.stdout != ""
    empty = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert empty.returncode == 2
    assert "error[E030]: the prompt is empty" in empty.stderr


def test_a_seed_on_the_command_line_repeats(path, capsys):
    given = ["run", str(path), "--prompt", "x", "--temperature", "1", "-q", "--seed"]
    texts = []
    for seed in ("7", "7", "8"):
        assert cli.main([*given, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_run_filters_stops_and_lists(path, capsys):
    given = ["run", str(path), "--prompt", "Hello", "--max-tokens", "9", "--json"]
    drawn = [
        "--temperature",
        "1",
        "--seed",
        "7",
        "--top-p",
        "0.5",
        "--top-k",
        "7",
        "--min-p",
        ".25",
    ]
    assert cli.main([*given, *drawn, "--logprobs", "2"]) == 0
    (out,) = json.loads(capsys.readouterr().out)["outputs"]
    assert out["token_ids"] == answer([0, *b"Hello"], 9, 1.0, 7, filters=(0.5, 7, 0.25))
    for token, place in zip(out["token_ids"], out["logprobs"], strict=True):
        ids, logprobs = most_likely(token, place["logprob"], 2)
        listed = [(entry["token_id"], entry["logprob"]) for entry in place["top"]]
        assert listed == list(zip(ids, logprobs, strict=True))
    whole = spelled(answer([0, *b"Hello"], 9))
    assert cli.main([*given, "--stop", "never", "--stop", whole[4:6]]) == 0
    (out,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (out["text"], out["finish_reason"]) == (whole[: whole.index(whole[4:6])], "stop")
    assert "logprobs" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-p", "0.9"], "error[E020]: --top-p: nothing to filter at temperature 0\n"),
        (["--top-k", "5", "--min-p", "0.1"], "error[E020]: --top-k, --min-p: nothing to filter"),
        (["--logprobs", "5"], "error[E020]: --logprobs are printed with --json\n"),
        (["--temperature", "1", "--top-p", "2"], "top_p must be over 0, at most 1, found 2.0\n"),
        (["--temperature", "1", "--min-p", "-1"], "min_p must be 0 to 1, found -1.0\n"),
        (["--stop", ""], "stop must be strings with at least one character"),
    ],
)
def test_options_without_effect_or_out_of_range_are_refused(path, capsys, options, message):
    assert cli.main(["run", str(path), "--prompt", "x", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_golden_needs_an_engine_with_files_to_compare(path):
    assert cli.main(["golden", str(path), "--vectors", "x", "-o", "y"]) == 4


def test_a_second_stream_waits_for_the_first_to_end(llm):
    """Two loops would share slots and pages: both would answer nonsense."""
    ask = {"prompt_token_ids": [[5, 6, 7]], "sampling_params": greedy(9, ignore_eos=True)}
    first = llm.stream(**ask)
    begun = [next(first).token.token_id]
    with pytest.raises(RequestError, match="another stream of this LLM has not ended"):
        llm.generate(**ask)
    assert begun + [piece.token.token_id for piece in first] == tokens(llm.generate(**ask))[0]
    left = llm.stream(**ask)
    next(left)
    left.close()
    assert len(tokens(llm.generate(**ask))[0]) == 9


@pytest.mark.parametrize("change", ["folder moved", "elsewhere"])
def test_an_open_engine_answers_wherever_its_folder_is(path, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(path, "here.engine")
    with closing(LLM("here.engine", threads=1)) as llm:
        if change == "folder moved":
            (tmp_path / "here.engine").rename("there.engine")
        else:
            monkeypatch.chdir("/")
        assert llm.generate("ab", greedy(3)) == LLM(path, threads=1).generate("ab", greedy(3))


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**32 + 1])
def test_a_count_of_threads_that_no_library_takes_is_refused(path, count):
    with pytest.raises(EngineError, match="threads must be 1 to 2147483647, found"):
        LLM(path, threads=count)
