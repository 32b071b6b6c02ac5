"""Weights where they are stored: a checkpoint's files, mapped, and the compiler's own constants."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.checkpoint.headers import CheckpointIndex
from deepinfer_compile.checkpoint.tensors import StorageDType
from deepinfer_compile.ir.graph import Weight
from deepinfer_compile.package.weights import Tensors

_TORCH = {
    StorageDType.BF16: torch.bfloat16,
    StorageDType.F32: torch.float32,
    StorageDType.I32: torch.int32,
}


class Stored:
    """Every file of a checkpoint, mapped once; pages are read when they are used."""

    def __init__(self, index: CheckpointIndex, constants: Tensors) -> None:
        self._index = index
        self._constants = constants
        self._files = {
            file: np.memmap(index.folder / file, dtype=np.uint8, mode="r") for file in index.files
        }

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        entry = self._index.tensors[name]
        return self._files[entry.file][entry.offset : entry.offset + entry.nbytes]

    def weight(self, weight: Weight) -> Tensor:
        """As the reference takes it: one-byte types as bytes, stacked experts on the first dim."""
        if weight.source.startswith("@"):
            dtype, _, data = self._constants[weight.source.removeprefix("@")]
            return torch.frombuffer(bytearray(data), dtype=_TORCH[StorageDType(dtype)])
        if "{e}" not in weight.source:
            return self._tensor(weight.source)
        experts = range(int(str(weight.value.type.shape[0])))
        names = (weight.source.replace("{e}", str(e)) for e in experts)
        return torch.stack([self._tensor(name) for name in names])

    def _tensor(self, name: str) -> Tensor:
        entry = self._index.tensors[name]
        copied = torch.from_numpy(np.array(self.bytes_of(name)))
        return copied.view(_TORCH.get(entry.dtype, torch.uint8)).reshape(entry.shape)
