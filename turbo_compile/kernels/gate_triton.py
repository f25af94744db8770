"""Triton kernels of an expert's activation: forward, and backward with the activation computed again."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(x, alpha, ACTIVATION: tl.constexpr):
    """act(x) and its derivative."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(alpha * x)
        value = x * s
        slope = s + alpha * value * (1.0 - s)
    elif ACTIVATION == "gelu":
        half = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # sqrt(1/2)
        value = x * half
        slope = half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # sqrt(1 / (2 pi))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)  # sqrt(2 / pi)
        bend = 2.0 * tl.sigmoid(2.0 * inner) - 1.0  # tanh
        value = 0.5 * x * (1.0 + bend)
        slope = 0.5 * (1.0 + bend) + 0.3989422804014327 * x * (1.0 - bend * bend) * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        value = tl.maximum(x, 0.0)
        slope = 2.0 * value
        value *= value
    return value, slope


@triton.jit
def _read(pre, row, inside, start, half, stride, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """What goes through the activation, and what it multiplies (the same again without a gate)."""
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * COLS)
        mask = inside[:, None] & (both < 2 * half)[None, :]
        pair = tl.load(pre + row[:, None] * stride + both[None, :], mask=mask, other=0.0).to(tl.float32)
        x, y = tl.split(tl.reshape(pair, (pair.shape[0], COLS, 2)))
    else:
        column = start + tl.arange(0, COLS)
        mask = inside[:, None] & (column < half)[None, :]
        x = tl.load(pre + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        y = x
        if GATED:
            y = tl.load(pre + row[:, None] * stride + half + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def gate_kernel(
    pre,
    out,
    count,
    half,
    stride,
    alpha,
    limit,
    shift,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out[n, i] = act(x) * (y + shift), x at most limit and y within it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLS
    column = start + tl.arange(0, COLS)
    x, y = _read(pre, row, row < count, start, half, stride, GATED, INTERLEAVED, COLS)
    if LIMITED:
        x = tl.minimum(x, limit)
        y = tl.minimum(tl.maximum(y, -limit), limit)
    value, _ = _activate(x, alpha, ACTIVATION)
    if GATED:
        value *= y + shift
    mask = (row < count)[:, None] & (column < half)[None, :]
    tl.store(out + row[:, None] * half + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward_kernel(
    grad,
    pre,
    order,
    weights,
    grad_pre,
    out,
    grad_weights,
    count,
    half,
    stride,
    alpha,
    limit,
    shift,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """grad_pre, and the activation again.

    If WEIGHTED, row n of the activation was multiplied by weights[order[n]] before `grad` was taken: `out` is the
    product, and grad_weights[order[n]] the gradient of that factor.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    weight = tl.full((ROWS,), 1.0, tl.float32)
    choice = row
    if WEIGHTED:
        choice = tl.load(order + row, mask=inside, other=0)
        weight = tl.load(weights + choice, mask=inside, other=0.0).to(tl.float32)
    dot = tl.zeros((ROWS,), tl.float32)
    width = 2 * half if GATED else half
    for start in range(0, half, COLS):
        column = start + tl.arange(0, COLS)
        mask = inside[:, None] & (column < half)[None, :]
        x, y = _read(pre, row, inside, start, half, stride, GATED, INTERLEAVED, COLS)
        slope_x = tl.full((ROWS, COLS), 1.0, tl.float32)
        slope_y = slope_x
        if LIMITED:
            slope_x = tl.where(x <= limit, 1.0, 0.0)
            slope_y = tl.where((y >= -limit) & (y <= limit), 1.0, 0.0)
            x = tl.minimum(x, limit)
            y = tl.minimum(tl.maximum(y, -limit), limit)
        value, slope = _activate(x, alpha, ACTIVATION)
        up = y + shift if GATED else tl.full((ROWS, COLS), 1.0, tl.float32)
        place = row[:, None] * half + column[None, :]
        given = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            dot += tl.sum(given * value * up, axis=1)
            given *= weight[:, None]
        tl.store(out + place, (value * up * weight[:, None]).to(out.dtype.element_ty), mask=mask)
        grad_x = given * up * slope * slope_x
        grad_y = given * value * slope_y
        dtype = grad_pre.dtype.element_ty
        if INTERLEAVED:
            both = 2 * start + tl.arange(0, 2 * COLS)
            pair = tl.reshape(tl.join(grad_x, grad_y), (ROWS, 2 * COLS)).to(dtype)
            pair_mask = inside[:, None] & (both < 2 * half)[None, :]
            tl.store(grad_pre + row[:, None] * width + both[None, :], pair, mask=pair_mask)
        else:
            tl.store(grad_pre + row[:, None] * width + column[None, :], grad_x.to(dtype), mask=mask)
            if GATED:
                tl.store(grad_pre + row[:, None] * width + half + column[None, :], grad_y.to(dtype), mask=mask)
    if WEIGHTED:
        tl.store(grad_weights + choice, dot.to(grad_weights.dtype.element_ty), mask=inside)
