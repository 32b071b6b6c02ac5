"""Structured output of the nano engine: whatever random weights want, the text is valid."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from deepinfer_compile.runtime import LLM, SamplingParams
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
