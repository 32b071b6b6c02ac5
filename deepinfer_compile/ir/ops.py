"""The closed set of operators: attributes, result types, operation counts.

Meaning is in `ir/reference.py` (float64); sections are those of model_v41.md. Operators that read
rows of the same request come in two forms, because the phases order loads and stores differently:

    decode    the rows are stored first, then everything is read from the state
    prefill   `Chunk...`: older rows come from the state as it was before the chunk, newer ones
              from the chunk's own rows; the store follows (section 6.2: slots overlap)

Common operands: `position`, `slot`, `row_start` and `image` are i32[R]; `row_start` is the step's
first row of the same request; `page_table` is i32[slots, pages of a request]. Entry j of ratio rho
lives in page `page_table[slot, j // (page // rho)]`, and j is visible at position p when
j < (p + 1) // rho.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from deepinfer_compile.format.entries import PerEntry
from deepinfer_compile.ir.types import DType, R, TensorType

Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Cost:
    """Bytes moved by a launch whatever its rows, bytes and operations of each row, and bytes that
    each row picks out of `pool_bytes`: rows are taken to share none until all are read. States
    count as at the longest context; `per_entry` says which operations depend on the position."""

    bytes_fixed: int
    bytes_per_row: int
    flops_per_row: int
    picked_per_row: int = 0
    pool_bytes: int = 0
    per_entry: tuple[PerEntry, ...] = ()


class Op(ABC):
    """Attributes only. `consumes` are the operands whose state version ends here."""

    name: ClassVar[str]
    consumes: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def infer(self, inputs: Types) -> Types:
        """Result types; asserts what the operands must be."""

    def flops_per_row(self, inputs: Types) -> int:
        """Multiplications and additions of one row; element-wise work counts once a channel."""
        return self.infer(inputs)[0].width

    def cost(self, inputs: Types) -> Cost:
        """Every tensor operand and result moved once; a state counts what a row touches of it."""
        fresh = self.infer(inputs)[len(self.consumes) :]
        moved = [t for t in (*inputs, *fresh) if not t.state]
        fixed = sum(t.bytes(1) for t in moved if not t.by_rows)
        per_row = sum(t.bytes(1) for t in moved if t.by_rows)
        return Cost(fixed, per_row + self.state_bytes(inputs), self.flops_per_row(inputs))

    def state_bytes(self, inputs: Types) -> int:
        """Bytes of states one row reads or writes, at the longest context."""
        return 0


class EntryOp(Op):
    """An operator that computes on entries of a state: how many, depends on a row's position."""

    @abstractmethod
    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        """All its operations."""

    def flops_per_row(self, inputs: Types) -> int:
        return sum(part.most_flops for part in self.per_entry(inputs))

    def cost(self, inputs: Types) -> Cost:
        return replace(super().cost(inputs), per_entry=self.per_entry(inputs))


def _same_rows(*types: TensorType) -> None:
    assert all(t.by_rows for t in types), f"rows expected: {[str(t) for t in types]}"


def _require(holds: bool, what: str) -> None:
    assert holds, what


@dataclass(frozen=True)
class Embed(Op):
    """(token_id i32[R], table bf16[V,D]) -> out[R,D]. Section 3.2."""

    name: ClassVar[str] = "embed"
    out: DType

    def infer(self, inputs: Types) -> Types:
        _, table = inputs
        return (TensorType(self.out, (R, table.channels)),)

    def cost(self, inputs: Types) -> Cost:
        """One table row is gathered per row, not the table."""
        _, table = inputs
        row = table.dtype.row_bytes(table.channels)
        out = self.infer(inputs)[0].bytes(1)
        return Cost(0, 4 + row + out, 0)


@dataclass(frozen=True)
class BroadcastStreams(Op):
    """x[R,D] -> x[R,S,D]: every stream starts as the embedding."""

    name: ClassVar[str] = "broadcast_streams"
    streams: int

    def infer(self, inputs: Types) -> Types:
        (x,) = inputs
        return (TensorType(x.dtype, (R, self.streams, x.channels)),)


