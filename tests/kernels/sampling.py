"""The sampler's kernel and its float64 reference side by side."""

import torch

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from tests.kernels.harness import run_kernel
from tests.sample_operands import operands


def words_of(allowed):
    """Bools by token, [rows, vocab], as mask words, written bit by bit."""
    rows, vocab = allowed.shape
    words = [[0] * ops.mask_words(vocab) for _ in range(rows)]
    for r, token in allowed.nonzero().tolist():
        words[r][token // 32] |= 1 << token % 32
    return torch.tensor([[w - 2**32 * (w >> 31) for w in row] for row in words])


def op_for(logits):
    return ops.Sample(listed=min(1000, logits.shape[1]))


def sample(logits, splits=1, **arrays):
    """Token, log probability and lists of the kernel, then all of the reference."""
    tensors, types = operands(logits, **arrays)
    op = op_for(logits)
    token, logprob, *lists, _ = run_kernel(op, tensors, types, len(logits), splits)
    return token.flatten(), logprob.flatten(), lists, evaluate(op, tensors, types)


def check(logits, **arrays):
    """Kernel and reference agree: tokens and lists exactly, probabilities to fp32."""
    token, logprob, (top, top_logprob), reference = sample(logits, **arrays)
    assert torch.equal(token, reference[0].flatten())
    assert torch.equal(top, reference[2])
    for got, expect in ((logprob, reference[1].flatten()), (top_logprob, reference[3])):
        torch.testing.assert_close(got, expect, rtol=2.0**-22, atol=1e-12)
    return token, logprob, top, top_logprob


def padded(rows, width=80):
    """Logits behind which a mask fills the vocabulary up: few widths mean few kernels to build."""
    given = torch.as_tensor(rows)
    logits = torch.full((len(given), width), -torch.inf)
    logits[:, : given.shape[1]] = given
    return logits


def kept_sets(logits, **arrays):
    """The ids that are kept of each row: those a list of everything gives a probability."""
    vocab = logits.shape[1]
    _, _, (top, top_logprob), _ = sample(logits, top_count=vocab, **arrays)
    return [
        set(ids[logprobs > -torch.inf].tolist())
        for ids, logprobs in zip(top, top_logprob, strict=True)
    ]
