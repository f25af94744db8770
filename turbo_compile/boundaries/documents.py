"""Document layout: for every token, where its document starts; what attention knows instead of a mask.

`layout[b, s]` is the index of the first token of the document that token `s` of row `b` belongs to. A padded token is
written `-1 - start`: nobody attends to it, and as a query it sees the real tokens from `start` up to itself, which is
what a 2-D padding mask means.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_layout(positions: Tensor, mask: Tensor | None = None, boundaries: Tensor | None = None) -> Tensor:
    """The layout, int32 (B, S), of rows of tokens.

    Args:
        positions: int (B, S). A position that is not its left neighbour's plus one starts a document.
        mask: (B, S), nonzero for real tokens, zero for padding; None when every token is real.
        boundaries: int (N + 1,), cumulative document lengths over the B*S tokens in order (`cu_seq_lens`); when
            given, they alone decide and positions are not read.
    """
    rows, length = positions.shape
    index = torch.arange(length, device=positions.device).expand(rows, length)
    starts = torch.zeros_like(positions, dtype=torch.bool)
    if boundaries is not None:
        starts.view(-1)[boundaries[:-1].long().clamp(max=rows * length - 1)] = True
    else:
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if mask is not None:
        real = mask.bool()
        # Left padding: the first real token opens its document, whatever position the padding was given.
        # Right padding stays in the document it follows, so that its queries see what Hugging Face lets them see.
        starts[:, 1:] = (starts[:, 1:] & real[:, 1:] & real[:, :-1]) | (real[:, 1:] & (real.cumsum(1)[:, 1:] == 1))
        if boundaries is None:  # and padding between two documents does not join them: positions went back over it
            before = torch.where(real, index, -1).cummax(dim=1).values[:, :-1]  # the last real token to the left
            went_back = positions[:, 1:] <= positions.gather(1, before.clamp(min=0))
            starts[:, 1:] |= real[:, 1:] & ~real[:, :-1] & (before >= 0) & went_back
    starts[:, 0] = True
    layout = torch.where(starts, index, 0).cummax(dim=1).values
    if mask is not None:
        before = real.cumsum(1) == 0
        layout = torch.where(before, index, layout)
        layout = torch.where(real, layout, -1 - layout)
    return layout.to(torch.int32)


@torch.library.custom_op("turbo_compile::mask_layout", mutates_args=())
def mask_layout(layout: Tensor, causal: bool, window: int | None) -> Tensor:
    """The layout, tagged with the mask a model asked for; capture reads the tag and removes the op."""
    return layout.clone()


@mask_layout.register_fake
def _(layout: Tensor, causal: bool, window: int | None) -> Tensor:
    return torch.empty_like(layout)


mask_layout_op = torch.ops.turbo_compile.mask_layout.default  # what a graph holds, and what traced code calls
