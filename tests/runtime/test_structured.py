"""Structured output of the nano engine: whatever random weights want, the text is valid."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from deepinfer_compile.runtime import LLM, RequestError, SamplingParams
from tests.runtime.structured_cases import GRAMMARS, REGEXES, SCHEMAS

pytestmark = pytest.mark.xdist_group("structured")


@pytest.fixture(scope="module")
def llm(nano_engine):
    llm = LLM(nano_engine, threads=1, decode_sequence=False)
    yield llm
    llm.close()


def asked(type, schema, seed=0, **more):
    """Long enough for any case to end by itself."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    sampling = {"max_tokens": 900, "temperature": 0.9} | more
    return SamplingParams(so_args={"schema_type": type, "schema": text}, seq_seed=seed, **sampling)


def ends(llm, params):
    """Each request's text without the end token, and its last output."""
    outputs = llm.generate(["Say: "] * len(params), params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    return [(tokenizer.decode([t.token_id for t in one]), one[-1]) for one in outputs]


def wrong(llm, cases, accepts):
    """Cases whose text is not accepted, or has not ended."""
    params = [asked(type, schema, seed) for seed, (type, schema) in enumerate(cases)]
    found = []
    for (_, schema), (text, last) in zip(cases, ends(llm, params), strict=True):
        if last.finish_reason != "stop" or not accepts(schema, text):
            found.append((schema, text, last.finish_reason, last.error))
    return found


def valid(schema, text):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return validator.is_valid(json.loads(text))


def test_every_schema_is_obeyed(llm):
    assert len(SCHEMAS) >= 100
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS)
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert wrong(llm, [("json", schema) for schema in SCHEMAS], valid) == []


def test_every_expression_is_matched(llm):
    assert len(REGEXES) >= 30

    def matched(pattern, text):
        python = pattern.replace(r"\x{42}", "B")  # Python has no braces there
        folded = "(?i" in pattern  # where a long s is an s
        return re.fullmatch(python, text, 0 if folded else re.ASCII) is not None

    assert wrong(llm, [("regex", pattern) for pattern in REGEXES], matched) == []


def test_every_grammar_is_followed(llm):
    assert len(GRAMMARS) >= 10
    decide = dict(GRAMMARS)
    cases = [("ebnf", grammar) for grammar in decide for _ in range(3)]
    assert wrong(llm, cases, lambda grammar, text: decide[grammar](text)) == []


def test_objects_take_no_keys_that_the_schema_does_not_name(llm):
    open = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}
    texts = [text for text, _ in ends(llm, [asked("json", open, seed) for seed in range(24)])]
    keys = [set(json.loads(text)) for text in texts]
    assert all(one <= {"a", "b"} for one in keys)
    assert {frozenset(one) for one in keys} > {frozenset(), frozenset("ab")}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 3.0, "top_p": 0.7},
        {"top_k": 2},
        {"min_p": 0.3, "top_k": 40, "top_p": 0.9},
    ],
)
def test_filters_choose_among_what_is_allowed(llm, sampling):
    pattern = r"[a-f]{4}-\d{4}"
    texts = ends(llm, [asked("regex", pattern, seed, **sampling) for seed in range(4)])
    assert all(re.fullmatch(pattern, text) and last.finish_reason == "stop" for text, last in texts)


