"""The sampler's operands by name, its kernel and its float64 reference side by side."""

import torch

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.harness import run_kernel

# Rows of every test are as the host writes them where a test says nothing: greedy, all kept.
DTYPES = {
    "biased": torch.int32,
    "bias_token": torch.int32,
    "bias": torch.float32,
    "counted": torch.int32,
    "token_counts": torch.int32,
    "repetition": torch.float32,
    "frequency": torch.float32,
    "presence": torch.float32,
    "masked": torch.int32,
    "allowed": torch.int32,
    "shortlist": torch.int32,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "top_k": torch.int32,
    "min_p": torch.float32,
    "top_count": torch.int32,
    "seed": torch.int64,
    "position": torch.int64,
    "forced": torch.int32,
    "summed": torch.int32,
}
DEFAULTS = {"top_p": 1.0, "top_k": -1}
SLOTS = 3
NAMES = {torch.float32: DType.F32, torch.int32: DType.I32, torch.int64: DType.I64}


def operands(logits, **arrays):
    """Tensors and types of the operator; an array is a value per row, or one for all. Of those
    with more dims, zeros stand for what a test does not give."""
    rows, vocab = logits.shape
    biases = min(300, vocab)
    shapes = {
        "bias_token": (R, biases),
        "bias": (R, biases),
        "token_counts": (SLOTS, vocab),
        "allowed": (R, ops.mask_words(vocab)),
    }
    given = DEFAULTS | arrays
    assert given.keys() <= DTYPES.keys()
    tensors, types = [logits], [TensorType(DType.F32, (R, vocab))]
    for name, dtype in DTYPES.items():
        value = torch.as_tensor(given.get(name, 0), dtype=dtype)
        shape = shapes.get(name, (R,))
        whole = tuple(rows if dim is R else dim for dim in shape)
        tensors.append(value if value.dim() else value.repeat(whole))
        types.append(TensorType(NAMES[dtype], shape))
    return tensors, types


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
