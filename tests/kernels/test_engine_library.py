"""The program template: a tiny library of made-up kernels, built and driven through its C ABI."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from deepinfer_targets.cpu import TARGET

from deepinfer_compile.emit.render import environment
from tests.kernels.harness import STRICT

KERNELS = """
#include <sys/syscall.h>
#include <unistd.h>

#include "numerics.h"

// Order matters: x * 3 + 1, then x ^ (x << 7) and so on give another value in any other order.
extern "C" void scale(Range items, int32_t, int64_t* x) {
  for (int64_t i = items.begin; i < items.end; ++i) x[i] = x[i] * 3 + i;
}
extern "C" void mix(Range items, int32_t rows, const int64_t* y, int64_t* x) {
  for (int64_t i = items.begin; i < items.end; ++i) x[i] ^= (x[i] << 7) + y[i] + rows;
}
extern "C" void count(Range items, int32_t, int64_t* visits, int64_t* ranges, int64_t* thread) {
  for (int64_t i = items.begin; i < items.end; ++i) ++visits[i];
  __atomic_fetch_add(ranges, 1, __ATOMIC_RELAXED);
  *thread = syscall(SYS_gettid);
}
extern "C" void reverse(Range items, int32_t rows, const int64_t* x, int64_t* y) {
  for (int64_t i = items.begin; i < items.end; ++i) y[i] = x[rows * 4 - 1 - i];
}
extern "C" void ones(Range, int32_t, int64_t* x) { x[0] = 1; }
extern "C" void tens(Range, int32_t, int64_t* x) { x[0] = 10; }
extern "C" void hundreds(Range, int32_t, int64_t* x) { x[0] = 100; }
"""
ROWS = 250
ITEMS = ROWS * 4
X, Y, VISITS, RANGES, THREAD = range(5)


@dataclass(frozen=True)
class Launch:
    kernel: str
    items: str
    most_rows: int = 250


@dataclass(frozen=True)
class Step:
    variants: list[Launch]
    arguments: list[str]


@dataclass(frozen=True)
class Phase:
    name: str
    steps: list[Step]


def longs(*buffers: int) -> list[str]:
    return [f"e.at<int64_t>({i})" for i in buffers]


SCALE = Step([Launch("scale", "rows * 4")], longs(X))
MIX = Step([Launch("mix", "rows * 4")], longs(Y, X))
REVERSE = Step([Launch("reverse", "rows * 4")], longs(X, Y))
COUNT = Step([Launch("count", "rows")], longs(VISITS, RANGES, THREAD))
FIXED = Step([Launch("count", "16")], longs(VISITS, RANGES, THREAD))
BY_ROWS = Step([Launch("ones", "1", 4), Launch("tens", "1", 8), Launch("hundreds", "1")], longs(X))
PHASES = [
    Phase("prefill", [SCALE, MIX, REVERSE, SCALE, REVERSE, MIX, MIX, SCALE]),
    Phase("decode", [COUNT]),
    Phase("draft", [FIXED]),
    Phase("sample", [SCALE] * 100),
    Phase("classes", [BY_ROWS]),
]
DECLARATIONS = [
    'extern "C" void scale(Range, int32_t, int64_t*);',
    'extern "C" void mix(Range, int32_t, const int64_t*, int64_t*);',
    'extern "C" void reverse(Range, int32_t, const int64_t*, int64_t*);',
    'extern "C" void count(Range, int32_t, int64_t*, int64_t*, int64_t*);',
    *(
        f'extern "C" void {name}(Range, int32_t, int64_t*);'
        for name in ("ones", "tens", "hundreds")
    ),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    templates = environment(TARGET.templates)
    program = templates.get_template("cpu/engine.cpp.jinja")
    sources = {
        f"kernels/{name}": templates.get_template(TARGET.support[name]).render()
        for name in ("engine.h", "numerics.h", "types.h")
    }
    sources["kernels/fake.cpp"] = KERNELS
    sources["kernels/engine.cpp"] = program.render(
        header=["test program"], phases=PHASES, declarations=DECLARATIONS
    )
    (binary,) = STRICT.build(sources, TARGET.isas[:1], lambda _: None)
    file = Path(tmp_path_factory.mktemp("engine") / "engine.so")
    file.write_bytes(binary.content)
    loaded = ctypes.CDLL(str(file))
    loaded.engine_create.restype = ctypes.c_void_p
    loaded.engine_create.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    loaded.engine_run.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 4]
    loaded.engine_destroy.argtypes = [ctypes.c_void_p]
    loaded.engine_destroy.restype = None
    return loaded


def buffers() -> list[torch.Tensor]:
    x = torch.arange(ITEMS) * 77
    return [x, x * 5 + 3, *(torch.zeros(n, dtype=torch.int64) for n in (ITEMS, 1, 1))]


@contextmanager
def engine(library: ctypes.CDLL, tensors: list[torch.Tensor], threads: int) -> Iterator[int]:
    table = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    handle = library.engine_create(table, len(tensors), threads)
    assert handle
    ctypes.memset(table, 0, ctypes.sizeof(table))  # the table was copied
    try:
        yield handle
    finally:
        library.engine_destroy(handle)


def expected(steps: list[Step]) -> list[torch.Tensor]:
    x, y, *_ = buffers()
    for step in steps:
        match step.variants[0].kernel:
            case "scale":
                x = x * 3 + torch.arange(ITEMS)
            case "mix":
                x = x ^ ((x << 7) + y + ROWS)
            case "reverse":
                y = x.flip(0)
    return [x, y]


def test_the_row_count_picks_the_variant(library):
    tensors = buffers()
    with engine(library, tensors, threads=1) as handle:
        for rows, launched in ((1, 1), (4, 1), (5, 10), (8, 10), (9, 100), (250, 100)):
            assert library.engine_run(handle, 4, rows, 0, 1) == 0
            assert tensors[X][0] == launched, rows


def test_engine_reports_its_abi(library):
    assert library.engine_abi() == 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_engine_runs_the_steps_in_order_on_any_number_of_threads(library, threads):
    steps = PHASES[0].steps
    for _ in range(50):
        tensors = buffers()
        with engine(library, tensors, threads) as handle:
            assert library.engine_run(handle, 0, ROWS, 0, len(steps)) == 0
        assert all(map(torch.equal, tensors, expected(steps)))


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 8), (2, 2), (7, 8)])
def test_engine_runs_a_range_of_steps(library, first, last):
    tensors = buffers()
    with engine(library, tensors, 2) as handle:
        assert library.engine_run(handle, 0, ROWS, first, last) == 0
    assert all(map(torch.equal, tensors, expected(PHASES[0].steps[first:last])))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 3, ITEMS])
def test_engine_gives_every_item_once_in_few_ranges(library, threads, rows):
    tensors = buffers()
    with engine(library, tensors, threads) as handle:
        for _ in range(200):
            assert library.engine_run(handle, 1, rows, 0, 1) == 0
    assert tensors[VISITS].tolist() == [200] * rows + [0] * (ITEMS - rows)
    most = 1 if threads == 1 else threads * 4
    assert tensors[RANGES] == 200 * min(rows, most)


def test_engine_with_one_thread_runs_on_the_caller(library):
    tensors = buffers()
    with engine(library, tensors, 1) as handle:
        assert library.engine_run(handle, 2, 0, 0, 1) == 0
    assert tensors[THREAD] == threading.get_native_id()
    assert tensors[VISITS].sum() == 16  # a fixed number of items runs without rows too


@pytest.mark.parametrize(
    ("phase", "rows", "first", "last"),
    [
        (-1, 4, 0, 1),
        (len(PHASES), 4, 0, 1),
        (0, -1, 0, 1),
        (0, 4, -1, 1),
        (0, 4, 2, 1),
        (0, 4, 0, 9),
        (1, 4, 1, 2),
    ],
)
def test_engine_refuses_steps_it_does_not_have(library, phase, rows, first, last):
    tensors = buffers()
    with engine(library, tensors, 2) as handle:
        assert library.engine_run(handle, phase, rows, first, last) == 1
    assert all(map(torch.equal, tensors, buffers()))
    assert library.engine_run(None, 0, 4, 0, 1) == 1


def test_engine_is_not_created_without_a_thread(library):
    table = (ctypes.c_void_p * 1)()
    assert library.engine_create(table, 1, 0) is None
    assert library.engine_create(table, -1, 1) is None


def test_engine_destroy_joins_its_threads(library):
    before = len(os.listdir("/proc/self/task"))
    tensors = buffers()
    for pause in (0.0, 0.05):  # joined while they spin, and while they sleep
        with engine(library, tensors, 5) as handle:
            assert len(os.listdir("/proc/self/task")) == before + 4
            assert library.engine_run(handle, 0, ROWS, 0, 8) == 0
            time.sleep(pause)
            assert library.engine_run(handle, 0, ROWS, 0, 8) == 0
        assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize(("threads", "bound_us"), [(1, 5), (2, 200)])
def test_engine_launches_are_quick(library, threads, bound_us):
    """A bound far above what it takes (about 0.05 and 0.2 us): the machine may be busy."""
    tensors = buffers()
    with engine(library, tensors, threads) as handle:
        begin = time.perf_counter()
        for _ in range(100):
            assert library.engine_run(handle, 3, 2, 0, 100) == 0
        spent = time.perf_counter() - begin
    print(f"{spent / 1e4 * 1e9:.0f} ns per launch at {threads} threads")
    x = torch.arange(8) * 77
    for _ in range(10_000):
        x = x * 3 + torch.arange(8)
    assert torch.equal(tensors[X][:8], x)
    assert spent / 10_000 * 1e6 < bound_us