@dataclass(frozen=True)
class FirstStream(Op):
    """position i32[R] -> pre f32[R,S]: one on stream 0, the coefficients of the first collapse."""

    name: ClassVar[str] = "first_stream"
    streams: int

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.F32, (R, self.streams)),)


@dataclass(frozen=True)
class MhcCoefficients(Op):
    """(X[R,S,D], fn f32[(2+S)S,SD], base f32[(2+S)S], scale f32[3]) -> pre, post f32[R,S],
    comb f32[R,S,S] (row: input stream, column: output stream). Section 3.4."""

    name: ClassVar[str] = "mhc_coefficients"
    iterations: int
    eps: float
    norm_eps: float

    def infer(self, inputs: Types) -> Types:
        x, fn, base, scale = inputs
        streams = x.inner[0]
        mixes = (2 + streams) * streams
        _require(fn.shape == (mixes, x.width), f"mhc fn {fn} for {x}")
        _require(base.shape == (mixes,) and scale.shape == (3,), f"mhc base {base}, scale {scale}")
        vector = TensorType(DType.F32, (R, streams))
        return vector, vector, TensorType(DType.F32, (R, streams, streams))

    def flops_per_row(self, inputs: Types) -> int:
        x, fn, *_ = inputs
        return 2 * fn.width * int(fn.shape[0] if isinstance(fn.shape[0], int) else 0) + 2 * x.width


@dataclass(frozen=True)
class MhcCollapse(Op):
    """(X[R,S,D], pre f32[R,S]) -> y[R,D] = sum_s pre[s] X[s]. Section 3.4."""

    name: ClassVar[str] = "mhc_collapse"

    def infer(self, inputs: Types) -> Types:
        x, pre = inputs
        _require(pre.inner == x.inner[:1], f"collapse {x} with {pre}")
        return (TensorType(x.dtype, (R, x.channels)),)

    def flops_per_row(self, inputs: Types) -> int:
        return 2 * inputs[0].width


@dataclass(frozen=True)
class MhcExpand(Op):
    """(o[R,D], X[R,S,D], post f32[R,S], comb f32[R,S,S]) -> X'[R,S,D]:
    X'[j] = post[j] o + sum_i comb[i,j] X[i]. Section 3.4."""

    name: ClassVar[str] = "mhc_expand"

    def infer(self, inputs: Types) -> Types:
        o, x, _, comb = inputs
        _require(o.channels == x.channels and comb.inner == (x.inner[0],) * 2, f"expand {o}, {x}")
        return (x,)

    def flops_per_row(self, inputs: Types) -> int:
        _, x, _, _ = inputs
        return 2 * x.width * (x.inner[0] + 1)


@dataclass(frozen=True)
class RmsNorm(Op):
    """(x[R,N], w bf16[N]) -> w x rsqrt(mean(x^2) + eps), one rounding. Section 3.3."""

    name: ClassVar[str] = "rmsnorm"
    eps: float

    def infer(self, inputs: Types) -> Types:
        x, w = inputs
        _require(w.shape == x.inner, f"rmsnorm {x} with {w}")
        return (x,)

    def flops_per_row(self, inputs: Types) -> int:
        return 4 * inputs[0].width


@dataclass(frozen=True)
class Quantize(Op):
    """x[R,...,N] -> the same rows as records of type `to`. Sections 4.1 to 4.4."""

    name: ClassVar[str] = "quantize"
    to: DType

    def infer(self, inputs: Types) -> Types:
        (x,) = inputs
        fits = self.to.is_record and x.channels % self.to.group == 0
        _require(fits, f"quantize {x} to {self.to}")
        return (x.with_dtype(self.to),)

    def flops_per_row(self, inputs: Types) -> int:
        return 3 * inputs[0].width


