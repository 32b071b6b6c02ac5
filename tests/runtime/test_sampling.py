"""SamplingParams: DeepInfer's names, defaults and bounds; what is not served is refused."""

from __future__ import annotations

import pytest

from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.grammar.asked import SchemaType, Structure
from deepinfer_compile.runtime.sampling import SamplingParams


def test_defaults_are_deepinfers():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 16, False)


def test_seeds_are_drawn_once_and_differ():
    seeds = {SamplingParams().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_are_masked_to_64_bits():
    assert SamplingParams(seq_seed=-1).seed == 2**64 - 1
    assert SamplingParams(seq_seed=2**64 + 5).seed == 5


@pytest.mark.parametrize("temperature", [0, 1e-6, 9.9e-6])
def test_near_zero_temperature_is_greedy_and_drops_filters(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, -1, 0.0)


def test_zero_max_tokens_means_one():
    assert SamplingParams(max_tokens=0).max_tokens == 1


BIASES = "at most 300 token ids, each with -100 to 100"


@pytest.mark.parametrize(
    ("name", "value", "accepts"),
    [
        ("temperature", -0.1, "finite, 0 or more"),
        ("temperature", float("nan"), "finite, 0 or more"),
        ("temperature", float("inf"), "finite, 0 or more"),
        ("temperature", "hot", "finite, 0 or more"),
        ("top_p", 0.0, "over 0, at most 1"),
        ("top_p", 1.1, "over 0, at most 1"),
        ("top_k", 0, "-1, or 1 or more"),
        ("top_k", 2**31, "-1, or 1 or more"),
        ("top_k", 2.0, "-1, or 1 or more"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("max_tokens", -1, "0 to 2147483647"),
        ("max_tokens", 2**31, "0 to 2147483647"),
        ("max_tokens", 1.5, "0 to 2147483647"),
        ("top_logprobs", 1001, "0 to 1000"),
        ("seq_seed", 1.0, "an integer or None"),
        ("stop", "", "strings with at least one character"),
        ("stop", ["a", ""], "strings with at least one character"),
        ("stop", [b"a"], "strings with at least one character"),
        ("stop", 5, "strings with at least one character"),
        ("min_tokens", -1, "0 to 2147483647"),
        ("temperature", 1e300, "finite, 0 or more"),
        ("temperature", 10**400, "finite, 0 or more"),
        ("stop_token_ids", 5, "token ids"),
        ("stop_token_ids", "5", "token ids"),
        ("stop_token_ids", [5, -1], "token ids"),
        ("golden_token_ids", [5, -2], "token ids or -1"),
        ("golden_token_ids", [5, 1.0], "token ids or -1"),
        ("golden_token_ids", 5, "token ids or -1"),
        ("golden_token_ids", [2**31], "token ids or -1"),
        ("prompt_logprobs", 1, "True or False"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("presence_penalty", float("nan"), "-2 to 2"),
        ("presence_penalty", None, "-2 to 2"),
        ("frequency_penalty", -2.1, "-2 to 2"),
        ("repetition_penalty", 0.0, "2**-64 to 2**64"),
        ("repetition_penalty", -1.0, "2**-64 to 2**64"),
        ("repetition_penalty", 2.0**-65, "2**-64 to 2**64"),
        ("repetition_penalty", 2.0**65, "2**-64 to 2**64"),
        ("repetition_penalty", float("nan"), "2**-64 to 2**64"),
        ("logit_bias", {-1: 0.0}, BIASES),
        ("logit_bias", {"5": 1.0}, BIASES),
        ("logit_bias", {5: 100.5}, BIASES),
        ("logit_bias", {5: None}, BIASES),
        ("logit_bias", [(5, 1.0)], BIASES),
        (
            "logit_bias",
            dict.fromkeys(range(301), 1.0),
            BIASES,
        ),
        ("n", 0, "1 to 128"),
        ("n", 129, "1 to 128"),
        ("n", 2.0, "1 to 128"),
    ],
)
def test_values_out_of_range_are_named(name, value, accepts):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.notes == (f"{name} must be {accepts}, found {value!r}",)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)


REGEX = {"schema_type": "regex", "schema": "a*"}


@pytest.mark.parametrize(
    ("args", "problems"),
    [
        ("a*", ["so_args must be a mapping, found 'a*'"]),
        (
            {},
            [
                "so_args: schema_type must be one of json, regex, ebnf, found None",
                "so_args: schema must be a text that is not empty, found None",
            ],
        ),
        (
            REGEX | {"schema_type": "lark"},
            ["so_args: schema_type must be one of json, regex, ebnf, found 'lark'"],
        ),
        (
            REGEX | {"schema_type": ["json"]},
            ["so_args: schema_type must be one of json, regex, ebnf, found ['json']"],
        ),
        (REGEX | {"schema": ""}, ["so_args: schema must be a text that is not empty, found ''"]),
        (
            {"schema_type": "json", "schema": {"type": "null"}},
            ["so_args: schema must be a text that is not empty, found {'type': 'null'}"],
        ),
        (
            REGEX | {"trigger_token_ids": [4, -1]},
            ["so_args: trigger_token_ids must be token ids, found [4, -1]"],
        ),
        (
            REGEX | {"trigger_token_ids": "45"},
            ["so_args: trigger_token_ids must be token ids, found '45'"],
        ),
        (
            REGEX | {"trigger_token_ids": 4},
            ["so_args: trigger_token_ids must be token ids, found 4"],
        ),
        (
            REGEX | {"bound_token_id": True, "trigger_token_ids": [4]},
            ["so_args: bound_token_id must be a token id, found True"],
        ),
        (
            REGEX | {"bound_token_id": 5},
            ["so_args: bound_token_id needs trigger_token_ids, which it would force"],
        ),
        (
            REGEX | {"bound_token_id": 5, "trigger_token_ids": []},
            ["so_args: bound_token_id needs trigger_token_ids, which it would force"],
        ),
        *(
            (
                REGEX | {key: 1},
                [
                    f"so_args: {key!r} is no key of it: "
                    "schema_type, schema, trigger_token_ids, bound_token_id"
                ],
            )
            for key in ("serialized", "bound_token_ids", "Schema")
        ),
    ],
)
def test_what_so_args_may_say(args, problems):
    with pytest.raises(RequestError) as caught:
        SamplingParams(so_args=args)
    assert list(caught.value.notes) == problems


def test_so_args_are_read():
    assert SamplingParams().structure is None
    given = SamplingParams(so_args=REGEX | {"trigger_token_ids": [7, 8], "bound_token_id": 5})
    assert given.structure == Structure(SchemaType.REGEX, "a*", (7, 8), 5)
    none = {"trigger_token_ids": None, "bound_token_id": None}
    assert SamplingParams(so_args=REGEX | none).structure == Structure(SchemaType.REGEX, "a*")


def test_all_problems_come_together():
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=-1, max_tokens=-1, so_args={"schema_type": "json", "regex": 1})
    assert len(caught.value.notes) == 4


def test_a_grammar_cannot_be_forced():
    with pytest.raises(RequestError) as caught:
        SamplingParams(so_args=REGEX, golden_token_ids=[4])
    assert caught.value.notes == ("golden_token_ids cannot be held to so_args: give one of them",)


@pytest.mark.parametrize("seed", [0, 2**64 - 2])
def test_answers_have_seeds_in_a_row(seed):
    params = SamplingParams(n=3, seq_seed=seed, temperature=0.5, top_p=0.9, logit_bias={3: 1})
    answers = params.answers
    assert [one.seed for one in answers] == [(seed + i) % 2**64 for i in range(3)]
    assert {(one.n, one.temperature, one.top_p) for one in answers} == {(1, 0.5, 0.9)}
    assert all(one.logit_bias == {3: 1} for one in answers)
    alone = SamplingParams()
    assert alone.answers == (alone,)


def test_bounds_are_served():
    """What lies on the bound of each range that is refused beyond it."""
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=2.0**-64)
    SamplingParams(presence_penalty=2.0, frequency_penalty=-2.0, repetition_penalty=2.0**64)
    SamplingParams(logit_bias={token: (-100, 100)[token % 2] for token in range(300)}, n=128)
    SamplingParams(golden_token_ids=[-1, 0, 2**31 - 1], prompt_logprobs=True, logit_bias={})


def test_names_that_do_nothing_in_deepinfer_do_nothing_here():
    SamplingParams(logprobs=5, eos_id=7, first_n_token_no_eos=2, top_p=1.0, top_k=-1)


def test_stops_are_one_string_or_many():
    assert SamplingParams().stops == ()
    assert SamplingParams(stop="END").stops == ("END",)
    assert SamplingParams(stop=["a", "bc"]).stops == ("a", "bc")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_ids == (3, 4)
