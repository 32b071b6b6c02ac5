"""A checkpoint folder as plain dense tensors: everything is dequantised once, at load.

The measuring stick of `tests/baseline` shares no code with the compiler: it reads `config.json` and
the safetensors files by itself (model_v41.md sections 1.2, 4.5 and 5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Checkpoint:
    """`text` is the config's `text_config`; tensors are f32, or `dtype` for matrices."""

    text: Mapping[str, object]
    tensors: Mapping[str, Tensor]

    def whole(self, name: str) -> int:
        value = self.text[name]
        assert isinstance(value, int)
        return value

    def real(self, name: str) -> float:
        value = self.text[name]
        assert isinstance(value, int | float)
        return float(value)

    def wholes(self, name: str) -> list[int]:
        value = self.text[name]
        assert isinstance(value, list)
        return value


def load_checkpoint(folder: Path, dtype: torch.dtype) -> Checkpoint:
    """Draft layers are left out. Matrices that the model multiplies in fp32 stay fp32."""
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(file), "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                if not name.startswith("mtp."):
                    stored[name] = shard.get_tensor(name)
    exact = ("ffn.gate.", "hc_", "head.", "compressor.w", "attn_sink", "norm.")
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith(".scale") and name.removesuffix("scale") + "weight" in stored:
            continue
        dense = _dense(tensor, stored.get(name.removesuffix("weight") + "scale"))
        tensors[name] = dense if any(part in name for part in exact) else dense.to(dtype)
    return Checkpoint(config["text_config"], _stack_experts(tensors))


def _dense(tensor: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None or scale.dtype is not torch.float8_e8m0fnu:
        return tensor.float()
    factor = torch.exp2(scale.view(torch.uint8).float() - 127)
    if tensor.dtype is torch.int8:
        codes = tensor.view(torch.uint8).int()
        values = torch.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], -1).flatten(-2)
    else:
        values = tensor.float()
    rows, columns = values.shape
    factor = factor.repeat_interleave(32, 1)[:, :columns]
    if len(factor) != rows:
        factor = factor.repeat_interleave(32, 0)[:rows]
    return values * factor


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`experts.7.w1.weight` of a layer into `experts.w1`, expert first."""
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, mark, rest = name.partition(".experts.")
        if not mark:
            out[name] = tensor
            continue
        expert, kind, _ = rest.split(".")
        parts.setdefault(f"{layer}.experts.{kind}", {})[int(expert)] = tensor
    for name, members in parts.items():
        out[name] = torch.stack([members[e] for e in sorted(members)])
    return out
