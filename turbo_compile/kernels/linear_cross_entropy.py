"""Cross entropy of a linear head without its logits: a chunk of tokens at a time, and only that chunk's logits exist.

The loss takes its gradients along: they need the same logits, so a step multiplies by the head three times, as it does
without the fusion, and what waits for backward is the gradients, not the logits. Log-probabilities, whose gradients the
caller decides token by token, compute the logits again in backward: four multiplications.

A chunk is as large as its budget allows, so that each reading of the weight, and of the gradient that all chunks add
to, serves many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turbo_compile.kernels import softmax_rows
from turbo_compile.kernels.cross_entropy import accumulate_dtype

# Bytes of one chunk's logits, and never more than the head's weight has. On a 2-core CPU 64 MiB to 1 GiB took the same
# time; on a GPU, at 150,000 words in bf16, 512 MiB are 1,700 tokens, past where reading the weight would show.
BUDGET = {"cpu": 128 << 20, "cuda": 512 << 20}
_LEAST_TOKENS = 256  # a chunk has at least these: for fewer the weight's reading costs more than the product


def chunk_tokens(tokens: int, weight: Tensor) -> int:
    """Tokens in a chunk: as many as fit the budget, spread evenly over the fewest chunks."""
    vocabulary = weight.shape[0]
    itemsize = weight.dtype.itemsize
    budget = min(BUDGET.get(weight.device.type, BUDGET["cuda"]), weight.numel() * itemsize)
    most = max(_LEAST_TOKENS, budget // (vocabulary * itemsize))
    chunks = -(-tokens // most)
    return -(-tokens // max(chunks, 1))


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss (0-d); its gradients for hidden (N, H), weight (V, H) and bias (V,) where `wanted`, else (0,).

    The gradient of hidden is in its dtype, those of weight and bias in that of the sum.
    """
    dtype = accumulate_dtype(hidden.dtype)
    sums = _Gradients(hidden, weight, bias, wanted)
    loss = torch.zeros((), dtype=dtype, device=hidden.device)
    minus_one = torch.full((hidden.shape[0] if any(wanted) else 0,), -1.0, dtype=dtype, device=hidden.device)
    for rows, logits in _logits(hidden, weight, bias):
        if any(wanted):
            logprobs = softmax_rows.statistics_and_gradient_(logits, targets[rows], minus_one[rows], scale, softcap)
            sums.add(rows, logits)
        else:
            _, logprobs, _ = softmax_rows.statistics(logits, targets[rows], scale, softcap, entropy=False)
        loss -= logprobs.sum()
    return loss, sums.hidden, sums.weight, sums.bias


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, lse), each (N,)."""
    dtype = accumulate_dtype(hidden.dtype)
    logprobs, entropy, lse = (torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device) for _ in range(3))
    for rows, logits in _logits(hidden, weight, bias):
        lse[rows], logprobs[rows], entropy[rows] = softmax_rows.statistics(
            logits, targets[rows], scale, softcap, entropy=True
        )
    return logprobs, entropy, lse


def logprobs_backward(
    d_logprobs: Tensor,
    d_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    scale: float,
    softcap: float,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for hidden, weight and bias where `wanted`, else (0,), from those of logprobs and entropy (N,)."""
    sums = _Gradients(hidden, weight, bias, wanted)
    for rows, logits in _logits(hidden, weight, bias):
        given = (targets[rows], lse[rows], entropy[rows], d_logprobs[rows], d_entropy[rows])
        softmax_rows.gradient_(logits, *given, scale, softcap)
        sums.add(rows, logits)
    return sums.hidden, sums.weight, sums.bias


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens with their logits, which all lie in one place: a chunk's are gone when the next is asked for."""
    tokens = hidden.shape[0]
    size = chunk_tokens(tokens, weight)
    place = hidden.new_empty((size, weight.shape[0]))
    for start in range(0, tokens, max(size, 1)):
        rows = slice(start, min(start + size, tokens))
        logits = place[: rows.stop - start]
        if bias is None:
            torch.mm(hidden[rows], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[rows], weight.t(), out=logits)
        yield rows, logits


class _Gradients:
    """Gradients of a head, a chunk at a time."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]) -> None:
        dtype = accumulate_dtype(hidden.dtype)
        self.inputs = (hidden, weight)
        self.wanted = (wanted[0], wanted[1], wanted[2] and bias is not None)
        self.hidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
        shape = weight.shape if wanted[1] else (0,)
        self.weight = torch.zeros(shape, dtype=dtype, device=hidden.device)
        self.bias = torch.zeros(weight.shape[0] if self.wanted[2] else 0, dtype=dtype, device=hidden.device)

    def add(self, rows: slice, d_logits: Tensor) -> None:
        hidden, weight = self.inputs
        if self.wanted[0]:
            torch.mm(d_logits, weight, out=self.hidden[rows])
        if self.wanted[1]:
            _add_product(self.weight, d_logits.t(), hidden[rows])
        if self.wanted[2]:
            self.bias += d_logits.sum(dim=0, dtype=self.bias.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
