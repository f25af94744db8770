"""The layout of Ulysses' exchange: tokens of all heads into messages for ranks, and messages into tokens of some heads.

A message is token-major: [B, S, M], where a token's M numbers are its heads of each value, one value after the other.
So what arrives is read in place: each value is a view of the messages, put together along the sequence (one copy where
there is more than one row). On a GPU a Triton kernel moves a value of any strides in one pass; a value whose numbers
lie in their places already is not moved at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turbo_compile.kernels.device import HAS_TRITON, launch, takes_kernel, tuning

if HAS_TRITON:
    from turbo_compile.kernels import heads_triton


@dataclass(frozen=True, slots=True)
class Heads:
    """How attention's heads spread over ranks: `query` and `key` heads on each, empty ones included.

    Query heads that do not divide are filled up with empty ones at the end. Each key and value head is repeated as
    often as it takes for every rank to hold those its query heads use, in groups of one size.
    """

    query: int
    key: int
    repeats: int

    @classmethod
    def over(cls, ranks: int, query: int, key: int) -> Heads:
        """`query` heads that share `key` key and value heads, over `ranks`."""
        each = -(-query // ranks)
        group = math.gcd(each, query // key)  # query heads in a row that share a key head, in all ranks alike
        return cls(each, each // group, query // key // group)


def pack_heads(values: Sequence[Tensor], ranks: int) -> Tensor:
    """Values [B, S, H, D], a chunk of the tokens -> messages [ranks, B, S, M], one a rank with its heads."""
    B, S = values[0].shape[:2]
    if takes_kernel(values[0]):
        shapes = [(value.shape[2] // ranks, value.shape[3]) for value in values]
        message = values[0].new_empty(ranks, B, S, _width(shapes))
        _move(values, message, shapes, by_heads=True, packs=True)
        return message
    parts = [value.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).flatten(3) for value in values]
    if len(parts) == 1:
        return parts[0].contiguous()
    packed = parts[0].new_empty(ranks, B, S, sum(part.shape[3] for part in parts))
    torch.cat(parts, dim=3, out=packed)
    return packed


def unpack_heads(received: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Messages [ranks, B, S, M], one from each rank with its tokens -> values [B, ranks * S, heads, D].

    `shapes` has (heads, D) of each value.
    """
    ranks, B, S, M = received.shape
    return split_heads(received.transpose(0, 1).reshape(B, ranks * S, M), shapes)


def split_heads(tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[B, S, M] -> values [B, S, heads, D], views of it."""
    parts = tokens.split([heads * width for heads, width in shapes], dim=2)
    return [part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)]


def pack_sequence(values: Sequence[Tensor], ranks: int) -> Tensor:
    """Values [B, S, heads, D], all tokens -> messages [ranks, B, S / ranks, M], one a rank with its tokens."""
    B, S = values[0].shape[:2]
    stays = len(values) == 1 and B == 1 and values[0].is_contiguous()
    if takes_kernel(values[0]) and not stays:
        shapes = [(value.shape[2], value.shape[3]) for value in values]
        message = values[0].new_empty(ranks, B, S // ranks, _width(shapes))
        _move(values, message, shapes, by_heads=False, packs=True)
        return message
    tokens = values[0].flatten(2) if len(values) == 1 else torch.cat([value.flatten(2) for value in values], dim=2)
    return tokens.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()


def unpack_sequence(received: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Messages [ranks, B, S, M], one from each rank with its heads -> values [B, S, ranks * heads, D], contiguous."""
    if takes_kernel(received):
        ranks, B, S, _ = received.shape
        values = [received.new_empty(B, S, ranks * heads, width) for heads, width in shapes]
        _move(values, received.contiguous(), shapes, by_heads=True, packs=False)
        return values
    parts = received.split([heads * width for heads, width in shapes], dim=3)
    out = []
    for part, shape in zip(parts, shapes, strict=True):
        heads = part.unflatten(3, shape).permute(1, 2, 0, 3, 4)
        out.append(heads.flatten(2, 3).contiguous())
    return out


def _width(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(heads * width for heads, width in shapes)


def _move(
    values: Sequence[Tensor], message: Tensor, shapes: Sequence[tuple[int, int]], *, by_heads: bool, packs: bool
) -> None:
    """Each value into the messages, or out of them; `shapes` has (heads, D) of a message's part of it."""
    first = 0
    for value, (heads, D) in zip(values, shapes, strict=True):
        value = value if value.stride(3) == 1 else value.contiguous()
        B, S, H, _ = value.shape
        tile = tuning(value).heads
        grid = (-(-B * S // tile.rows), -(-H * D // tile.columns))
        if value.numel():
            launch(heads_triton.move_heads_kernel, value)[grid](
                *(value, message, B * S, S, H, heads if by_heads else message.shape[2], first, message.shape[3]),
                *(*value.stride()[:3], *message.stride()[:2]),
                D=D,
                BY_HEADS=by_heads,
                PACKS=packs,
                ROWS=tile.rows,
                COLS=tile.columns,
                num_warps=tile.warps,
            )
        first += heads * D
