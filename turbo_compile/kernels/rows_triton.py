"""Triton kernels that move rows: one pass over memory each, no atomics, 64-bit addresses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_kernel(
    x, positions, out, tokens, width, stride, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """out[positions[t, k]] = x[t]: a token is read once and written TOP_K times."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (token < tokens)[:, None] & (column < width)[None, :]
    value = tl.load(x + token[:, None] * stride + column[None, :], mask=mask)
    for k in range(TOP_K):
        row = tl.load(positions + token * TOP_K + k, mask=token < tokens, other=0)
        tl.store(out + row[:, None] * width + column[None, :], value, mask=mask)


@triton.jit
def collect_kernel(
    rows,
    positions,
    weights,
    out,
    tokens,
    width,
    stride,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out[t] = sum over k of weights[t, k] * rows[positions[t, k]], in fp32 and always in the order of k."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = token < tokens
    mask = inside[:, None] & (column < width)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(TOP_K):
        row = tl.load(positions + token * TOP_K + k, mask=inside, other=0)
        value = tl.load(rows + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOP_K + k, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out + token[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def uncollect_kernel(
    grad,
    rows,
    order,
    weights,
    grad_rows,
    grad_weights,
    count,
    width,
    grad_stride,
    rows_stride,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The backward of `collect_kernel`: a row of `grad_rows` and one number of `grad_weights` for each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    choice = tl.load(order + row, mask=inside, other=0)
    weight = tl.load(weights + choice, mask=inside, other=0.0).to(tl.float32)
    dot = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, COLS):
        column = start + tl.arange(0, COLS)
        mask = inside[:, None] & (column < width)[None, :]
        given = tl.load(grad + (choice // TOP_K)[:, None] * grad_stride + column[None, :], mask=mask, other=0.0)
        given = given.to(tl.float32)
        value = tl.load(rows + row[:, None] * rows_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(given * value, axis=1)
        scaled = (given * weight[:, None]).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + row[:, None] * width + column[None, :], scaled, mask=mask)
    tl.store(grad_weights + choice, dot.to(grad_weights.dtype.element_ty), mask=inside)


@triton.jit
def take_kernel(
    x, index, out, taken, count, width, stride, DIVISOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """out[n] = x[index[n] // DIVISOR] for the first `taken` rows; those that follow are zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (column < width)[None, :]
    place = tl.load(index + row, mask=row < taken, other=0) // DIVISOR
    value = tl.load(x + place[:, None] * stride + column[None, :], mask=(row < taken)[:, None] & inside, other=0.0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=(row < count)[:, None] & inside)


@triton.jit
def put_kernel(x, index, out, count, width, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out[index[n]] = x[n]; `index` is a permutation."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (row < count)[:, None] & (column < width)[None, :]
    place = tl.load(index + row, mask=row < count, other=0)
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask)
    tl.store(out + place[:, None] * width + column[None, :], value, mask=mask)