@dataclass(frozen=True)
class Linear(Op):
    """(x[R,K], w[N,K] bf16) or (x, w e4m3[N,K], scale ue8m0[N/32,K/32]) -> out[R,N]. Section 3.1.

    Trailing dims of x are taken as one. `groups` > 1: x is [R,groups,K/groups] and group g feeds
    outputs g N/groups ... only, w is [N,K/groups] (section 3.10). `heads` shapes the result
    [R,heads,N/heads]; 0 leaves it flat.
    """

    name: ClassVar[str] = "linear"
    out: DType
    groups: int = 1
    heads: int = 0

    def infer(self, inputs: Types) -> Types:
        x, w, *scale = inputs
        rows = w.shape[0]
        assert isinstance(rows, int)
        _require(x.width == w.channels * self.groups, f"linear {x} with {w}, groups {self.groups}")
        whole = rows % (self.heads or 1) == 0 and rows % self.groups == 0
        _require(whole, f"linear {w} heads, groups")
        _require(bool(scale) == (w.dtype is DType.E4M3), f"linear {w} and scales {len(scale)}")
        if scale:
            expect = (-(-rows // 32), -(-w.channels // 32))
            _require(scale[0].shape == expect, f"linear scale {scale[0]}, expected {expect}")
        shape = (R, self.heads, rows // self.heads) if self.heads else (R, rows)
        return (TensorType(self.out, shape),)

    def flops_per_row(self, inputs: Types) -> int:
        _, w, *_ = inputs
        return 2 * w.width * int(w.shape[0] if isinstance(w.shape[0], int) else 0)


@dataclass(frozen=True)
class RopeAngles(Op):
    """position i32[R] -> f32[R,2,dim/2]: cos, then sin, of fp32(p) * f_k. Section 3.5.

    Position p of a ratio-2 entry is its group's first token: p - p % ratio. `yarn_factor` 0: none.
    """

    name: ClassVar[str] = "rope_angles"
    dim: int
    theta: float
    ratio: int = 1
    yarn_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    original: int = 0

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.F32, (R, 2, self.dim // 2)),)


@dataclass(frozen=True)
class Rope(Op):
    """(x[R,...,N], angles f32[R,2,r/2]) -> x with its last r channels rotated in adjacent pairs.

    `inverse` rotates back (section 3.10)."""

    name: ClassVar[str] = "rope"
    inverse: bool = False

    def infer(self, inputs: Types) -> Types:
        x, angles = inputs
        _require(2 * angles.channels <= x.channels, f"rope {x} with {angles}")
        return (x,)

    def flops_per_row(self, inputs: Types) -> int:
        x, angles = inputs
        return 6 * angles.channels * (x.width // x.channels)


@dataclass(frozen=True)
class RingStore(Op):
    """(ring state[slots,len,...], slot, position, rows...) -> state: row of position p goes to
    `ring[slot, p % len]`; of rows that share a place the last one stays. Several row operands lie
    one after another in an entry. Section 6.2."""

    name: ClassVar[str] = "ring_store"
    consumes: ClassVar[tuple[int, ...]] = (0,)

    def infer(self, inputs: Types) -> Types:
        ring, _, _, *rows = inputs
        width = ring.width // ring.inner[0]
        _require(ring.state and sum(r.width for r in rows) == width, f"ring_store {ring}")
        _require(all(r.dtype is ring.dtype for r in rows), f"ring_store {ring} of {rows[0]}")
        return (ring,)

    def flops_per_row(self, inputs: Types) -> int:
        return 0

    def state_bytes(self, inputs: Types) -> int:
        return sum(r.bytes(1) for r in inputs[3:])


@dataclass(frozen=True)
class PageStore(Op):
    """(pages state[pages,entries,N], page_table, slot, position, rows[R,N]) -> state.

    A row is stored when it completes a group, (p + 1) % ratio == 0, as entry p // ratio."""

    name: ClassVar[str] = "page_store"
    consumes: ClassVar[tuple[int, ...]] = (0,)
    ratio: int

    def infer(self, inputs: Types) -> Types:
        pages, _, _, _, rows = inputs
        _require(pages.state and pages.dtype is rows.dtype, f"page_store {pages} of {rows}")
        _require(pages.channels == rows.channels, f"page_store {pages} of {rows}")
        return (pages,)

    def flops_per_row(self, inputs: Types) -> int:
        return 0

    def state_bytes(self, inputs: Types) -> int:
        return inputs[4].bytes(1) // self.ratio


@dataclass(frozen=True)
class PoolGroup(Op):
    """(tail state f32[slots,len,2,N], slot, position) -> out[R,N]. Section 3.7, ratio 2.

    An entry of `tail` is (value, score). Channel-wise softmax over the scores of the `ratio` tokens
    ending at p weighs their values; rows that complete no group are zero."""

    name: ClassVar[str] = "pool_group"
    ratio: int
    out: DType

    def infer(self, inputs: Types) -> Types:
        tail, *_ = inputs
        return (TensorType(self.out, (R, tail.channels)),)

    def flops_per_row(self, inputs: Types) -> int:
        return 6 * inputs[0].channels * self.ratio

    def state_bytes(self, inputs: Types) -> int:
        return self.ratio * 2 * 4 * inputs[0].channels


@dataclass(frozen=True)
class ChunkPoolGroup(PoolGroup):
    """(tail, slot, position, row_start, value f32[R,N], score f32[R,N]) -> out[R,N]: `PoolGroup`
    for prefill."""

    name: ClassVar[str] = "chunk_pool_group"


@dataclass(frozen=True)
class SparseAttention(EntryOp):
    """(q[R,H,d], window state mxfp8[slots,len,d], slot, position, sink f32[H],
    [pages state nvfp4[pages,entries,d], page_table, selected i32[R,k]]) -> o[R,H,d]. Section 3.9.

    Keys: window positions max(0, p - window + 1)..p, then the selected entries (-1: none), all in
    one softmax with the sink in the denominator. Decode: the rows are in the window already."""

    name: ClassVar[str] = "sparse_attention"
    window: int
    scale: float
    ratio: int = 0

    def infer(self, inputs: Types) -> Types:
        q, window, *_ = inputs
        _require(q.channels == window.channels, f"attention {q} over {window}")
        return (q,)

    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        """A product with each key and one with each value. A list holds k entries as soon as so
        many are visible: candidate blocks short of that by a part of the newest are not told."""
        flops = 4 * inputs[0].width
        window = PerEntry(flops, 1, self.window, 1)
        if not self.ratio:
            return (window,)
        return window, PerEntry(flops, self.ratio, inputs[-1].channels, 1)

    def state_bytes(self, inputs: Types) -> int:
        window = inputs[1]
        total = self.window * window.dtype.row_bytes(window.channels)
        if self.ratio:
            pages, _, selected = inputs[-3:]
            total += selected.channels * pages.dtype.row_bytes(pages.channels)
        return total


@dataclass(frozen=True)
class ChunkAttention(SparseAttention):
    """(q, window before the chunk, slot, position, sink, row_start, kv mxfp8[R,d],
    [pages, page_table, selected]) -> o[R,H,d]: `SparseAttention` for prefill."""

    name: ClassVar[str] = "chunk_attention"


@dataclass(frozen=True)
class IndexScores(EntryOp):
    """(q mxfp4[R,Hi,Di], weight[R,Hi], keys state mxfp4[pages,entries,Di], page_table, slot,
    position) -> out[R,entries of a request]: sum_h weight[h] factor relu(q[h] . k), -inf where not
    visible. Section 3.8. A bf16 `out` rounds the dot, the product and the sum, as REF does."""

    name: ClassVar[str] = "index_scores"
    ratio: int
    factor: float
    out: DType

    def infer(self, inputs: Types) -> Types:
        _, _, keys, page_table, *_ = inputs
        return (TensorType(self.out, (R, page_table.channels * keys.inner[0])),)

    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        return (PerEntry(2 * inputs[0].width, self.ratio, self.infer(inputs)[0].channels, 1),)

    def state_bytes(self, inputs: Types) -> int:
        keys = inputs[2]
        return self.infer(inputs)[0].channels * keys.dtype.row_bytes(keys.channels)


@dataclass(frozen=True)
class CandidateScores(IndexScores):
    """(q, weight, keys, page_table, slot, position, blocks i32[R,B]) -> out[R,B*block_size]: scores
    of the entries of candidate blocks; slot b*block_size + i is entry blocks[b]*block_size + i."""

    name: ClassVar[str] = "candidate_scores"
    block_size: int = 8

    def infer(self, inputs: Types) -> Types:
        blocks = inputs[-1]
        return (TensorType(self.out, (R, blocks.channels * self.block_size)),)

    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        entries = self.infer(inputs)[0].channels
        return (PerEntry(2 * inputs[0].width, self.ratio, entries, self.block_size),)


@dataclass(frozen=True)
class TopK(EntryOp):
    """(scores[R,C], position) -> i32[R,k]: the k highest visible entries, ascending, -1 padded;
    of equal scores the lower entry. Section 3.8."""

    name: ClassVar[str] = "topk"
    k: int
    ratio: int

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.I32, (R, self.k)),)

    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        return (PerEntry(4, self.ratio, inputs[0].channels, 1),)


@dataclass(frozen=True)
class CandidateTopK(EntryOp):
    """(scores[R,B*block_size], blocks i32[R,B]) -> i32[R,k]: like `TopK`, in entry numbers;
    scores of -inf are never taken. `ratio`: tokens of an entry."""

    name: ClassVar[str] = "candidate_topk"
    k: int
    ratio: int
    block_size: int

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.I32, (R, self.k)),)

    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        return (PerEntry(4, self.ratio, inputs[0].channels, self.block_size),)


@dataclass(frozen=True)
class TopBlocks(EntryOp):
    """(scores[R,C], position) -> i32[R,blocks]: blocks by their best visible entry, ascending, -1
    padded; the block of the newest visible entry is always taken. Section 3.8."""

    name: ClassVar[str] = "top_blocks"
    blocks: int
    block_size: int
    ratio: int

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.I32, (R, self.blocks)),)

    def per_entry(self, inputs: Types) -> tuple[PerEntry, ...]:
        return (PerEntry(2, self.ratio, inputs[0].channels, 1),)


