"""Embedding, hyper-connections, norm, quantisation, matrices, rotation, experts: rows alone.

Nothing here reads a state or another row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, store
from deepinfer_compile.ir.types import DType


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.Embed():
            return (store(xs[1].reals[xs[0].ints], op.out),)
        case ops.BroadcastStreams():
            return (xs[0].stored.unsqueeze(1).repeat(1, op.streams, 1),)
        case ops.FirstStream():
            first = torch.zeros(xs[0].rows, op.streams, dtype=torch.float32)
            first[:, 0] = 1
            return (first,)
        case ops.MhcCoefficients():
            return mhc_coefficients(op, *xs)
        case ops.MhcCollapse():
            x, pre = xs[0].reals, xs[1].reals
            return (store((pre.unsqueeze(-1) * x).sum(1), out[0].dtype),)
        case ops.MhcExpand():
            return (store(mhc_expand(*(x.reals for x in xs)), out[0].dtype),)
        case ops.RmsNorm():
            x, w = xs[0].reals, xs[1].reals
            return (store(w * x * _inverse_rms(x, op.eps), out[0].dtype),)
        case ops.Quantize():
            return (codecs.encode_records(xs[0].stored, op.to),)
        case ops.Linear():
            return (store(linear(op, *xs).reshape(-1, *out[0].inner), op.out),)
        case ops.RopeAngles():
            return (rope_angles(op, xs[0].ints),)
        case ops.Rope():
            return (store(rotate(xs[0].reals, xs[1].reals, op.inverse), out[0].dtype),)
        case ops.ExpertLinear():
            return (store(expert_linear(*xs), op.out),)
        case ops.SwiGlu():
            return (store(swiglu(op.limit, *(x.reals for x in xs)), out[0].dtype),)
        case ops.MoeCombine():
            routed, shared = xs
            return (store(routed.reals.sum(1) + shared.reals, out[0].dtype),)
        case ops.SelectRows():
            return (xs[0].stored[xs[1].ints],)
    return None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def mhc_coefficients(
    op: ops.MhcCoefficients, x: Operand, fn: Operand, base: Operand, scale: Operand
) -> Results:
    """Section 3.4. One statistic over all streams; the first Sinkhorn iteration is the softmax."""
    streams = x.type.inner[0]
    flat = x.reals.flatten(1)
    mixes = (flat @ fn.reals.T) * _inverse_rms(flat, op.norm_eps)
    parts = torch.tensor([streams, streams, streams * streams])
    logits = mixes * scale.reals.repeat_interleave(parts) + base.reals
    pre = torch.sigmoid(logits[:, :streams]) + op.eps
    post = 2 * torch.sigmoid(logits[:, streams : 2 * streams])
    comb = torch.softmax(logits[:, 2 * streams :].reshape(-1, streams, streams), dim=2) + op.eps
    comb = comb / (comb.sum(1, keepdim=True) + op.eps)
    for _ in range(op.iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + op.eps)
        comb = comb / (comb.sum(1, keepdim=True) + op.eps)
    return store(pre, DType.F32), store(post, DType.F32), store(comb, DType.F32)


def mhc_expand(o: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The sum runs over comb's first stream index, the input's."""
    return post.unsqueeze(-1) * o.unsqueeze(1) + comb.transpose(1, 2) @ x


def weight_reals(w: Operand, scale: Operand | None) -> Tensor:
    """A matrix with its scales applied: 32x32 blocks beside e4m3, 1x32 beside e2m1."""
    values = w.reals
    if scale is None:
        return values
    wide = scale.reals.repeat_interleave(32, dim=-1)[..., : values.shape[-1]]
    if w.type.dtype is DType.E4M3:
        wide = wide.repeat_interleave(32, dim=-2)[..., : values.shape[-2], :]
    return values * wide


def linear(op: ops.Linear, x: Operand, w: Operand, scale: Operand | None = None) -> Tensor:
    """[R,N]; group g of the inputs feeds the g-th part of the outputs."""
    weight = weight_reals(w, scale)
    parts = weight.reshape(op.groups, -1, weight.shape[-1])
    rows = x.reals.reshape(x.rows, op.groups, -1)
    return torch.einsum("rgk,gnk->rgn", rows, parts).flatten(1)


def rope_frequencies(op: ops.RopeAngles) -> Tensor:
    """f_k, f32[dim/2]. Section 3.5: every step in f32, the power before the reciprocal.

    Each f32 step is rounded from float64, so the bits do not depend on a maths library.
    """
    k = torch.arange(op.dim // 2, dtype=torch.float32)
    power = (op.theta ** (2 * k.double() / op.dim)).float()
    f = 1 / power
    if op.yarn_factor == 0:
        return f
    low, high = (
        op.dim * math.log(op.original / (turns * 2 * math.pi)) / (2 * math.log(op.theta))
        for turns in (op.beta_fast, op.beta_slow)
    )
    first, last = max(math.floor(low), 0), min(math.ceil(high), op.dim - 1)
    ramp = ((k - first) / max(last - first, 0.001)).clamp(0, 1)
    return f / op.yarn_factor * ramp + f * (1 - ramp)


def rope_angles(op: ops.RopeAngles, position: Tensor) -> Tensor:
    """cos and sin of the f32 product, each rounded once."""
    first = (position - position % op.ratio).float()
    angle = (first.unsqueeze(1) * rope_frequencies(op)).double()
    return store(torch.stack([angle.cos(), angle.sin()], dim=1), DType.F32)


def rotate(x: Tensor, angles: Tensor, inverse: bool) -> Tensor:
    """The last channels of x as complex pairs times e^(i angle), or its conjugate."""
    cos, sin = (a.reshape(len(x), *[1] * (x.dim() - 2), -1) for a in angles.unbind(1))
    sin = -sin if inverse else sin
    turned = 2 * cos.shape[-1]
    kept, tail = x[..., :-turned], x[..., -turned:]
    re, im = tail[..., 0::2], tail[..., 1::2]
    pairs = torch.stack([re * cos - im * sin, re * sin + im * cos], dim=-1)
    return torch.cat([kept, pairs.flatten(-2)], dim=-1)


def expert_linear(x: Operand, expert: Operand, w: Operand, scale: Operand) -> Tensor:
    """[R,k,N], one matrix decoded at a time."""
    chosen = expert.ints
    rows = x.reals
    rows = rows if rows.dim() == 3 else rows.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    y = torch.zeros(*chosen.shape, w.type.inner[0], dtype=torch.float64)
    for e in sorted(set(chosen.flatten().tolist())):
        one = weight_reals(Operand(w.stored[e], w.type), Operand(scale.stored[e], scale.type))
        here = chosen == e
        y[here] = rows[here] @ one.T
    return y


def swiglu(limit: float, gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    gate = gate.clamp(max=limit)
    h = gate * torch.sigmoid(gate) * up.clamp(-limit, limit)
    return h if weight is None else h * weight.unsqueeze(-1)
