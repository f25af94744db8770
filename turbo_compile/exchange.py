"""Collectives that run: what each start and wait of an outer graph becomes on a real process group.

A start returns what its wait needs. Gathers land in each parameter's own storage; rows that do not divide travel
padded, and the padding, all at the end, is cut off by a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbo_compile import collectives
from turbo_compile.ir.mesh import Axes
from turbo_compile.ir.placement import Layout
from turbo_compile.ir.program import Parameter
from turbo_compile.kernels import heads
from turbo_compile.kernels.rows import put, take

LEAST_ROWS = 2  # a compiled segment takes a size for at least this
_c10d = torch.ops._c10d_functional


class _Exchange(nn.Module):
    def __init__(
        self,
        axes: Axes,
        axis: str,
        to: str,
        layouts: Sequence[Layout],
        parameters: Sequence[Parameter],
        reduce_dtype: torch.dtype,
        pending: dict[str, Tensor],
    ) -> None:
        super().__init__()
        self.size = axes.sizes[axis]
        self.rank = axes.coordinates[axis]
        self.direction = to
        group = axes.groups.get(axis)
        self.group_name = group.group_name if group is not None else ""
        self.layouts = tuple(layouts)
        self.dtypes = tuple(parameter.dtype for parameter in parameters)
        self.reduce_dtype = reduce_dtype
        self.pending = pending
        self.fqns = tuple(parameter.fqn for parameter in parameters)
        self.sharded = tuple(index for index, layout in enumerate(self.layouts) if layout.sharded)
        self.whole = tuple(index for index, layout in enumerate(self.layouts) if not layout.sharded)
        self.uneven = frozenset(i for i in self.sharded if self.layouts[i].padded != self.layouts[i].shape)


class AllGather(_Exchange):
    """Shards of a group -> its parameters, in the dtype compute wants."""

    def forward(self, shards: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        wire = []
        for index in self.sharded:
            shard = shards[index].to(self.dtypes[index])
            wire.append(_padded(shard, self.layouts[index].chunk) if index in self.uneven else shard)
        gathered = _c10d.all_gather_into_tensor_coalesced(wire, self.size, self.group_name) if wire else []
        return gathered, [shards[index].to(self.dtypes[index]) for index in self.whole]


class Gathered(_Exchange):
    def forward(self, started: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        gathered, whole = started
        out: list[Any] = [None] * len(self.layouts)
        for index, tensor in zip(self.sharded, gathered, strict=True):
            full = _c10d.wait_tensor(tensor)
            out[index] = full[: self.layouts[index].shape[0]] if index in self.uneven else full
        for index, tensor in zip(self.whole, whole, strict=True):
            out[index] = tensor
        return out


class ReduceScatter(_Exchange):
    """Gradients of a group -> their sums over the axis, each rank keeping its rows.

    One flat message: every rank's rows of all gradients side by side. gloo has no reduce_scatter of its own (it moves
    an all_reduce's bytes), so there the rows are exchanged and added here.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        axes: Axes = keywords["axes"]
        self.exchanges = axes.device.type == "cpu"

    def forward(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        flat = None
        if self.pending:
            gradients = [self._with_pending(fqn, g) for fqn, g in zip(self.fqns, gradients, strict=True)]
        if self.sharded:
            flat = self._flat([gradients[index] for index in self.sharded])
            if self.exchanges:
                flat = _c10d.all_to_all_single(flat, self._even(flat), self._even(flat), self.group_name)
            else:
                flat = _c10d.reduce_scatter_tensor(flat, "sum", self.size, self.group_name)
        whole = [gradients[index].to(self.reduce_dtype) for index in self.whole]
        if self.size > 1 and whole:
            whole = _c10d.all_reduce_coalesced(whole, "sum", self.group_name)
        return flat, whole

    def _with_pending(self, fqn: str, gradient: Tensor) -> Tensor:
        deferred = self.pending.get(fqn)
        return gradient if deferred is None else deferred + gradient

    def _even(self, flat: Tensor) -> list[int]:
        return [flat.shape[0] // self.size] * self.size

    def _flat(self, gradients: list[Tensor]) -> Tensor:
        """[rank, its rows of every gradient], as one line."""
        widths = [self.layouts[i].padded.numel() // self.size for i in self.sharded]
        flat = torch.empty((self.size, sum(widths)), dtype=self.reduce_dtype, device=gradients[0].device)
        start = 0
        for index, width, gradient in zip(self.sharded, widths, gradients, strict=True):
            place = flat[:, start : start + width]
            start += width
            if index in self.uneven:
                gradient = _padded(gradient, self.layouts[index].padded[0])
            place.copy_(gradient.reshape(self.size, width))
        return flat.view(-1)


class Reduced(_Exchange):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        axes: Axes = keywords["axes"]
        self.exchanges = axes.device.type == "cpu"

    def forward(self, started: tuple[Tensor | None, list[Tensor]]) -> list[Tensor]:
        flat, whole = started
        out: list[Any] = [None] * len(self.layouts)
        if flat is not None:
            mine = _c10d.wait_tensor(flat)
            if self.exchanges:
                mine = mine.view(self.size, -1).sum(0)
            start = 0
            for index in self.sharded:
                layout = self.layouts[index]
                first, last = layout.rows(self.rank)
                width = layout.padded.numel() // self.size
                rows = mine[start : start + width].view(layout.chunk, *layout.shape[1:])
                out[index] = rows[: last - first]
                start += width
        for index, tensor in zip(self.whole, whole, strict=True):
            out[index] = _c10d.wait_tensor(tensor) if self.size > 1 else tensor
        return out


class AllReduce(_Exchange):
    """The sum of a tensor, or of each tensor of a group, over the axis."""

    def forward(self, value: Any) -> Any:
        if self.size == 1:
            return value
        if isinstance(value, Tensor):
            return _c10d.all_reduce(value, "sum", self.group_name)
        return _c10d.all_reduce_coalesced([tensor.contiguous() for tensor in value], "sum", self.group_name)


class AllReduced(_Exchange):
    def forward(self, started: Any) -> Any:
        if self.size == 1:
            return started
        if isinstance(started, Tensor):
            return _c10d.wait_tensor(started)
        return [_c10d.wait_tensor(tensor) for tensor in started]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zero rows added up to `rows`."""
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


class AllToAll(_Exchange):
    """Values [B, S, H, D] in one message to each rank of the axis: its heads, or its tokens."""

    def forward(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        pack = heads.pack_heads if self.direction == "heads" else heads.pack_sequence
        shares = self.size if self.direction == "heads" else 1
        message = pack(values, self.size)
        received = _c10d.all_to_all_single(message, [1] * self.size, [1] * self.size, self.group_name)
        return received, [(value.shape[2] // shares, value.shape[3]) for value in values]


class AllToAllDone(_Exchange):
    def forward(self, started: tuple[Tensor, list[tuple[int, int]]]) -> list[Tensor]:
        received, shapes = started
        unpack = heads.unpack_heads if self.direction == "heads" else heads.unpack_sequence
        return unpack(_c10d.wait_tensor(received), shapes)


@dataclass(frozen=True, slots=True)
class Route:
    """How rows travel to the experts of other ranks: rows for each rank, rows from each, and their order on arrival.

    `order` [received] sorts what arrives, rank by rank, by expert. `received` counts `spare` empty rows at the end,
    which keep a segment from being given fewer than it was compiled for.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    spare: int


class Counts(_Exchange):
    """Where each expert's rows end [E] -> how many rows each rank sends for each expert it holds [ranks, E / ranks]."""

    def forward(self, values: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        counts = torch.diff(values[0].long(), prepend=values[0].new_zeros(1, dtype=torch.long)).view(self.size, -1)
        return counts, _c10d.all_to_all_single(counts, [1] * self.size, [1] * self.size, self.group_name)


class Counted(_Exchange):
    def forward(self, started: tuple[Tensor, Tensor]) -> tuple[Route, Tensor]:
        counts, arriving = started[0], _c10d.wait_tensor(started[1])
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # the one read of a layer and step
        total = sum(received)
        spare = max(0, LEAST_ROWS - total)
        expert = torch.arange(arriving.shape[1], device=arriving.device).repeat(self.size)
        order = torch.repeat_interleave(expert, arriving.flatten(), output_size=total).argsort(stable=True)
        ends = arriving.sum(0).cumsum(0).to(torch.int32)
        ends[-1] += spare
        return Route(sent, received, order, spare), ends


class Rows(_Exchange):
    """Rows [N, H] along a route: to the ranks that hold their experts, or back."""

    def forward(self, values: tuple[Tensor, Route]) -> tuple[Tensor, Route]:
        rows, route = values
        sent, received = route.sent, route.received
        if self.direction == "tokens":
            rows = put(rows, route.order)
            sent, received = received, sent
        return _c10d.all_to_all_single(rows.contiguous(), received, sent, self.group_name), route


class RowsDone(_Exchange):
    def forward(self, started: tuple[Tensor, Route]) -> Tensor:
        rows, route = _c10d.wait_tensor(started[0]), started[1]
        if self.direction == "tokens":
            return rows
        return take(rows, route.order, route.spare)


STARTS: dict[Any, type[_Exchange]] = {
    collectives.all_gather: AllGather,
    collectives.reduce_scatter: ReduceScatter,
    collectives.all_reduce: AllReduce,
    collectives.all_to_all: AllToAll,
    collectives.all_to_all_counts: Counts,
    collectives.all_to_all_rows: Rows,
}
WAITS: dict[Any, type[_Exchange]] = {
    collectives.all_gather: Gathered,
    collectives.reduce_scatter: Reduced,
    collectives.all_reduce: AllReduced,
    collectives.all_to_all: AllToAllDone,
    collectives.all_to_all_counts: Counted,
    collectives.all_to_all_rows: RowsDone,
}


# --- outside programs ------------------------------------------------------------------------------------------------


def gather_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens [B, s, ...] of every rank of `group` side by side, in rank order; s may differ from rank to rank."""
    whole: Tensor = _GatherSequence.apply(tensor, group)
    return whole


class _GatherSequence(torch.autograd.Function):
    """Its backward gives each rank its tokens of the mean of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        own = torch.tensor([tensor.shape[1]], device=tensor.device)
        every = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(every, own, group=group)
        lengths = [int(length) for length in every]
        ctx.group, ctx.first, ctx.length = group, sum(lengths[: group.rank()]), tensor.shape[1]
        missing = max(lengths) - tensor.shape[1]
        filled = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
        parts = [torch.empty_like(filled) for _ in lengths]
        dist.all_gather(parts, filled.contiguous(), group=group)
        return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.narrow(1, ctx.first, ctx.length) / ctx.group.size(), None
