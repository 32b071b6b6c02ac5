"""`deepinfer-engine numdiff`: equal engines are equal, a planted fault is named where it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_compile.format import jsons
from deepinfer_compile.format.plan import EnginePlan, Phase, Probe
from deepinfer_compile.runtime import cli
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.numdiff.compare import compare
from deepinfer_compile.runtime.numdiff.figures import Floats, Rows, Sets
from deepinfer_compile.runtime.numdiff.limits import LIMITS
from deepinfer_compile.runtime.numdiff.match import DECODED, pieces_of
from deepinfer_compile.runtime.numdiff.verdict import judge
from deepinfer_compile.runtime.progress import Meter
from tests.golden_data import golden_root
from tests.runtime.made import edit_manifest
from tests.runtime.pretend import PLAN, pretend_engine


def run(capsys, *arguments):
    status = cli.main(["numdiff", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def vendor():
    from tests.engines import golden_engine  # here: only these tests need the compiler

    return golden_engine("vendor")


@pytest.fixture(scope="module")
def packed(vendor, tmp_path_factory):
    """A copy of the engine with its weights inside, and nothing that its oracle asks."""
    from deepinfer_compile.checkpoint.headers import read_checkpoint
    from deepinfer_compile.package.weights import write_packed

    engine = tmp_path_factory.mktemp("numdiff") / "packed.engine"
    shutil.copytree(vendor, engine)
    oracle = engine / "oracle/oracle.json"
    nothing = {"tokens": [], "prefilled": 0, "next_tokens": [], "logprobs": []}
    oracle.write_text(json.dumps(json.loads(oracle.read_text()) | nothing))
    plan = jsons.load(EnginePlan, (engine / "plan.json").read_text())
    index = read_checkpoint(golden_root() / "v41_tiny")
    write_packed(engine / "weights/model.safetensors", plan, index, lambda done, total: None)
    sign(engine)
    return engine


def sign(engine):
    """The manifest again, for files that were changed."""
    manifest = json.loads((engine / "manifest.json").read_text())
    changed = ("oracle/oracle.json", "weights/model.safetensors")
    hashes = {n: hashlib.sha256((engine / n).read_bytes()).hexdigest() for n in changed}
    origin = manifest["checkpoint"] | {"packed": True}
    edit_manifest(engine, files=manifest["files"] | hashes, checkpoint=origin)


def plant(engine, tensor, change):
    """Change one tensor's bytes in the packed weights."""
    file = engine / "weights/model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    place = np.frombuffer(data, dtype=np.uint8)[8 + length + begin : 8 + length + end]
    place[...] = change(place.copy())
    file.write_bytes(data)
    sign(engine)


def test_an_engine_against_itself_is_equal(capsys, packed):
    status, out, err = run(capsys, packed, packed, "--prompt", 150, "--json")
    facts = json.loads(out)
    assert (status, err, facts["ok"], facts["first_outside"]) == (0, "", True, None)
    assert {figure["error"] for figure in facts["figures"]} == {0.0}
    assert facts["free_run"] == {"kl_mean": 0.0, "kl_max": 0.0, "same_top": 1.0}
    plan = open_folder(packed, skip_weights=True).plan
    probes = {(p.name, phase.name) for phase in plan.phases[:2] for p in phase.probes}
    # Every probe of both phases is compared; logits in both, and the free run.
    assert len(facts["figures"]) == len(probes) + 2 + 1
    assert (facts["prompt"], facts["decoded"]) == (150, DECODED)


def test_a_wrong_weight_in_a_layer_is_named(capsys, packed, tmp_path):
    """Through the command: scales of one layer's attention output, doubled."""
    wrong = tmp_path / "wrong.engine"
    shutil.copytree(packed, wrong)
    plant(wrong, "layers.4.attn.wo_b.scale", lambda scale: scale + 1)
    status, out, err = run(capsys, packed, wrong, "--prompt", 30)
    assert (status, err) == (1, "")
    last = out.splitlines()[-2:]
    assert last[0].startswith("worst: layers.4 attn_out, ")
    assert last[1].startswith("no: 3 of 135 figures are outside their limits, the first: layers.4 ")
    assert "attn_out, prefill: 1, 0.004 allowed" in last[1]
    status, out, _ = run(capsys, wrong, packed, "--prompt", 30, "--json")
    facts = json.loads(out)
    outside = [(f["layer"], f["phase"], f["part"]) for f in facts["figures"] if not f["ok"]]
    both = [("layers.4", phase, "attn_out") for phase in ("prefill", "decode")]
    assert outside == [*both, (None, None, "free run")]
    assert (status, facts["ok"], facts["first_outside"]["layer"]) == (1, False, "layers.4")
    assert facts["first_outside"]["error"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("tensor", "layer", "part"),
    [
        ("embed.weight", -1, "streams"),
        ("layers.0.hc_attn_fn", 0, "ffn_in"),
        ("layers.1.engram.wkv.scale", 1, "attn_in"),
        ("layers.2.attn.attn_sink", 2, "attn_out"),
        ("layers.3.hc_ffn_base", 3, "pre"),
        ("layers.5.ffn.gate.weight", 5, "experts"),
        ("layers.6.attn.indexer.wq_b.weight", 6, "selected"),
        ("layers.7.ffn.experts.w2.weight", 7, "ffn_out"),
        ("head.weight", 8, "logits"),
    ],
)
def test_faults_are_found_where_they_are(two, tensor, layer, part):
    engine, wrong = two(tensor)
    with closing(wrong):
        pieces = pieces_of(engine.plan, engine.plan, 72)
        verdict = judge(compare(engine.executor, wrong, pieces, Meter(1, False)))
    first = verdict.first
    assert np.isfinite(first.error)
    assert (first.place.layer, first.place.part) == (layer, part), first


