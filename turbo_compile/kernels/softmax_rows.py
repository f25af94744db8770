"""The softmax of long rows of logits: log-probabilities of targets, entropies, and their gradient in the logits' place.

    z = scale * logits, or softcap * tanh(scale * logits / softcap)
    lse = log(sum(exp(z)))    logprobs = z[target] - lse    entropy = -sum(p * log(p)), p = exp(z - lse)

Rows whose target is ignored count for nothing: their results and gradients are 0, whatever their logits hold.
Everything is computed in fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from turbo_compile.kernels.cross_entropy import CPU_CHUNK_BYTES_PER_THREAD, CUDA_CHUNK_BYTES, IGNORED, accumulate_dtype

if importlib.util.find_spec("triton") is not None:
    from turbo_compile.kernels import softmax_rows_triton


def statistics(
    logits: Tensor, targets: Tensor, scale: float, softcap: float, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, logprobs, entropy), each (N,), entropy (0,) unless asked for; logits (N, V) stay as they are."""
    results = _results(logits, entropy)
    none = logits.new_empty(0)
    softmax_rows_(logits, targets, *results, none, none, scale, softcap, False)
    return results


def statistics_and_gradient_(
    logits: Tensor, targets: Tensor, d_logprobs: Tensor, scale: float, softcap: float
) -> Tensor:
    """The logprobs (N,); in place of the logits (N, V) their gradient, where logprobs have gradients (N,)."""
    lse, logprobs, none = _results(logits, entropy=False)
    softmax_rows_(logits, targets, lse, logprobs, none, d_logprobs, none, scale, softcap, False)
    return logprobs


def gradient_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor,
    scale: float,
    softcap: float,
) -> None:
    """In place of the logits (N, V) their gradient, from what `statistics` gave and the gradients of it, all (N,)."""
    softmax_rows_(logits, targets, lse, torch.empty_like(lse), entropy, d_logprobs, d_entropy, scale, softcap, True)


def _results(logits: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = logits.shape[0], accumulate_dtype(logits.dtype)
    lse, logprobs = (torch.empty(rows, dtype=dtype, device=logits.device) for _ in range(2))
    return lse, logprobs, torch.empty(rows if entropy else 0, dtype=dtype, device=logits.device)


@torch.library.triton_op("turbo_compile::softmax_rows_", mutates_args={"logits", "lse", "logprobs", "entropy"})
def softmax_rows_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor,
    scale: float,
    softcap: float,
    known: bool,
) -> None:
    """Fill `lse`, `logprobs` and `entropy` (unless `known`: then lse and entropy are read), and the gradient in place.

    An empty `entropy` asks for none, an empty `d_logprobs` for no gradient; softcap 0 is none.
    """
    options = (scale, softcap, IGNORED, known)
    run = reference_ if logits.device.type == "cpu" or logits.dtype == torch.float64 else softmax_rows_triton.launch
    run(logits, targets, lse, logprobs, entropy, d_logprobs, d_entropy, *options)


def reference_(
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
    """The kernel's specification, and what the CPU runs: a few rows at a time, so that passes find them in cache."""
    size = _rows_in_cache(logits, lse.dtype)
    buffers = [logits.new_empty((size, logits.shape[1]), dtype=lse.dtype) for _ in range(2)]
    for start in range(0, logits.shape[0], size):
        rows = slice(start, min(start + size, logits.shape[0]))
        z, work = (buffer[: rows.stop - start] for buffer in buffers)
        z.copy_(logits[rows])
        if scale != 1.0:
            z.mul_(scale)
        if softcap:
            z.div_(softcap).tanh_().mul_(softcap)
        wrong = targets[rows] == ignored
        index = targets[rows].masked_fill(wrong, 0).unsqueeze(1)
        if not known:
            largest = z.amax(dim=1, keepdim=True)
            total = torch.sub(z, largest, out=work).exp_().sum(dim=1)
            torch.add(total.log(), largest.squeeze(1), out=lse[rows])
            torch.sub(z.gather(1, index).squeeze(1), lse[rows], out=logprobs[rows])
            logprobs[rows].masked_fill_(wrong, 0.0)
            if entropy.numel():
                torch.sub(lse[rows], work.mul_(z).sum(dim=1) / total, out=entropy[rows])
                entropy[rows].masked_fill_(wrong, 0.0)
            lse[rows].masked_fill_(wrong, 0.0)
        if d_logprobs.numel():
            _gradient(z, work, lse[rows], entropy, d_logprobs, d_entropy, rows, index, scale, softcap)
            work.masked_fill_(wrong.unsqueeze(1), 0.0)  # filled, not multiplied by zero: the row may hold NaN
            logits[rows].copy_(work)


def _gradient(
    z: Tensor,
    work: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor,
    rows: slice,
    index: Tensor,
    scale: float,
    softcap: float,
) -> None:
    """Into `work` the gradient of the logits that z, which is spent, was made of."""
    weight = d_logprobs[rows].unsqueeze(1)
    torch.sub(z, lse.unsqueeze(1), out=work).exp_()
    if entropy.numel():
        rate = d_entropy[rows].unsqueeze(1)
        work.mul_((z - (lse - entropy[rows]).unsqueeze(1)).mul_(rate).add_(weight)).neg_()
    else:
        work.mul_(-weight)
    work.scatter_add_(1, index, weight)
    if softcap:
        work.mul_(z.div_(softcap).square_().neg_().add_(1.0))
    if scale != 1.0:
        work.mul_(scale)


def _rows_in_cache(logits: Tensor, dtype: torch.dtype) -> int:
    on_cpu = logits.device.type == "cpu"
    chunk_bytes = CPU_CHUNK_BYTES_PER_THREAD * torch.get_num_threads() if on_cpu else CUDA_CHUNK_BYTES
    return max(1, min(chunk_bytes // (logits.shape[1] * dtype.itemsize), logits.shape[0]))
