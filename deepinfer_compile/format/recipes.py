"""Weight recipes spelled out: which checkpoint tensors fill which buffer, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from deepinfer_compile.format.plan import WeightRecipe


def names_of(recipe: WeightRecipe) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each buffer of a recipe with its tensors' names, experts in order."""
    layers: tuple[int | None, ...] = recipe.layers or (None,)
    assert len(layers) == len(recipe.buffers), recipe.pattern
    for layer, buffer in zip(layers, recipe.buffers, strict=True):
        name = recipe.pattern if layer is None else recipe.pattern.replace("{l}", str(layer))
        if recipe.experts:
            yield buffer, tuple(name.replace("{e}", str(e)) for e in range(recipe.experts))
        else:
            yield buffer, (name,)


def tensor_table_sha256(recipes: Iterable[WeightRecipe]) -> str:
    """Identifies the tensors a plan reads: names, dtypes and shapes, sorted; no constants."""
    lines = sorted(
        f"{name} {recipe.dtype} {list(recipe.shape)}\n"
        for recipe in recipes
        if not recipe.pattern.startswith("@")
        for _, names in names_of(recipe)
        for name in names
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
