"""Index scores, top-k of entries and blocks, and the router: everything that chooses.

Scores compare exactly; of equal ones the lower number wins. Lists come out ascending, -1 padded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.attention import page_entries
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, rounded, store
from deepinfer_compile.ir.types import DType


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.CandidateScores():
            entry = block_entries(xs[6].ints, op.block_size)
            return (store(index_scores(op, xs, entry), op.out),)
        case ops.IndexScores():
            entry = torch.arange(out[0].channels).expand(xs[0].rows, -1)
            return (store(index_scores(op, xs, entry), op.out),)
        case ops.TopK():
            scores = _visible_only(xs[0].reals, xs[1].ints, op.ratio)
            entry = torch.arange(scores.shape[1]).expand_as(scores)
            return (top(scores, entry, op.k),)
        case ops.CandidateTopK():
            entry = block_entries(xs[1].ints, op.block_size)
            return (top(xs[0].reals.masked_fill(entry < 0, -torch.inf), entry, op.k),)
        case ops.TopBlocks():
            return (top_blocks(op, xs[0].reals, xs[1].ints),)
        case ops.TopKGate():
            return topk_gate(op, *xs)
    return None


def block_entries(blocks: Tensor, size: int) -> Tensor:
    """Entries [R, B*size] of blocks [R,B]; those of block -1 are -1."""
    entry = blocks.unsqueeze(2) * size + torch.arange(size)
    return torch.where(blocks.unsqueeze(2) < 0, -1, entry).flatten(1)


def index_scores(op: ops.IndexScores, xs: Operands, entry: Tensor) -> Tensor:
    """[R,n] scores of entries [R,n]. A bf16 result rounds where the released GEMMs round."""
    q, weight, keys, page_table, slot, position = xs[:6]
    queries, weights = q.reals, weight.reals * op.factor
    table = keys.reals.flatten(0, 1)
    index = page_entries(page_table.ints[slot.ints], entry, keys.stored.shape[1])
    seen = (entry >= 0) & (entry < _visible(position.ints, op.ratio).unsqueeze(1))
    scores = torch.full(entry.shape, -torch.inf, dtype=torch.float64)
    for r in range(q.rows):
        dots = _inner(queries[r] @ table[index[r, seen[r]]].T, op.out)
        products = _inner(weights[r].unsqueeze(1) * dots.relu(), op.out)
        scores[r, seen[r]] = products.sum(0)
    return scores


def _inner(reals: Tensor, out: DType) -> Tensor:
    return rounded(reals, out) if out is DType.BF16 else reals


def _visible(position: Tensor, ratio: int) -> Tensor:
    return (position + 1) // ratio


def _visible_only(scores: Tensor, position: Tensor, ratio: int) -> Tensor:
    entry = torch.arange(scores.shape[1])
    return scores.masked_fill(entry >= _visible(position, ratio).unsqueeze(1), -torch.inf)


def top(scores: Tensor, number: Tensor, k: int) -> Tensor:
    """i32[R,k]: the numbers of the k highest scores of each row; -inf is never taken."""
    width = scores.shape[1]
    by_number = number.argsort(dim=1, stable=True)
    scores, number = scores.gather(1, by_number), number.gather(1, by_number)
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    none = torch.iinfo(torch.int64).max
    taken = torch.where(scores.gather(1, best) > -torch.inf, number.gather(1, best), none)
    taken = taken.sort(dim=1).values
    taken = torch.where(taken == none, -1, taken)
    return functional.pad(taken, (0, max(0, k - width)), value=-1).to(torch.int32)


def top_blocks(op: ops.TopBlocks, scores: Tensor, position: Tensor) -> Tensor:
    """i32[R,blocks]. Pinning is an infinite score for the block of the newest visible entry."""
    scores = _visible_only(scores, position, op.ratio)
    ragged = -scores.shape[1] % op.block_size
    scores = functional.pad(scores, (0, ragged), value=-torch.inf)
    best = scores.reshape(len(scores), -1, op.block_size).amax(2)
    number = torch.arange(best.shape[1]).expand_as(best)
    visible = _visible(position, op.ratio).unsqueeze(1)
    newest = (visible > 0) & (number == (visible - 1) // op.block_size)
    return top(best.masked_fill(newest, torch.inf), number, op.blocks)


def topk_gate(
    op: ops.TopKGate,
    logits: Operand,
    bias: Operand,
    bias_vl: Operand | None = None,
    image: Operand | None = None,
) -> Results:
    """The bias moves the choice, never the weights."""
    x = logits.reals
    # logaddexp is softplus without its cut-over: past 20 the two differ by less than an f32 ulp.
    score = torch.logaddexp(x, torch.zeros(())).sqrt()
    moved = bias.reals.expand_as(score)
    if bias_vl is not None and image is not None:
        moved = torch.where(image.ints.unsqueeze(1) != 0, bias_vl.reals, moved)
    expert = top(score + moved, torch.arange(x.shape[1]).expand_as(x), op.k)
    chosen = score.gather(1, expert.long())
    weight = op.scale * chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return expert, store(weight, DType.F32)