@dataclass(frozen=True)
class TopKGate(Op):
    """(logits f32[R,E], bias f32[E], [bias_vl f32[E], image]) -> expert i32[R,k], weight f32[R,k].

    sc = sqrt(softplus(logit)); experts by sc + bias (bias_vl on image rows), ascending ids, lower
    id on ties; weight = scale sc / (sum of the chosen sc + 1e-20). Section 3.11."""

    name: ClassVar[str] = "topk_gate"
    k: int
    scale: float

    def infer(self, inputs: Types) -> Types:
        _same_rows(inputs[0])
        return TensorType(DType.I32, (R, self.k)), TensorType(DType.F32, (R, self.k))

    def flops_per_row(self, inputs: Types) -> int:
        return 4 * inputs[0].channels


@dataclass(frozen=True)
class ExpertLinear(Op):
    """(x[R,K] or x[R,k,K], expert i32[R,k], w e2m1[E,N,K], scale ue8m0[E,N,K/32]) -> out[R,k,N].
    Section 3.11."""

    name: ClassVar[str] = "expert_linear"
    out: DType

    def infer(self, inputs: Types) -> Types:
        x, expert, w, scale = inputs
        n, k = w.inner
        _require(x.channels == k and scale.inner == (n, k // 32), f"experts {x} {w} {scale}")
        return (TensorType(self.out, (R, expert.channels, n)),)

    def flops_per_row(self, inputs: Types) -> int:
        _, expert, w, _ = inputs
        return 2 * w.width * expert.channels

    def cost(self, inputs: Types) -> Cost:
        """Each row picks its own experts."""
        x, expert, w, scale = inputs
        experts = w.shape[0]
        assert isinstance(experts, int)
        pool = w.bytes(1) + scale.bytes(1)
        picked = expert.channels * pool // experts
        moved = x.bytes(1) + expert.bytes(1) + self.infer(inputs)[0].bytes(1)
        return Cost(0, moved, self.flops_per_row(inputs), picked, pool)


@dataclass(frozen=True)
class SwiGlu(Op):
    """(gate[R,...,I], up[R,...,I], [weight f32[R,k]]) -> weight silu(min(gate, limit))
    clamp(up, limit). Section 3.11."""

    name: ClassVar[str] = "swiglu"
    limit: float

    def infer(self, inputs: Types) -> Types:
        gate, up, *_ = inputs
        _require(gate == up, f"swiglu {gate}, {up}")
        return (gate,)

    def flops_per_row(self, inputs: Types) -> int:
        return 8 * inputs[0].width


@dataclass(frozen=True)
class MoeCombine(Op):
    """(routed[R,k,D], shared[R,D]) -> sum over k + shared, one rounding. Section 3.11."""

    name: ClassVar[str] = "moe_combine"

    def infer(self, inputs: Types) -> Types:
        routed, shared = inputs
        _require(routed.channels == shared.channels, f"combine {routed}, {shared}")
        return (shared,)

    def flops_per_row(self, inputs: Types) -> int:
        return inputs[0].width + inputs[1].width


@dataclass(frozen=True)
class MapToken(Op):
    """(token_id i32[R], image i32[R], token_map i32[V]) -> i32[R]: the compressed id, -1 on image
    rows. Section 3.12 a, d."""

    name: ClassVar[str] = "map_token"

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.I32, (R, 1)),)

    def cost(self, inputs: Types) -> Cost:
        """One entry of the map per row."""
        return Cost(0, 4 * 4, 1)


