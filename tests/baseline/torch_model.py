"""DeepSeek-V4.1 in plain eager torch: what the engine's speed is measured against.

Written from model_v41.md section 3 as a careful torch user would: dense weights, one matmul per
projection, only the experts that were hit, caches kept dequantised, prompts in chunks of 128 rows
so that window attention stays narrow. Cache quantisers are kept (policy `f32`; with bf16 weights
also its roundings), activations are not quantised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.baseline.torch_weights import Checkpoint

CHUNK = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))


def _power_above(t: Tensor) -> Tensor:
    """The least power of two that is at least t > 0."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.ones_like(t), torch.where(mantissa == 0.5, exponent - 1, exponent))


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0 .5 1 1.5 2 3 4 6 with the sign of x, ties to the even code."""
    m = x.abs().clamp(max=6)
    near = torch.where(
        m < 2, (m * 2).round() / 2, torch.where(m < 4, m.round(), (m / 2).round() * 2)
    )
    return torch.copysign(near, x)


def fp8_rows(x: Tensor) -> Tensor:
    """Section 4.1: e4m3 with a power-of-two scale per 32, dequantised."""
    g = _groups(x, 32)
    scale = _power_above(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448))
    codes = (g / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def fp4_entries(x: Tensor) -> Tensor:
    """Section 4.3: e2m1 with an e4m3 scale per 16, dequantised."""
    g = _groups(x, 16)
    peak = g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = (peak / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    return (_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


def fp4_index(x: Tensor) -> Tensor:
    """Section 4.4: e2m1 with a power-of-two scale per 32, dequantised."""
    g = _groups(x, 32)
    scale = _power_above(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) * (1 / 6))
    return (_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


@dataclass
class Rows:
    """Rows appended position by position to a buffer that doubles when it is full."""

    data: Tensor
    used: int = 0

    def add(self, rows: Tensor) -> None:
        while self.used + len(rows) > len(self.data):
            self.data = torch.cat([self.data, torch.empty_like(self.data)])
        self.data[self.used : self.used + len(rows)] = rows
        self.used += len(rows)

    @property
    def rows(self) -> Tensor:
        return self.data[: self.used]


@dataclass
class State:
    """One request's caches, all by layer."""

    ids: list[int] = field(default_factory=list)
    window: dict[int, Rows] = field(default_factory=dict)
    entries: dict[int, Rows] = field(default_factory=dict)
    index_keys: dict[int, Rows] = field(default_factory=dict)
    tail: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Step:
    """What later layers of one pass read of earlier ones."""

    position: Tensor
    chosen: dict[int, Tensor] = field(default_factory=dict)  # bool[T, entries] by index source
    blocks: Tensor | None = None  # bool[T, blocks]


