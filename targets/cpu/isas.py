"""Instruction sets of x86-64, by the CPU features they need as Linux names them.

g++ has the same names without underscores: feature `avx512_vnni` is the flag -mavx512vnni and the
macro __AVX512VNNI__.
"""

from __future__ import annotations

from deepinfer_compile.diagnostics import error
from deepinfer_compile.target import Isa

X86_64_V3 = Isa("x86-64-v3", ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
AVX512 = Isa("avx512", (*X86_64_V3.features, *_AVX512))

# What `native` may add to the baseline: what the compiler can find a use for by itself.
_NATIVE = (*_AVX512, "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bf16", "avx_vnni")
_BASELINE_MACROS = {"abm": "__LZCNT__", "bmi1": "__BMI__"}


def native(defined: frozenset[str]) -> Isa:
    """The baseline and every feature we know among the `defined` macros; E203 below the baseline.

    The features, which the engine records, are all that the code depends on: no cache size, no
    tuning for one model of CPU.
    """
    lacking = [f for f in X86_64_V3.features if _macro(f) not in defined]
    if lacking:
        raise error(
            "E203",
            f"this machine's CPU is below {X86_64_V3.name}, the least this target compiles for",
            where="--isa native",
            notes=[f"it lacks {', '.join(lacking)}"],
            help="name the instruction set of the CPU that the engine is for",
        )
    found = tuple(f for f in _NATIVE if _macro(f) in defined)
    return Isa("native", (*X86_64_V3.features, *found))


def flags(isa: Isa) -> tuple[str, ...]:
    """What g++ is told."""
    return (f"-march={X86_64_V3.name}", *(f"-m{f.replace('_', '')}" for f in _beyond(isa)))


def macros(isa: Isa) -> tuple[str, ...]:
    """What sources can ask for that the baseline lacks."""
    return tuple(_macro(f) for f in _beyond(isa))


def _beyond(isa: Isa) -> tuple[str, ...]:
    return tuple(f for f in isa.features if f not in X86_64_V3.features)


def _macro(feature: str) -> str:
    return _BASELINE_MACROS.get(feature, f"__{feature.replace('_', '').upper()}__")