@dataclass(frozen=True)
class EngramHash(Op):
    """(history state i32[slots,len,1], slot, position) -> i32[R, (n-1) heads]: table rows of the
    hashed n-grams ending at each position. Section 3.12 b to d.

    `primes` are n-gram-major, head-minor; column c starts at the sum of the primes before it."""

    name: ClassVar[str] = "engram_hash"
    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    pad: int

    def infer(self, inputs: Types) -> Types:
        return (TensorType(DType.I32, (R, len(self.primes))),)

    def flops_per_row(self, inputs: Types) -> int:
        return 4 * len(self.primes)

    def state_bytes(self, inputs: Types) -> int:
        return 4 * len(self.multipliers)


@dataclass(frozen=True)
class ChunkEngramHash(EngramHash):
    """(history, slot, position, row_start, ids i32[R,1]) -> i32[R, (n-1) heads]: `EngramHash` for
    prefill."""

    name: ClassVar[str] = "chunk_engram_hash"


@dataclass(frozen=True)
class EngramLookup(Op):
    """(rows i32[R,C], table e4m3[N,d], scale ue8m0[N,d/32]) -> mxfp8[R,C*d]: the stored codes and
    scales, gathered. Section 3.12 e."""

    name: ClassVar[str] = "engram_lookup"

    def infer(self, inputs: Types) -> Types:
        rows, table, _ = inputs
        return (TensorType(DType.MXFP8, (R, rows.channels * table.channels)),)

    def cost(self, inputs: Types) -> Cost:
        """The hashed rows are gathered, not the table."""
        rows, _, _ = inputs
        return Cost(0, rows.bytes(1) + 2 * self.infer(inputs)[0].bytes(1), 0)


