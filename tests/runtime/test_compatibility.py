"""DeepInfer's engine settings against a compiled engine."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_compile.format.manifest import CheckpointOrigin
from deepinfer_compile.runtime.compatibility import check_settings
from deepinfer_compile.runtime.errors import RequestError
from tests.runtime.made import MANIFEST, PLAN

NAMED = dataclasses.replace(
    MANIFEST, checkpoint=CheckpointOrigin("org/name", "abc", "", packed=False)
)


def test_settings_that_agree_pass():
    agreed = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "tokens_per_block": 16,
        "expert_parallel_size": 1,
        "revision": "abc",
    }
    check_settings(NAMED, PLAN, agreed)


def test_deepinfers_defaults_pass():
    check_settings(
        NAMED,
        PLAN,
        {
            "max_model_len": None,
            "tokens_per_block": -1,
            "data_parallel_size": 0,
            "gpu_memory_utilization": 0.9,
            "trust_remote_code": True,
            "load_format": "auto",
        },
    )


def test_all_mismatches_are_in_one_message():
    asked = {
        "max_model_len": 128,
        "expert_parallel_size": 8,
        "gpu_memory_utilization": 0.5,
        "batch_invariant": True,
        "max_modle_len": 64,
        "tokenizer": "/elsewhere",
    }
    with pytest.raises(RequestError) as caught:
        check_settings(NAMED, PLAN, asked)
    assert caught.value.exit_code == 2
    assert caught.value.notes == (
        "max_model_len=128: the engine was compiled with 64 (engine.max_context)",
        "expert_parallel_size=8: the engine was compiled with 1 (engine.parallel.ep)",
        "gpu_memory_utilization=0.5: this runtime has only 0.9",
        "batch_invariant=True: the engine was compiled with False (engine.batch_invariant)",
        "max_modle_len=64: no such setting; did you mean max_model_len?",
        "tokenizer='/elsewhere': the engine was compiled with 'its own' "
        "(copied from the checkpoint)",
    )