@pytest.fixture(scope="module")
def two(packed):
    """The engine, and another executor of it with a weight's elements in reverse."""
    with closing(load_engine(packed, threads=2)) as engine:
        folder = open_folder(packed, skip_weights=True)
        (library,) = (b for b in folder.manifest.libraries if b.isa == engine.isa)
        code = folder.files.library(library.path, folder.manifest.files[library.path])

        def wrong(tensor):
            weights = dict(engine.executor._weights)
            (number,) = (i for i, b in enumerate(engine.plan.buffers) if b.name == tensor)
            size = {"f32": 4, "bf16": 2}.get(engine.plan.buffers[number].dtype, 1)
            elements = weights[number].reshape(-1, size)
            weights[number] = np.ascontiguousarray(elements[::-1]).reshape(-1)
            return engine, Executor(engine.plan, code, weights, 2)

        yield wrong


def test_other_rounding_is_outside_and_says_so(capsys, vendor):
    from tests.engines import golden_engine

    where = ("--checkpoint", golden_root() / "v41_tiny", "--prompt", 40)
    status, out, err = run(capsys, golden_engine("f32"), vendor, *where)
    assert (status, err) == (1, "")
    assert "the engines round by other policies (f32, vendor)" in out
    assert "the first: layers.0 attn_out, prefill" in out
    for limit in LIMITS.values():
        assert limit.source in out


def probed(*names, **facts):
    probes = tuple(Probe(name, 15, 1) for name in names)
    prefill, decode, sample = PLAN.phases
    phases = (replace(prefill, probes=probes), replace(decode, probes=probes), sample)
    return replace(PLAN, phases=phases, limits=replace(PLAN.limits, **facts))


def test_other_models_and_engines_without_probes_are_refused_together(capsys, tmp_path):
    layers = [f"layers.{i}.attn_out" for i in range(3)]
    one = pretend_engine(tmp_path / "one", probed(*layers[:2]))
    cases = {
        "blind": (probed(vocab_size=300), "compile one", ["without probes", "vocabulary: 256 and"]),
        "large": (
            probed(*layers, vocab_size=300),
            "from one model",
            ["vocabulary: 256 and 300", "layers: 2 and 3"],
        ),
        "other": (
            probed(*layers[:2], "layers.0.selected"),
            "from one model",
            ["probe `layers.0.selected` of prefill: absent and (1,)", "of decode: absent and"],
        ),
    }
    for name, (plan, help, problems) in cases.items():
        status, out, err = run(capsys, one, pretend_engine(tmp_path / name, plan))
        assert (status, out) == (4, ""), name
        assert "error[E467]: these engines cannot be compared" in err
        for text in [help, *problems]:
            assert text in err
        assert err.count("\n   = ") == len(problems) + 1, err


def test_a_prompt_that_does_not_fit_is_refused():
    short = replace(PLAN, limits=replace(PLAN.limits, pages=3))  # 32 tokens
    for prompt in (0, 25):
        with pytest.raises(RequestError, match="these engines take 1 to 24 tokens"):
            pieces_of(PLAN, short, prompt)
    chunks = [len(piece.tokens) for piece in pieces_of(PLAN, short, None)]
    assert chunks == [8, 8, 8] + [1] * DECODED


def test_chunks_are_those_both_take():
    small = replace(PLAN, phases=(Phase("prefill", (3,), (), ()), *PLAN.phases[1:]))
    pieces = pieces_of(PLAN, small, 7)
    assert [(p.phase, p.first, len(p.tokens)) for p in pieces[:4]] == [
        ("prefill", 0, 3),
        ("prefill", 3, 3),
        ("prefill", 6, 1),
        ("decode", 7, 1),
    ]


def test_figures_of_known_values():
    floats, nan = Floats(), np.float32(np.nan)
    floats.add(np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 4.5]], np.float32))
    assert (floats.largest, floats.error) == (0.5, pytest.approx(0.1))
    floats.add(np.array([[nan]]), np.array([[nan]]))
    assert floats.error == pytest.approx(0.1)
    floats.add(np.array([[1.0]], np.float32), np.array([[nan]]))
    assert floats.error == floats.largest == np.inf
    zeros = Floats()
    zeros.add(np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    assert zeros.error == np.inf

    sets, a = Sets(), np.array([[1, 2, 3, -1], [5, 6, -1, -1]])
    sets.add(a, np.array([[3, 1, 2, -1], [5, 7, -1, -1]]))
    assert sets.error == pytest.approx(0.25)
    for ordered, error in ((False, 0.5), (True, 1.0)):
        rows = Rows(ordered)
        rows.add(a, np.array([[3, 1, 2, -1], [5, 7, -1, -1]]))
        assert rows.error == error
