"""Rows of tokens on their way to experts and back. Each function is one pass over memory on a GPU.

    rows [T*K, H] = spread(x [T, H], order [T*K], K)            # rows[n] = x[order[n] // K]
    out [T, H] = collect(rows, order, weights [T, K] or None)   # out[t] = sum over k of weights[t, k] * its row for k
    grad_rows, grad_weights = uncollect(grad [T, H], rows, order, weights)
    out [N + spare, H] = take(x, index [N], spare)              # rows by index, then rows of zeros
    out [N, H] = put(x [N or more, H], index [N])               # back: out[index[n]] = x[n]

Row n is the choice `order[n] % K` of token `order[n] // K`. Sums are in the wider dtype of rows and weights and at
least in fp32. The functions differentiate nothing: the ops that use them have backwards of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turbo_compile.kernels.device import HAS_TRITON, launch, takes_kernel, tuning

if HAS_TRITON:
    from turbo_compile.kernels import rows_triton

CPU_CHUNK_BYTES_PER_THREAD = 1 << 19  # what a step of a sum holds: measured, 3 to 5 times faster than all at once
CUDA_CHUNK_BYTES = 64 << 20  # of the reference, which a GPU runs in fp64


def sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """index [T, K] -> the order [T*K] that sorts it (equal ones by token), and where each expert's rows end (int32)."""
    experts, order = torch.sort(index.flatten(), stable=True)
    ends = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    return order, torch.searchsorted(experts, ends, right=True, out_int32=True)  # a histogram reads the host on a GPU


def spread(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    if not takes_kernel(x):
        return x.index_select(0, order // top_k)
    x = _dense(x)
    out = x.new_empty((order.shape[0], x.shape[1]))
    tile, positions = tuning(x).rows, inverse(order)
    grid = (_blocks(x.shape[0], tile.rows), _blocks(x.shape[1], tile.columns))
    if out.numel():
        launch(rows_triton.spread_kernel, x)[grid](
            *(x, positions, out, x.shape[0], x.shape[1], x.stride(0)),
            TOP_K=top_k,
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return out


def collect(rows: Tensor, order: Tensor, top_k: int, weights: Tensor | None = None) -> Tensor:
    if not takes_kernel(rows) or _is_double(weights):
        return _collect(rows, order, top_k, weights)
    rows = _dense(rows)
    out = rows.new_empty((order.shape[0] // top_k, rows.shape[1]))
    tile, positions = tuning(rows).rows, inverse(order)
    grid = (_blocks(out.shape[0], tile.rows), _blocks(out.shape[1], tile.columns))
    if out.numel():
        launch(rows_triton.collect_kernel, rows)[grid](
            *(rows, positions, rows if weights is None else weights.contiguous(), out),
            *(out.shape[0], out.shape[1], rows.stride(0)),
            TOP_K=top_k,
            WEIGHTED=weights is not None,
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return out


def uncollect(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if not takes_kernel(rows) or _is_double(weights):
        return _uncollect(grad, rows, order, weights)
    grad, rows = _dense(grad), _dense(rows)
    grad_rows, grad_weights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    tile = tuning(rows).rows
    if rows.numel():
        launch(rows_triton.uncollect_kernel, rows)[(_blocks(rows.shape[0], tile.rows),)](
            *(grad, rows, order, weights.contiguous(), grad_rows, grad_weights),
            *(rows.shape[0], rows.shape[1], grad.stride(0), rows.stride(0)),
            TOP_K=weights.shape[1],
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return grad_rows, grad_weights


def take(x: Tensor, index: Tensor, spare: int = 0, divisor: int = 1) -> Tensor:
    """`index // divisor` says which rows; both of one pass."""
    if not takes_kernel(x):
        taken = x.index_select(0, index if divisor == 1 else index // divisor)
        return torch.cat([taken, taken.new_zeros(spare, x.shape[1])]) if spare else taken
    x = _dense(x)
    out = x.new_empty((index.shape[0] + spare, x.shape[1]))
    tile = tuning(x).rows
    grid = (_blocks(out.shape[0], tile.rows), _blocks(out.shape[1], tile.columns))
    if out.numel():
        launch(rows_triton.take_kernel, x)[grid](
            *(x, index, out, index.shape[0], out.shape[0], out.shape[1], x.stride(0)),
            DIVISOR=divisor,
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return out


def put(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` beyond the index are spare, and left behind."""
    out = x.new_empty((index.shape[0], x.shape[1]))
    if not takes_kernel(x):
        return out.index_copy_(0, index, x[: index.shape[0]])
    x = _dense(x)
    tile = tuning(x).rows
    grid = (_blocks(out.shape[0], tile.rows), _blocks(out.shape[1], tile.columns))
    if out.numel():
        launch(rows_triton.put_kernel, x)[grid](
            *(x, index, out, out.shape[0], out.shape[1], x.stride(0)),
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return out


def inverse(order: Tensor) -> Tensor:
    """Where each element of a permutation went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def accumulate_dtype(rows: Tensor, weights: Tensor | None = None) -> torch.dtype:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return wide if weights is None else torch.promote_types(wide, weights.dtype)


# --- the reference of sums, a few rows at a time ---------------------------------------------------------------------


def _collect(rows: Tensor, order: Tensor, top_k: int, weights: Tensor | None) -> Tensor:
    positions = inverse(order).view(-1, top_k)
    out = rows.new_empty((positions.shape[0], rows.shape[1]))
    dtype = accumulate_dtype(rows, weights)
    for chunk in _chunks(positions.shape[0], top_k * rows.shape[1], rows):
        picked = rows.index_select(0, positions[chunk].flatten()).view(-1, top_k, rows.shape[1])
        if weights is None:
            torch.sum(picked, dim=1, out=out[chunk])
        else:
            out[chunk] = picked.to(dtype).mul_(weights[chunk].to(dtype).unsqueeze(2)).sum(dim=1)
    return out


def _uncollect(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(rows, weights)
    token = order // weights.shape[1]
    weight = weights.to(dtype).flatten()[order].unsqueeze(1)
    grad_rows = rows.new_empty(rows.shape)
    grad_weight = rows.new_empty(order.shape, dtype=dtype)
    for chunk in _chunks(order.shape[0], rows.shape[1], rows):
        picked = grad.index_select(0, token[chunk]).to(dtype)
        torch.mul(picked, weight[chunk], out=grad_rows[chunk])
        torch.sum(picked.mul_(rows[chunk]), dim=1, out=grad_weight[chunk])
    return grad_rows, grad_weight[inverse(order)].view(weights.shape).to(weights.dtype)


def _chunks(length: int, width: int, like: Tensor) -> Iterator[slice]:
    """Slices of `length` things, each of `width` numbers, that stay in cache together."""
    on_cpu = like.device.type == "cpu"
    chunk_bytes = CPU_CHUNK_BYTES_PER_THREAD * torch.get_num_threads() if on_cpu else CUDA_CHUNK_BYTES
    size = max(1, chunk_bytes // max(1, width * max(4, like.dtype.itemsize)))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _is_double(x: Tensor | None) -> bool:
    return x is not None and x.dtype == torch.float64


def _blocks(length: int, block: int) -> int:
    return -(-length // block)