class TorchModel:
    """`dtype` of the checkpoint's matrices is the dtype of activations."""

    def __init__(self, checkpoint: Checkpoint, token_map: Tensor | None = None) -> None:
        self.c = checkpoint
        self.w = checkpoint.tensors
        self.dtype = self.w["embed.weight"].dtype
        self.eps = checkpoint.real("rms_norm_eps")
        self.layers = checkpoint.whole("num_hidden_layers")
        self.heads, self.dim = checkpoint.whole("num_attention_heads"), checkpoint.whole("head_dim")
        self.ratios = checkpoint.wholes("compress_ratios")
        self.kv_sources = checkpoint.wholes("kv_source_layer_ids")
        self.index_sources = checkpoint.wholes("index_source_layer_ids")
        self.token_map = token_map
        self.frequencies = {c: self._frequencies(c) for c in (False, True)}
        engrams = checkpoint.wholes("engram_layer_ids")
        self.hashes = {layer: self._hash_constants(layer) for layer in engrams}
        self._join_pairs()

    def _join_pairs(self) -> None:
        """Gate and up projections of a layer's experts as one matrix: one matmul instead of two."""
        w = dict(self.w)
        for layer in range(self.layers):
            p = f"layers.{layer}.ffn"
            w[f"{p}.experts.w13"] = torch.cat(
                [w.pop(f"{p}.experts.w1"), w.pop(f"{p}.experts.w3")], 1
            )
            shared = [w.pop(f"{p}.shared_experts.{k}.weight") for k in ("w1", "w3")]
            w[f"{p}.shared_experts.w13"] = torch.cat(shared)
        self.w = w

    def _frequencies(self, compressed: bool) -> Tensor:
        c, rope = self.c, self.c.whole("qk_rope_head_dim")
        base = c.real("compress_rope_theta" if compressed else "rope_theta")
        f = 1 / torch.pow(torch.tensor(base), torch.arange(0, rope, 2).float() / rope)
        if not compressed:
            return f
        yarn = c.text["rope_scaling"]
        assert isinstance(yarn, dict)
        length = yarn["original_max_position_embeddings"]

        def turns(n: float) -> float:
            return rope * math.log(length / (n * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(turns(yarn["beta_fast"])), 0)
        high = min(math.ceil(turns(yarn["beta_slow"])), rope - 1)
        ramp = ((torch.arange(rope // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return f / yarn["factor"] * ramp + f * (1 - ramp)

    def _hash_constants(self, layer: int) -> tuple[list[int], list[int]]:
        """Multipliers and primes of section 3.12; primes are drawn over all layers in order."""
        c = self.c
        longest, heads = c.whole("engram_max_ngram_size"), c.whole("engram_n_heads")
        bound = (2**63 - 1) // c.whole("engram_compressed_vocab_size") // 2
        draw = np.random.default_rng(10007 * layer).integers(0, bound, size=longest, dtype=np.int64)
        taken: list[int] = []
        per_layer = (longest - 1) * heads
        for _ in c.wholes("engram_layer_ids"):
            for _ in range(longest - 1):
                candidate = c.whole("engram_vocab_size") - 1
                for _ in range(heads):
                    candidate += 1
                    while candidate in taken or not _is_prime(candidate):
                        candidate += 1
                    taken.append(candidate)
        at = c.wholes("engram_layer_ids").index(layer) * per_layer
        return [int(m) * 2 + 1 for m in draw], taken[at : at + per_layer]

    @torch.inference_mode()
    def forward(self, state: State, ids: Sequence[int], every: bool = False) -> Tensor:
        """Logits f32[V] after the last of `ids`, or [T,V] after each."""
        chunks = [ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK)]
        last = [self._chunk(state, chunk) for chunk in chunks]
        hidden = torch.cat(last) if every else last[-1][-1]
        return hidden.float() @ self.w["head.weight"].float().T

    def _chunk(self, state: State, ids: Sequence[int]) -> Tensor:
        step = Step(torch.arange(len(state.ids), len(state.ids) + len(ids)))
        state.ids += ids
        x = self.w["embed.weight"][torch.tensor(ids)]
        streams = x.unsqueeze(1).repeat(1, self.c.whole("hc_mult"), 1)
        pre = torch.zeros(len(ids), self.c.whole("hc_mult"))
        pre[:, 0] = 1
        for layer in range(self.layers):
            if layer in self.hashes:
                streams = self._engram(layer, state, step, streams)
            for part, run in (("attn", self._attention), ("ffn", self._moe)):
                next_pre, post, comb = self._coefficients(f"layers.{layer}.hc_{part}", streams)
                norm = self.w[f"layers.{layer}.{part}_norm.weight"]
                inner = rms_norm(self._collapse(pre, streams), norm, self.eps)
                out = run(layer, state, step, inner)
                mixed = torch.einsum("tij,tid->tjd", comb, streams.float())
                streams = (post.unsqueeze(-1) * out.float().unsqueeze(1) + mixed).to(self.dtype)
                pre = next_pre
        return rms_norm(self._collapse(pre, streams), self.w["norm.weight"], self.eps)

    def _collapse(self, pre: Tensor, streams: Tensor) -> Tensor:
        return torch.einsum("ts,tsd->td", pre, streams.float()).to(self.dtype)

    def _coefficients(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, eps = self.c.whole("hc_mult"), self.c.real("hc_eps")
        x = streams.flatten(1).float()
        m = (x @ self.w[f"{name}_fn"].T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        scale, base = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + eps
        post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
        comb = (m[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s)).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.c.whole("hc_sinkhorn_iters") - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    def _rope(self, x: Tensor, position: Tensor, compressed: bool, inverse: bool = False) -> Tensor:
        """Turns the last channels of x[T,...,d], adjacent pairs."""
        f = self.frequencies[compressed]
        angle = position.float().unsqueeze(1) * f
        cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = x[..., -2 * len(f) :].float()
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return torch.cat([x[..., : -2 * len(f)], pairs.to(x.dtype)], -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.w[f"{name}.weight"])

    def _attention(self, layer: int, state: State, step: Step, x: Tensor) -> Tensor:
        p, ratio, position = f"layers.{layer}.attn", self.ratios[layer], step.position
        compressed = ratio > 0
        rank = rms_norm(self._linear(x, f"{p}.wq_a"), self.w[f"{p}.q_norm.weight"], self.eps)
        q = self._linear(rank, f"{p}.wq_b").unflatten(1, (self.heads, self.dim))
        q = self._rope(q, position, compressed)
        kv = rms_norm(self._linear(x, f"{p}.wkv"), self.w[f"{p}.kv_norm.weight"], self.eps)
        kv = fp8_rows(self._rope(kv, position, compressed))
        window = state.window.setdefault(layer, Rows(torch.empty(256, self.dim, dtype=self.dtype)))
        window.add(kv)
        if layer in self.kv_sources:
            self._compress(layer, state, x)
        if layer in self.index_sources:
            step.chosen[layer] = self._select(layer, state, step, x, rank)
        reach = self.c.whole("sliding_window")
        first = max(0, int(position[0]) - reach + 1)
        keys, back = window.rows[first:], position.unsqueeze(1) - torch.arange(first, window.used)
        seen = (back >= 0) & (back < reach)
        if ratio:
            entries = state.entries[max(s for s in self.kv_sources if s <= layer)].rows
            chosen = step.chosen[max(s for s in self.index_sources if s <= layer)]
            if len(x) == 1:  # one row: only what it chose
                entries, chosen = (
                    entries[chosen[0]],
                    torch.ones(1, int(chosen.sum()), dtype=torch.bool),
                )
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, chosen], 1)
        o = self._attend(q, keys, seen, self.w[f"{p}.attn_sink"])
        o = self._rope(o, position, compressed, inverse=True)
        groups = self.c.whole("o_groups")
        grouped = o.reshape(len(x), groups, -1).transpose(0, 1)
        wo_a = self.w[f"{p}.wo_a.weight"].unflatten(0, (groups, -1))
        low = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return self._linear(low, f"{p}.wo_b")

    def _attend(self, q: Tensor, keys: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
        scores = (q @ keys.T).float() * self.dim**-0.5
        if len(q) > 1:
            scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        with_sink = torch.cat([scores, sink.expand(len(q), -1).unsqueeze(-1)], -1)
        p = with_sink.softmax(-1)[..., :-1]
        return (p.to(keys.dtype) @ keys).to(self.dtype)

    def _compress(self, layer: int, state: State, x: Tensor) -> None:
        """Complete groups of tokens into entries and index keys (sections 3.7 and 3.8)."""
        p, ratio, wide = f"layers.{layer}.attn.compressor", self.ratios[layer], x.float()
        pooled = functional.linear(wide, self.w[f"{p}.wkv.weight"])
        entries = state.entries.setdefault(
            layer, Rows(torch.empty(256, self.dim, dtype=self.dtype))
        )
        if ratio > 1:
            gate = functional.linear(wide, self.w[f"{p}.wgate.weight"])
            both = torch.stack([pooled, gate], 1)
            both = torch.cat([state.tail.get(layer, both[:0]), both])
            whole = len(both) // ratio * ratio
            state.tail[layer] = both[whole:]
            if not whole:
                return
            value, score = both[:whole].unflatten(0, (-1, ratio)).unbind(2)
            pooled = (score.softmax(1) * value).sum(1)
        latent = rms_norm(pooled.to(self.dtype), self.w[f"{p}.norm.weight"], self.eps)
        position = torch.arange(entries.used, entries.used + len(latent)) * ratio
        entries.add(fp4_entries(self._rope(latent, position, True)))
        width = self.c.whole("index_head_dim")
        keys = state.index_keys.setdefault(layer, Rows(torch.empty(256, width, dtype=self.dtype)))
        q = f"layers.{layer}.attn.indexer"
        key = rms_norm(self._linear(latent, f"{q}.wk"), self.w[f"{q}.k_norm.weight"], self.eps)
        keys.add(fp4_index(self._rope(key, position, True)))

    def _select(self, layer: int, state: State, step: Step, x: Tensor, rank: Tensor) -> Tensor:
        """bool[T, entries]: the entries that every row attends to."""
        c, p = self.c, f"layers.{layer}.attn.indexer"
        keys = state.index_keys[max(s for s in self.kv_sources if s <= layer)].rows
        visible = ((step.position + 1) // self.ratios[layer]).unsqueeze(1)
        entry = torch.arange(len(keys))
        source = c.whole("candidate_source_layer_id")
        k = c.whole("index_topk")
        if len(keys) <= k and layer != source:
            return entry < visible
        heads, width = c.whole("index_n_heads"), c.whole("index_head_dim")
        q = self._linear(rank, f"{p}.wq_b").unflatten(1, (heads, width))
        q = fp4_index(self._rope(q, step.position, True))
        weight = self._linear(x, f"{p}.weights_proj") * (width * heads) ** -0.5
        scores = torch.einsum("th,the->te", weight, (q @ keys.T).relu()).float()
        scores = scores.masked_fill(entry >= visible, -torch.inf)
        size = c.whole("candidate_block_size")
        if layer == source:
            step.blocks = self._best_blocks(scores, visible, size)
        elif layer > source and step.blocks is not None:
            inside = step.blocks.repeat_interleave(size, 1)[:, : len(keys)]
            scores = scores.masked_fill(~inside, -torch.inf)
        return _top(scores, k)

    def _best_blocks(self, scores: Tensor, visible: Tensor, size: int) -> Tensor:
        padded = functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = padded.unflatten(1, (-1, size)).amax(2)
        newest = torch.arange(best.shape[1]) == (visible - 1) // size
        return _top(
            best.masked_fill(newest & (visible > 0), torch.inf),
            self.c.whole("candidate_topk_blocks"),
        )

    def _moe(self, layer: int, state: State, step: Step, x: Tensor) -> Tensor:
        del state, step
        p = f"layers.{layer}.ffn"
        score = functional.softplus(x.float() @ self.w[f"{p}.gate.weight"].T).sqrt()
        expert = (
            (score + self.w[f"{p}.gate.bias"]).topk(self.c.whole("num_experts_per_tok")).indices
        )
        weight = score.gather(1, expert)
        weight = weight / weight.sum(1, keepdim=True) * self.c.real("routed_scaling_factor")
        shared = (self.w[f"{p}.shared_experts.w13"], self.w[f"{p}.shared_experts.w2.weight"])
        out = torch.zeros(x.shape)
        for e in expert.unique().tolist():
            row, place = (expert == e).nonzero(as_tuple=True)
            matrices = (self.w[f"{p}.experts.w13"][e], self.w[f"{p}.experts.w2"][e])
            part = self._expert(x[row], *matrices, weight[row, place].unsqueeze(1))
            out.index_add_(0, row, part.float())
        return (out + self._expert(x, *shared).float()).to(self.dtype)

    def _expert(self, x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor | None = None) -> Tensor:
        limit = self.c.real("swiglu_limit")
        gate, up = functional.linear(x, w13).float().chunk(2, 1)
        h = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return functional.linear((h if weight is None else weight * h).to(self.dtype), w2)

    def _engram(self, layer: int, state: State, step: Step, streams: Tensor) -> Tensor:
        """Section 3.12: hashed n-grams, their table rows, gated into the streams."""
        p = f"layers.{layer}.engram"
        table = self.w[f"{p}.embed.weight"]
        rows = self._hash(layer, state, step.position)
        kv = functional.linear(table[rows].flatten(1), self.w[f"{p}.wkv.weight"]).float()
        x, s = streams.float(), streams.shape[1]
        kv = kv.unflatten(1, (s + 1, -1))
        keys, value = kv[:, :s], kv[:, s:]
        joined = self.w[f"{p}.q_weight"].float() * self.w[f"{p}.k_weight"].float()
        dot = (x * joined * keys).sum(-1) * x.shape[-1] ** -0.5
        for side in (x, keys):
            dot = dot * torch.rsqrt(side.square().mean(-1) + self.eps)
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
        return (x + gate.unsqueeze(-1) * value).to(self.dtype)

    def _hash(self, layer: int, state: State, position: Tensor) -> Tensor:
        """i64[T, columns]: table rows of the n-grams that end at each position."""
        multipliers, primes = self.hashes[layer]
        longest = len(multipliers)
        first = max(0, int(position[0]) - longest + 1)
        recent = torch.tensor(state.ids[first:])
        ids = recent if self.token_map is None else self.token_map[recent].long()
        pads = torch.full((longest,), self.c.whole("engram_pad_token_id"))
        ids = torch.cat([pads, ids])
        at = len(ids) - len(position) + torch.arange(len(position))
        mixed = ids[at] * multipliers[0]
        columns, offset, heads = [], 0, len(primes) // (longest - 1)
        for n in range(1, longest):
            mixed = mixed ^ (ids[at - n] * multipliers[n])
            for prime in primes[(n - 1) * heads : n * heads]:
                columns.append(mixed % prime + offset)
                offset += prime
        return torch.stack(columns, 1)


def _top(scores: Tensor, k: int) -> Tensor:
    """bool like scores: the k highest of each row; -inf is never taken."""
    best = scores.topk(min(k, scores.shape[1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True) & (
        scores > -torch.inf
    )


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