@dataclass(frozen=True)
class EngramGate(Op):
    """(X[R,S,D], kv[R,(S+1)D], q_weight bf16[S,D], k_weight bf16[S,D], image) -> X + gate value.
    kv is S keys, then the value; image rows pass unchanged. Section 3.12 f."""

    name: ClassVar[str] = "engram_gate"
    norm_eps: float

    def infer(self, inputs: Types) -> Types:
        x, kv, q_weight, _, _ = inputs
        _require(kv.channels == (x.inner[0] + 1) * x.channels, f"engram_gate {x}, {kv}")
        _require(q_weight.shape == x.inner, f"engram_gate {x}, {q_weight}")
        return (x,)

    def flops_per_row(self, inputs: Types) -> int:
        return 10 * inputs[0].width


@dataclass(frozen=True)
class SelectRows(Op):
    """(x[rows,D], row i32[R]) -> x[R,D]: the rows that sample; x is a fixed-size buffer."""

    name: ClassVar[str] = "select_rows"

    def infer(self, inputs: Types) -> Types:
        x, _ = inputs
        return (TensorType(x.dtype, (R, x.channels)),)

    def cost(self, inputs: Types) -> Cost:
        """One row is gathered per row."""
        return Cost(0, 4 + 2 * self.infer(inputs)[0].bytes(1), 0)


