"""The softmax of long rows in Triton: a program a row, a block of it at a time. Specified by softmax_rows.reference_.

A row is read twice, once for its statistics and once for its gradient; at a vocabulary of 150,000 in bf16 the rows at
work on all multiprocessors of an H100 fit its L2, so that the second read seldom reaches memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

# Columns a block and warps a program, by compute capability; the default needs no tuning run.
CONFIGURATIONS: dict[tuple[int, int], tuple[int, int]] = {}
DEFAULT = (8192, 16)  # 16 numbers a thread: enough loads in flight, no spills


@triton.jit
def softmax_rows_kernel(
    logits,
    targets,
    lse,
    logprobs,
    entropy,
    d_logprobs,
    d_entropy,
    vocabulary,
    stride,
    scale,
    softcap,
    IGNORED: tl.constexpr,
    CAPPED: tl.constexpr,
    KNOWN: tl.constexpr,
    ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == IGNORED:
        if not KNOWN:
            tl.store(lse + row, 0.0)
            tl.store(logprobs + row, 0.0)
            if ENTROPY:
                tl.store(entropy + row, 0.0)
        if GRADIENT:  # filled, not multiplied by zero: an ignored row may hold anything
            for start in range(0, vocabulary, BLOCK):
                inside = start + columns < vocabulary
                tl.store(logits + start + columns, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=inside)
        return
    if KNOWN:
        total = tl.load(lse + row)
        spread = tl.load(entropy + row) if ENTROPY else 0.0
    else:
        largest = -float("inf")
        sum_exp = 0.0
        sum_product = 0.0
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            z = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
            if CAPPED:
                z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
            above = tl.maximum(largest, tl.max(tl.where(inside, z, -float("inf")), 0))
            exp = tl.where(inside, tl.exp(z - above), 0.0)
            shrink = tl.exp(largest - above)
            sum_exp = sum_exp * shrink + tl.sum(exp, 0)
            if ENTROPY:
                sum_product = sum_product * shrink + tl.sum(exp * z, 0)
            largest = above
        total = largest + tl.log(sum_exp)
        known_word = (target >= 0) & (target < vocabulary)  # another one gives NaN, not what lies beside the row
        picked = tl.load(logits + target, mask=known_word, other=float("nan")).to(tl.float32) * scale
        if CAPPED:
            picked = softcap * (2.0 * tl.sigmoid(2.0 * picked / softcap) - 1.0)
        tl.store(lse + row, total)
        tl.store(logprobs + row, picked - total)
        spread = total - sum_product / sum_exp
        if ENTROPY:
            tl.store(entropy + row, spread)
    if GRADIENT:
        weight = tl.load(d_logprobs + row)
        entropy_weight = tl.load(d_entropy + row) if ENTROPY else 0.0
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            z = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
            slope = scale
            if CAPPED:
                curve = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0
                slope = scale * (1.0 - curve * curve)
                z = softcap * curve
            logprob = z - total
            p = tl.exp(logprob)
            gradient = weight * (tl.where(start + columns == target, 1.0, 0.0) - p)
            if ENTROPY:
                gradient -= entropy_weight * p * (logprob + spread)
            tl.store(logits + start + columns, (gradient * slope).to(logits.dtype.element_ty), mask=inside)


def launch(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor,
    scale: float,
    softcap: float,
    ignored: int,
    known: bool,
) -> None:
    """As softmax_rows.reference_, for logits whose rows are contiguous."""
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    block, warps = configuration(logits.device)
    kernel: Any = wrap_triton(softmax_rows_kernel)
    kernel[(rows,)](
        *(logits, targets, lse, logprobs, entropy, d_logprobs, d_entropy, vocabulary, logits.stride(0)),
        *(scale, softcap),
        IGNORED=ignored,
        CAPPED=softcap > 0,
        KNOWN=known,
        ENTROPY=entropy.numel() > 0,
        GRADIENT=d_logprobs.numel() > 0,
        BLOCK=min(block, triton.next_power_of_2(vocabulary)),
        num_warps=warps,
    )


def configuration(device: torch.device) -> tuple[int, int]:
    """Columns a block and warps a program on `device`."""
    if device.type != "cuda":
        return DEFAULT
    return CONFIGURATIONS.get(torch.cuda.get_device_capability(device), DEFAULT)
