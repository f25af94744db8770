"""Triton kernels of products by group. Where groups end is read on the device; no program waits for the host.

A fixed number of programs walk the groups together and deal their tiles out among themselves, so an empty group costs
nothing and a large one is shared by all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_mm_kernel(
    x,
    index,
    w,
    bias,
    offsets,
    out,
    groups,
    inner,
    outer,
    x_stride,
    w_group,
    w_inner,
    w_outer,
    TAKEN: tl.constexpr,
    DIVISOR: tl.constexpr,
    BIASED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """out[n] = x[n] @ w[e] (+ bias[e]) for the rows n of each group e; if TAKEN, of x[index[n] // DIVISOR] instead."""
    tiles_across = tl.cdiv(outer, COLUMNS)
    tile = tl.program_id(0)
    begin = tl.full((), 0, tl.int64)
    done = 0  # tiles of the groups before this one
    for group in range(0, groups):
        end = tl.load(offsets + group).to(tl.int64)
        tiles = tl.cdiv(end - begin, ROWS).to(tl.int32) * tiles_across
        while tile < done + tiles:
            # Down a column first: programs that run together then share its part of the weight.
            tiles_down = tiles // tiles_across
            down = (tile - done) % tiles_down
            across = (tile - done) // tiles_down
            row = begin + down * ROWS + tl.arange(0, ROWS)
            inside = row < end
            place = row
            if TAKEN:
                place = tl.load(index + row, mask=inside, other=0) // DIVISOR
            column = across * COLUMNS + tl.arange(0, COLUMNS)
            step = tl.arange(0, INNER)
            left = x + place[:, None] * x_stride + step[None, :]
            right = w + step[:, None] * w_inner + column.to(tl.int64)[None, :] * w_outer
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, inner, INNER):
                depth = step < inner - start
                a = tl.load(left, mask=inside[:, None] & depth[None, :], other=0.0)
                b = tl.load(right, mask=depth[:, None] & (column < outer)[None, :], other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
                left += INNER
                right += INNER * w_inner
            if BIASED:
                added = tl.load(bias + column, mask=column < outer, other=0.0)
                total += added.to(tl.float32)[None, :]
            mask = inside[:, None] & (column < outer)[None, :]
            tl.store(out + row[:, None] * outer + column[None, :], total.to(out.dtype.element_ty), mask=mask)
            tile += PROGRAMS
        done += tiles
        begin = end
        w += w_group
        if BIASED:
            bias += outer


@triton.jit
def grouped_outer_kernel(
    x,
    x_index,
    y,
    y_index,
    offsets,
    out,
    inner,
    outer,
    x_stride,
    y_stride,
    out_group,
    out_inner,
    out_outer,
    X_TAKEN: tl.constexpr,
    X_DIVISOR: tl.constexpr,
    Y_TAKEN: tl.constexpr,
    Y_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """out[e] = sum over the rows n of group e of x[n]^T y[n], in fp32; one program a tile, in the order of the rows."""
    group = tl.program_id(1)
    tiles_across = tl.cdiv(outer, COLUMNS)
    down = tl.program_id(0) // tiles_across
    across = tl.program_id(0) % tiles_across
    begin = tl.load(offsets + group - 1, mask=group > 0, other=0).to(tl.int64)
    end = tl.load(offsets + group).to(tl.int64)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, INNER):
        step = start + tl.arange(0, INNER)
        inside = step < end
        left = step
        right = step
        if X_TAKEN:
            left = tl.load(x_index + step, mask=inside, other=0) // X_DIVISOR
        if Y_TAKEN:
            right = tl.load(y_index + step, mask=inside, other=0) // Y_DIVISOR
        a_mask = (row < inner)[:, None] & inside[None, :]
        a = tl.load(x + row[:, None] + left[None, :] * x_stride, mask=a_mask, other=0.0)
        b_mask = inside[:, None] & (column < outer)[None, :]
        b = tl.load(y + right[:, None] * y_stride + column[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    mask = (row < inner)[:, None] & (column < outer)[None, :]
    place = row.to(tl.int64)[:, None] * out_inner + column.to(tl.int64)[None, :] * out_outer
    tl.store(out + group.to(tl.int64) * out_group + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped_sum_kernel(x, offsets, out, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[e] = sum over the rows of group e, in fp32."""
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(offsets + group - 1, mask=group > 0, other=0).to(tl.int64)
    end = tl.load(offsets + group).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        total += tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.sum(total, axis=0)
    tl.store(out + group.to(tl.int64) * width + column, value.to(out.dtype.element_ty), mask=column < width)
