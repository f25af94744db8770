"""From a layout to rectangles of queries and keys, so that attention never needs an S x S mask.

`runs` finds the documents of a layout (turbo_compile.boundaries.attention says what a layout means), `pieces` the
rectangles. Only where a rectangle cannot say it (windows, pads that look back beyond their document) are queries taken
in blocks, each with an additive mask of its own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_BLOCK = 256  # queries of one windowed rectangle: its mask is this by window + this


@dataclass(frozen=True, slots=True)
class Options:
    """What the layout does not say: `window` counts keys, the query's own included; `softcap` bounds the logits."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    dropout: float


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens with one document start, and the range that holds every key they may see."""

    rows: slice
    begin: int
    end: int
    first_key: int
    end_key: int
    holes: bool  # the range holds padded tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that attend to one range of keys: all of it, under `bias` (added to the logits), and if `causal` up to
    the query's own place in the range."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    bias: Tensor | None  # [1 or queries, keys], 0 or -inf


def is_plain(layout: Tensor) -> bool:
    """Every row is one document without padding."""
    return not torch.count_nonzero(layout).item()


def runs(layout: Tensor, causal: bool) -> list[Run]:
    """The runs of a layout [B,S] that see any key; plain rows are one run together."""
    B, S = layout.shape
    if is_plain(layout):
        return [Run(slice(0, B), 0, S, 0, S, False)]
    # One flat line of B*S tokens: starts of different rows differ, so a run never crosses rows.
    row_offset = torch.arange(0, B * S, S).unsqueeze(1)
    is_key = (layout >= 0).flatten()
    start = (torch.where(layout < 0, -1 - layout, layout) + row_offset).flatten()
    begin = torch.cat([start.new_zeros(1), 1 + (start[1:] != start[:-1]).nonzero().flatten()])
    end = torch.cat([begin[1:], begin.new_tensor([B * S])])
    start = start[begin]
    keys = is_key.nonzero().flatten()
    keys_before = torch.cat([keys.new_zeros(1), is_key.cumsum(0)])
    low, high = keys_before[start if causal else begin], keys_before[end]
    seen = low < high
    bounded = torch.cat([keys, keys.new_tensor([B * S])])  # lets runs without a key index something
    first_key, end_key, count = bounded[low], bounded[high - 1] + 1, high - low
    if not causal:  # a document's keys count for every run with its start
        document = torch.unique(start, return_inverse=True)[1]
        first_key = _by_document(first_key.where(seen, B * S), document, "amin")
        end_key = _by_document(end_key.where(seen, 0), document, "amax")
        count = _by_document(count, document, "sum")
        seen = count > 0
    holes = end_key - first_key != count
    row = begin // S
    places = torch.stack([begin, end, first_key, end_key]) - row * S
    found = torch.stack([row, *places, holes])[:, seen]
    return [Run(slice(row, row + 1), *rest) for row, *rest in found.T.tolist()]


def _by_document(values: Tensor, document: Tensor, reduce: str) -> Tensor:
    return torch.zeros_like(values).scatter_reduce(0, document, values, reduce, include_self=False)[document]


def pieces(options: Options, layout: Tensor, dtype: torch.dtype, block: int | None = None) -> Iterator[Piece]:
    """Pieces that cover every query with a key once; `block` bounds their queries and asks for explicit masks."""
    causal = options.causal
    for run in runs(layout, causal):
        begin = max(run.begin, run.first_key) if causal else run.begin
        if begin >= run.end:
            continue
        span = max(run.end, run.end_key) - min(begin, run.first_key)
        window = options.window if options.window is not None and options.window < span else None
        if block is None and window is None and (begin == run.first_key or not causal):
            keys = slice(run.first_key, run.end_key)
            bias = _bias(layout[run.rows, keys] >= 0, dtype) if run.holes else None
            yield Piece(run.rows, slice(begin, run.end), keys, causal, bias)
        else:
            yield from _blocks(layout, run, begin, window, causal, dtype, block or QUERY_BLOCK)


def _blocks(
    layout: Tensor, run: Run, begin: int, window: int | None, causal: bool, dtype: torch.dtype, block: int
) -> Iterator[Piece]:
    shape, mask = None, None  # of the block before: those inside a window look alike
    for low in range(begin, run.end, block):
        high = min(low + block, run.end)
        first = run.first_key if window is None else max(run.first_key, low - window + 1)
        end = run.end_key
        if causal:
            end = min(end, high)
        elif window is not None:
            end = min(end, high - 1 + window)
        if first >= end:
            continue
        if shape != (high - low, first - low, end - low):
            shape = high - low, first - low, end - low
            mask = _block_bias(*shape, window, causal, dtype)
        bias, keys = mask, slice(first, end)
        if run.holes:
            key_bias = _bias(layout[run.rows, keys] >= 0, dtype)
            bias = key_bias if bias is None else bias + key_bias
        yield Piece(run.rows, slice(low, high), keys, False, bias)


def _block_bias(
    queries: int, first: int, end: int, window: int | None, causal: bool, dtype: torch.dtype
) -> Tensor | None:
    """The mask of queries 0..queries-1 and keys first..end-1, or None if every query sees every key."""
    distance = torch.arange(queries).unsqueeze(1) - torch.arange(first, end)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance.abs() < window
    return None if bool(seen.all()) else _bias(seen, dtype)


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
