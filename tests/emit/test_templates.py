"""Every template of the cpu target renders to sources that look written by hand.

Which arguments belong to which template is learned from the plans of the example specs: each is
rendered with what the specs need and with its own `example()`, so a hole of another width shows.
"""

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from deepinfer_targets.cpu import TARGET

from deepinfer_compile.driver import build, lower
from deepinfer_compile.emit.render import environment
from deepinfer_compile.spec.load import load_spec

REPO = Path(__file__).parents[2]
KERNEL_TEMPLATES = sorted(
    path.relative_to(TARGET.templates).as_posix()
    for path in TARGET.templates.glob("cpu/*.cpp.jinja")
    if path.name != "engine.cpp.jinja"
)


@functools.cache
def planned() -> dict[str, dict[str, object]]:
    """Template -> symbol -> arguments, over nodes that a rule takes: semantic ones and fused."""
    found: dict[str, dict[str, object]] = {}
    for name in ("v41_nano", "v41_kshape"):
        for numerics in ("vendor", "f32"):
            overrides = [f"engine.numerics={numerics}"]
            spec = load_spec(REPO / f"examples/{name}.yaml", overrides=overrides, environment={})
            for graph in (*build(spec), *lower(spec, TARGET).graphs):
                for node in graph.nodes:
                    rule, _ = TARGET.choose(node)
                    if rule is not None:
                        for rows in rule.row_classes(max_rows=64):
                            plan = rule.plan(node, TARGET.machine, rows)
                            found.setdefault(plan.template, {})[str(plan.name)] = plan.args
    return found


def reformatted(text: str, name: str) -> str:
    """`text` as clang-format would have it."""
    tool = str(Path(sys.executable).with_name("clang-format"))
    command = [tool, "--style=file", f"--assume-filename={name}"]
    done = subprocess.run(
        command, input=text, cwd=REPO, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize("template", KERNEL_TEMPLATES)
def test_kernel_template_needs_no_formatting(template):
    uses = planned().get(template)
    assert uses, f"no example spec plans a kernel of {template}"
    some = list(uses.items())[:: max(1, len(uses) // 4)]  # widths differ; four of them will do
    example = type(some[0][1]).example()
    source = environment(TARGET.templates).get_template(template)
    for symbol, args in [*some, ("op__bf16__n64__cpu", example)]:
        text = source.render(k=args, symbol=symbol, header=["header"])
        assert f'extern "C" void {symbol}(\n    Range items,\n' in text
        assert reformatted(text, "kernel.cpp") == text


@pytest.mark.parametrize("header", sorted(TARGET.support))
def test_shared_header_needs_no_formatting(header):
    text = environment(TARGET.templates).get_template(TARGET.support[header]).render()
    assert "#pragma once" in text or "#ifndef DEEPINFER" in text
    assert reformatted(text, header) == text


@dataclass(frozen=True)
class Launch:
    kernel: str
    items: str
    most_rows: int


@dataclass(frozen=True)
class Step:
    variants: tuple[Launch, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Phase:
    name: str
    steps: tuple[Step, ...]


def test_program_template_has_a_line_per_launch():
    steps = tuple(
        Step(
            tuple(Launch(f"rmsnorm__bf16__n{n}_r{r}__cpu", "rows", r) for r in classes),
            tuple(f"e.at<bf16>({i})" for i in range(n)),
        )
        for n, classes in ((3, (4, 64)), (12, (64,)))
    )
    text = (
        environment(TARGET.templates)
        .get_template("cpu/engine.cpp.jinja")
        .render(
            header=["header"],
            phases=[Phase("prefill", steps), Phase("decode", steps[:1])],
            declarations=['extern "C" void rmsnorm__bf16__n3__cpu(Range, int32_t, bf16*);'],
        )
    )
    assert reformatted(text, "engine.cpp") == text
    launches = [line for line in text.splitlines() if "e.launch(" in line]
    assert [line.count("e.at<bf16>") for line in launches] == [3, 3, 12, 3, 3]
    assert ["if (rows <= 4)" in line for line in launches] == [True, False, False, True, False]