def mask_words(vocab: int) -> int:
    """How many i32 hold one bit for each token."""
    return -(-vocab // 32)


@dataclass(frozen=True)
class Sample(Op):
    """(logits f32[R,V], biased i32[R], bias_token i32[R,B], bias f32[R,B], counted i32[R],
    token_counts i32[slots,V], repetition f32[R], frequency f32[R], presence f32[R], masked i32[R],
    allowed i32[R,ceil(V/32)], shortlist i32[R], temperature f32[R], top_p f32[R], top_k i32[R],
    min_p f32[R], top_count i32[R], seed i64[R], position i64[R], forced i32[R], summed i32[R])
    -> token i32[R,1], logprob f32[R,1], top_token i32[R,L], top_logprob f32[R,L],
    smaller f32[R,1]. Section 3.18.

    First, logits change, each step rounded to fp32, in vLLM's order but for its mask, which may
    come last as it is -inf:

    - the first biased of bias_token, ascending, get bias added;
    - where counted is not 0, tokens whose token_counts[counted] is not 0 are penalised. Its sign
      bit says that the token is in the prompt, the other bits count it in the answer. Positive
      logits are divided by repetition, others multiplied; then frequency times the count is taken
      off, then presence if the count is not 0;
    - where masked is not 0, token j has its logit if bit j mod 32 of word j div 32 is set, else
      -inf;
    - where shortlist is over 0, all but the first shortlist tokens of the order below get -inf.

    What a row does not ask for is not read. Temperature 0 is the argmax, lowest id on ties, with
    these logits as they are. Otherwise they are divided by it and put in order, of equal ones the
    lower id first; a beginning of that order is kept: of top-p, the tokens with at most top_p of
    all mass before them; of these top_k; of these the ones with at least min_p of the best one's
    probability. A top_p of 1, a top_k of 0 or less and a min_p of 0 keep all. The token is the
    first whose fp64 cumulative probability among the kept exceeds u, from the fresh-sample stream.

    Log probabilities are those of the kept tokens, and -inf of others. The lists are the first
    top_count of the order, at most L; the rest of a row is not written. Masses are integers:
    exp(logit - best) in units of 2^-44, rounded to nearest; top_p of their sum is rounded down.

    Where forced is not 0 the token is forced - 1, whatever its probability. Where summed is not 0,
    smaller is the probability of the tokens with a lower logit than the token's, and of those with
    the same logit up to its id, itself included; of other rows it is not written.
    """

    name: ClassVar[str] = "sample"
    listed: int

    def infer(self, inputs: Types) -> Types:
        logits, _, bias_token, bias, _, counts, _, _, _, _, allowed, *_ = inputs
        _require(0 < self.listed <= logits.channels, f"sample lists {self.listed}, {logits}")
        _require(bias_token.shape == bias.shape, f"sample {bias_token}, {bias}")
        _require(counts.channels == logits.channels, f"sample {logits}, {counts}")
        _require(allowed.channels == mask_words(logits.channels), f"sample {logits}, {allowed}")
        token, top = (R, 1), (R, self.listed)
        return (
            TensorType(DType.I32, token),
            TensorType(DType.F32, token),
            TensorType(DType.I32, top),
            TensorType(DType.F32, top),
            TensorType(DType.F32, token),
        )

    def flops_per_row(self, inputs: Types) -> int:
        return 4 * inputs[0].channels

    def cost(self, inputs: Types) -> Cost:
        """Few rows ask for lists, biases, penalties or a mask: none is counted."""
        moved = [t for t in inputs[1:] if t.by_rows and not t.inner]
        moved += [inputs[0], *self.infer(inputs)[:2]]
        return Cost(0, sum(t.bytes(1) for t in moved), self.flops_per_row(inputs))


OPS: tuple[type[Op], ...] = (
    Embed,
    BroadcastStreams,
    FirstStream,
    MhcCoefficients,
    MhcCollapse,
    MhcExpand,
    RmsNorm,
    Quantize,
    Linear,
    RopeAngles,
    Rope,
    RingStore,
    PageStore,
    PoolGroup,
    ChunkPoolGroup,
    SparseAttention,
    ChunkAttention,
    IndexScores,
    CandidateScores,
    TopK,
    CandidateTopK,
    TopBlocks,
    TopKGate,
    ExpertLinear,
    SwiGlu,
    MoeCombine,
    MapToken,
    EngramHash,
    ChunkEngramHash,
    EngramLookup,
    EngramGate,
    SelectRows,
    Sample,
)
