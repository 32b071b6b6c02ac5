"""Engram's constants against the listed ones (model_v41.md sections 3.12 and 10.3)."""

from __future__ import annotations

import time

import pytest

from deepinfer_compile.spec.engram import bucket_primes, is_prime, multipliers, offsets, rows
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.schema import Model
from tests.spec.error_cases import ROOT

PRIMES = {
    "v41_nano": (
        ((67, 71), (73, 79), (83, 89)),
        ((97, 101), (103, 107), (109, 113)),
    ),
    "v41_micro": (
        ((251, 257, 263, 269), (271, 277, 281, 283), (293, 307, 311, 313)),
        ((317, 331, 337, 347), (349, 353, 359, 367), (373, 379, 383, 389)),
    ),
    "v41_kshape": (
        (
            (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049),
            (1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097),
            (1103, 1109, 1117, 1123, 1129, 1151, 1153, 1163),
        ),
        (
            (1171, 1181, 1187, 1193, 1201, 1213, 1217, 1223),
            (1229, 1231, 1237, 1249, 1259, 1277, 1279, 1283),
            (1289, 1291, 1297, 1301, 1303, 1307, 1319, 1321),
        ),
    ),
    "v41_flash": tuple(
        tuple(tuple(16_000_000 + last for last in heads) for heads in columns)
        for columns in (
            (
                (57, 79, 81, 97, 121, 129, 133, 183),
                (189, 207, 211, 253, 277, 289, 307, 321),
                (339, 381, 393, 399, 403, 409, 447, 463),
            ),
            (
                (477, 487, 499, 507, 511, 573, 609, 627),
                (667, 669, 693, 697, 711, 729, 759, 769),
                (781, 799, 813, 819, 841, 877, 879, 889),
            ),
        )
    ),
}
MULTIPLIERS = {
    "v41_nano": (
        (29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817),
        (29614367931768699, 14359748903426231, 8766307535087495, 27646881644150121),
    ),
    "v41_micro": (
        (14831304026200453, 936705081716061, 6959601268494069, 14319439928568407),
        (7045141847521113, 5990208150073633, 3941728062971679, 12755487578445383),
    ),
    "v41_kshape": (
        (14831304026200453, 936705081716061, 6959601268494069, 14319439928568407),
        (15920565596405625, 975009545214551, 14254820516660309, 3668506406680991),
    ),
    "v41_flash": (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    ),
}
# Compressed ids 1805 -> 237 and so on: "the quick brown fox", last position.
FLASH_IDS = (18307, 9933, 4015, 237)
# fmt: off
FLASH_ROWS = {
    0: (
        3548953, 26746392, 33486740, 57016354, 65667189, 80645972, 96403260, 116433114,
        142773829, 146939961, 173196399, 186576533, 197596287, 221273389, 227497140, 254140962,
        268216897, 275597844, 296976119, 316210301, 329234885, 349074455, 355156691, 383971685,
    ),
    1: (
        7066053, 21639727, 34375865, 54532367, 64910242, 83304513, 101554919, 116747382,
        134684653, 159654242, 175418612, 178789319, 200259596, 213400461, 234191580, 243776623,
        258713936, 272871846, 293998006, 306142277, 328132331, 341746444, 358124153, 376813552,
    ),
}
# fmt: on


def model(name: str) -> Model:
    return load_spec(ROOT / "examples" / f"{name}.yaml", environment={}).model


@pytest.mark.parametrize("name", PRIMES)
def test_constants_are_the_listed_ones(name: str) -> None:
    assert bucket_primes(model(name)) == PRIMES[name]
    assert multipliers(model(name)) == MULTIPLIERS[name]


@pytest.mark.parametrize("name", PRIMES)
def test_tables_of_the_examples_hold_exactly_the_hashes(name: str) -> None:
    tables = model(name).engram.engram_num_embeddings
    assert tuple(rows(columns) for columns in bucket_primes(model(name))) == tables


@pytest.mark.parametrize("layer", FLASH_ROWS)
def test_hash_of_the_released_model(layer: int) -> None:
    """Written from section 3.12 d, with nothing but the constants under test."""
    flash = model("v41_flash")
    factors, found = multipliers(flash)[layer], []
    mixed = FLASH_IDS[0] * factors[0]
    columns = zip(bucket_primes(flash)[layer], offsets(flash)[layer], strict=True)
    for back, (primes, starts) in enumerate(columns, start=1):
        mixed ^= FLASH_IDS[back] * factors[back]
        found += [mixed % prime + start for prime, start in zip(primes, starts, strict=True)]
    assert tuple(found) == FLASH_ROWS[layer]


def test_products_fit_int64() -> None:
    for name in PRIMES:
        largest = model(name).engram.engram_compressed_vocab_size - 1
        assert all(largest * factor < 2**63 for row in multipliers(model(name)) for factor in row)


def test_the_released_walk_is_fast() -> None:
    flash = model("v41_flash")
    start = time.perf_counter()
    bucket_primes(flash)
    assert time.perf_counter() - start < 1.0


def test_is_prime_agrees_with_trial_division() -> None:
    def slowly(number: int) -> bool:
        return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))

    assert [n for n in range(2000) if is_prime(n)] == [n for n in range(2000) if slowly(n)]
    # Strong pseudoprimes to the first bases, and a Mersenne prime beyond 2**61.
    assert not is_prime(3_215_031_751)
    assert not is_prime(3_825_123_056_546_413_051)
    assert is_prime(2**89 - 1)


def test_no_engram_has_no_constants() -> None:
    nano = model("v41_nano")
    bare = nano.engram.model_copy(update={"engram_layer_ids": (), "engram_num_embeddings": ()})
    without = nano.model_copy(update={"engram": bare})
    assert bucket_primes(without) == offsets(without) == multipliers(without) == ()
