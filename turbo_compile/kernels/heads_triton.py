"""Ulysses' layouts in Triton: between a value [B, S, H, D] and messages [ranks, B, tokens, M] in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_heads_kernel(
    value,
    message,
    tokens,
    sequence,
    heads,
    share,
    first,
    width,
    value_row,
    value_token,
    value_head,
    message_rank,
    message_row,
    D: tl.constexpr,
    BY_HEADS: tl.constexpr,
    PACKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Copy value[b, s, h, d] to or from its place in the messages, whose token holds `width` numbers, this value's from
    `first` on. A rank has `share` of the heads if BY_HEADS, else of the sequence."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = token // sequence
    place = token % sequence
    head = column // D
    mask = (token < tokens)[:, None] & (column < heads * D)[None, :]
    at = (row * value_row + place * value_token)[:, None] + (head.to(tl.int64) * value_head + column % D)[None, :]
    if BY_HEADS:
        rank = (head // share).to(tl.int64)
        within = column - rank * share * D
        there = (row * message_row + place * width)[:, None] + (rank * message_rank + within)[None, :]
    else:
        rank = place // share
        there = (rank * message_rank + row * message_row + (place % share) * width)[:, None] + column[None, :]
    if PACKS:
        tl.store(message + there + first, tl.load(value + at, mask=mask), mask=mask)
    else:
        tl.store(value + at, tl.load(message + there + first, mask=mask), mask=mask)