def test_log_probabilities_are_of_what_is_allowed(llm):
    params = asked("regex", "a(b|c)d", top_logprobs=3)
    (out,) = llm.generate(["x"], params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    a, b_or_c, d, end = out
    assert [one.token_logprobs for one in (a, d, end)] == [0.0] * 3
    assert end.token_id == tokenizer.eos_token_id
    (b, c), rest = b_or_c.top_logprobs[:2], b_or_c.top_logprobs[2]
    assert pytest.approx(1.0) == 2.718281828**b + 2.718281828**c
    assert rest == -9999.0
    assert {tokenizer.decode([i]) for i in b_or_c.top_token_ids[:2]} == {"b", "c"}


def test_neighbours_get_the_same_tokens_as_alone(llm):
    """Free and structured requests, in any company: masks reach their own rows only."""
    free = [SamplingParams(temperature=0.9, seq_seed=i, max_tokens=20) for i in range(4)]
    held = [
        asked("regex", r"[a-z]{3,9}", 1),
        asked("json", SCHEMAS[-1], 2),
        asked("regex", "a*b", 3),
    ]
    params = [free[0], held[0], free[1], free[2], held[1], held[2], free[3]]
    prompts = [f"Prompt {i}" for i in range(len(params))]

    def tokens(outputs):
        return [[token.token_id for token in one] for one in outputs]

    together = tokens(llm.generate(prompts, params, use_tqdm=False))
    alone = [
        tokens(llm.generate([prompt], one, use_tqdm=False))[0]
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert together == alone


FAULTS = {
    '{"type": "object"': "the schema is no JSON: line 1, column 18",
    "[1, 2]": "a schema is an object, true or false, found [1, 2]",
    '{"properties": {"a": {"type": "strnig"}}}': "schema #/properties/a: Invalid type: strnig",
    '{"properties": {"a": {"$ref": "#/$defs/x"}}}': "schema #/properties/a: Pointer '/$defs/x'",
    '{"$ref": "https://example.com/x.json"}': "schema #: Resource 'https://example.com/x.json'",
    '{"items": {"minimum": "3"}}': "schema #/items: Expected f64 for 'minimum'",
    '{"anyOf": [true, {"uniqueItems": true}]}': "schema #/anyOf/1: Unimplemented keys: [",
    '{"$defs": {"n": {"not": {}}}, "items": {"$ref": "#/$defs/n"}}': "schema #/$defs/n: Unimpl",
    '{"prefixItems": [{"pattern": "a("}]}': "schema #/prefixItems/0: regex parse error",
    '{"additionalProperties": {"pattern": "(?=a)"}}': "schema #/additionalProperties: regex parse",
    '{"type": "integer", "minimum": 5, "maximum": 2}': "schema #: Unsatisfiable schema: minimum",
    '{"properties": {"s": {"format": "colour"}}}': "schema #/properties/s: Unknown format: colour",
    '{"required": ["a"], "additionalProperties": false, "type": "object"}': "schema #: Unsatis",
    '{"oneOf": [{"type": "integer"}, {"type": "number"}]}': "schema #: oneOf constraints are not",
    '{"a": 1, "a": 2}': "the schema has twice in one object: a",
}


def test_a_bad_schema_fails_alone_and_its_fault_is_named(llm):
    bad = [asked("json", schema) for schema in FAULTS]
    bad += [asked("regex", pattern) for pattern in ("a(b", "a{3,1}", r"\p{Nope}", "x(?=y)")]
    bad += [asked("regex", "(a{1000}){1000}")]
    bad += [asked("ebnf", 'root ::= "a" tail'), asked("ebnf", 'start: "a"')]
    bad += [asked("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000)]
    words = [*FAULTS.values(), *["regex parse error:\n    "] * 4]
    words += ["lexer error: too many expressions"]  # only a token is too much for the matcher
    words += ["line 1, column 14: no rule `tail`", "line 1, column 6: no EBNF begins with"]
    words += ["the grammar is nested too deeply to be read"]
    good = asked("regex", "fine{1,3}", 7)
    mixed = [one for fault in bad for one in (fault, good)]
    results = ends(llm, mixed)
    for (text, last), expect in zip(results[::2], words, strict=True):
        assert last.error.startswith(f"so_args: {expect}"), last.error
        assert last.finish_reason == "xgrammar runtime errors or timeout"
        assert (last.finished, last.num_output_tokens, text) == (True, 0, " ")
    assert len({text for text, _ in results[1::2]}) == 1
    assert all(re.fullmatch("fine{1,3}", text) for text, _ in results[1::2])


def test_where_texts_are_wanted_a_warning_says_what_failed(nano_engine):
    llm = LLM(nano_engine, threads=1)
    params = [asked("regex", "ok"), asked("regex", "(")]
    with pytest.warns(RuntimeWarning, match=r"answer 1: so_args: regex parse error") as caught:
        assert llm.generate(["a", "b"], params, use_tqdm=False) == ["ok", ""]
    llm.close()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_max_tokens_cut_a_text_that_could_still_be_completed(llm):
    ((text, last),) = ends(llm, [asked("regex", "[ab]{30}", max_tokens=12)])
    assert last.finish_reason == "length"
    assert re.fullmatch("[ab]{12}", text)


def structured(schema, **keys):
    return {"so_args": {"schema_type": "regex", "schema": schema} | keys}


def test_the_text_is_free_until_the_trigger(llm):
    """The same seed without a grammar shows where the trigger comes by itself."""
    plain = SamplingParams(seq_seed=5, max_tokens=60)
    (free,) = llm.generate(["Hm"], plain, use_tqdm=False)
    ids = [token.token_id for token in free]
    trigger = ids[10:12]
    first = next(i for i in range(len(ids)) if ids[i : i + 2] == trigger) + 2
    held = SamplingParams(
        seq_seed=5, max_tokens=60, **structured("<[xyz]{5}>", trigger_token_ids=trigger)
    )
    (out,) = llm.generate(["Hm"], held, use_tqdm=False)
    assert [token.token_id for token in out[:first]] == ids[:first]
    text = llm.get_tokenizer().decode([token.token_id for token in out[first:]])
    assert re.fullmatch("<[xyz]{5}>", text)
    assert out[-1].finish_reason == "stop"


def test_the_bound_ends_the_free_text(llm):
    plain = SamplingParams(seq_seed=6, max_tokens=40)
    (free,) = llm.generate(["Hm"], plain, use_tqdm=False)
    ids = [token.token_id for token in free]
    bound = ids[8]
    first = ids.index(bound) + 1
    tokenizer = llm.get_tokenizer()
    trigger = tokenizer.encode("</think>", add_bos=False)
    keys = {"trigger_token_ids": trigger, "bound_token_id": bound}
    held = SamplingParams(seq_seed=6, max_tokens=40, **structured("yes|no", **keys))
    (out,) = llm.generate(["Hm"], held, use_tqdm=False)
    assert [token.token_id for token in out[:first]] == ids[:first]
    rest = tokenizer.decode([token.token_id for token in out[first:]])
    assert re.fullmatch("</think>(yes|no)", rest)


def test_with_ignore_eos_anything_follows_the_end(llm):
    params = asked("regex", "ab", max_tokens=40, ignore_eos=True)
    (out,) = llm.generate(["Hm"], params, use_tqdm=False)
    ids = [token.token_id for token in out]
    tokenizer = llm.get_tokenizer()
    assert ids[:3] == [*tokenizer.encode("ab", add_bos=False), tokenizer.eos_token_id]
    assert len(ids) == 40
    assert len(set(ids[3:])) > 5
    assert out[-1].finish_reason == "length"


def test_tokens_the_engine_has_not_are_refused_before_anything_runs(llm):
    keys = {"trigger_token_ids": [3, 256, 999], "bound_token_id": 1000}
    params = SamplingParams(**structured("a", **keys))
    with pytest.raises(RequestError, match=r"so_args has token ids outside .*: 256, 999, 1000"):
        llm.generate(["a"], params, use_tqdm=False)


def test_a_missing_package_is_named_with_its_pip_line(llm, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'deepinfer-compile\[structured\]'"):
        llm.generate(["a"], asked("regex", "a"), use_tqdm=False)
