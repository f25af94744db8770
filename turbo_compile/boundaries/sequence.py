"""The input boundary: what of a batch sequence parallelism cuts, what it fills up, and what stays whole.

Token ids, positions and targets (shifted before anything is cut) go to the ranks of an `sp` group in contiguous chunks.
The document layout stays whole: attention sees every token of its heads. Tokens that fill the last chunk up see
nothing, are seen by nobody, count for no router statistic and have no loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbo_compile.ir.program import SequenceSlicing
from turbo_compile.kernels.cross_entropy import IGNORED

MODEL_ENTRY = SequenceSlicing(
    boundary="model_entry",
    padded={"ids": 0, "positions": 0, "valid": 0, "targets": IGNORED},
    sliced=("ids", "positions", "valid", "targets"),
    global_=("layout", "denominator", "seed", "longest"),
)


def cut(contract: SequenceSlicing, fields: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The fields as rank `rank` of `ranks` takes them: [B, S] sliced ones as its chunk [B, ceil(S / ranks)]."""
    taken = dict(fields)
    length = fields["ids"].shape[1]
    missing = -length % ranks
    chunk = (length + missing) // ranks
    for name in contract.sliced:
        if name in fields:
            filled = torch.nn.functional.pad(fields[name], (0, missing), value=contract.padded[name])
            taken[name] = filled[:, rank * chunk : (rank + 1) * chunk].contiguous()
    taken["layout"] = _lengthened(fields["layout"], missing)
    return taken


def own_length(length: int, rank: int, ranks: int) -> int:
    """How many tokens of rows of `length` rank `rank` holds, filling left out."""
    chunk = -(-length // ranks)
    return max(0, min(chunk, length - rank * chunk))


def _lengthened(layout: Tensor, missing: int) -> Tensor:
    """A layout with `missing` more tokens a row, each padding and a document of its own."""
    if not missing:
        return layout
    length = layout.shape[1]
    alone = -1 - torch.arange(length, length + missing, dtype=layout.dtype, device=layout.device)
    return torch.cat([layout, alone.expand(layout.shape[0], -1)], dim=1)
