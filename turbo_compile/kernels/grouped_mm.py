"""Matrix products of rows sorted by group, each group with its own matrix: the compute of a mixture of experts.

    out [N, O] = grouped_mm(x [N, I], w [E, I, O], offsets [E], bias [E, O] or None)    # x[n] @ w[e] + bias[e]
    out [E, I, O] = grouped_outer(x [N, I], y [N, O], offsets)                          # x[rows].T @ y[rows]
    out [E, O] = grouped_sum(x [N, O], offsets)

`offsets` (int32) holds the end of each group: e is rows `offsets[e - 1]:offsets[e]`, the last offset is N, a group may
be empty. `w` may be a transposed view. On CPU a loop over the groups; on a GPU, without a host read, torch's grouped
kernel where the tuning table says so and it takes the operands, else a Triton kernel. `products` and `outer_products`
are what the first two run, and can take rows by index: a Triton kernel then reads them where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_compile.errors import InvalidProgram
from turbo_compile.kernels.device import HAS_TRITON, launch, programs, takes_kernel, tuning
from turbo_compile.kernels.rows import take

if HAS_TRITON:
    from turbo_compile.kernels import grouped_mm_triton

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # inputs may have any strides; outputs are contiguous

torch.library.define(
    "turbo_compile::grouped_mm", "(Tensor x, Tensor w, Tensor offsets, Tensor? bias) -> Tensor", tags=_TAGS
)
torch.library.define("turbo_compile::grouped_outer", "(Tensor x, Tensor y, Tensor offsets) -> Tensor", tags=_TAGS)
torch.library.define("turbo_compile::grouped_sum", "(Tensor x, Tensor offsets) -> Tensor", tags=_TAGS)
grouped_mm = torch.ops.turbo_compile.grouped_mm.default
grouped_outer = torch.ops.turbo_compile.grouped_outer.default
grouped_sum = torch.ops.turbo_compile.grouped_sum.default


def grouped_mm_flops(rows: Any, inner: Any, outer: Any) -> Any:
    """Products and sums; `grouped_outer` has the same."""
    return 2 * rows * inner * outer


def grouped_sum_flops(rows: Any, columns: Any) -> Any:
    return rows * columns


@torch.library.impl("turbo_compile::grouped_mm", ("cpu", "cuda"))
def _grouped_mm(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    if _takes_triton(x, w.shape[1], w.shape[2]):
        return _triton_products(x, w, offsets, bias)
    if takes_kernel(x):
        out = F.grouped_mm(x.contiguous(), w, offs=offsets)
        return out if bias is None else out.add_(bias[group_of_row(offsets, x.shape[0])])
    out = x.new_empty((x.shape[0], w.shape[2]))
    for group, rows in _groups(offsets, x.shape[0]):
        if bias is None:
            torch.mm(x[rows], w[group], out=out[rows])
        else:
            torch.addmm(bias[group], x[rows], w[group], out=out[rows])
    return out


@torch.library.register_fake("turbo_compile::grouped_mm")
def _grouped_mm_fake(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[2]))


@torch.library.impl("turbo_compile::grouped_outer", ("cpu", "cuda"))
def _grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    if _takes_triton(x, x.shape[1], y.shape[1]):
        return _triton_outer_products(x, y, offsets)
    if takes_kernel(x):
        return F.grouped_mm(x.contiguous().t(), y.contiguous(), offs=offsets)
    out = x.new_zeros((offsets.shape[0], x.shape[1], y.shape[1]))
    for group, rows in _groups(offsets, x.shape[0]):
        torch.mm(x[rows].t(), y[rows], out=out[group])
    return out


@torch.library.register_fake("turbo_compile::grouped_outer")
def _grouped_outer_fake(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1], y.shape[1]))


@torch.library.impl("turbo_compile::grouped_sum", ("cpu", "cuda"))
def _grouped_sum(x: Tensor, offsets: Tensor) -> Tensor:
    if takes_kernel(x):
        x, out = _dense(x), x.new_empty((offsets.shape[0], x.shape[1]))
        tile = tuning(x).rows
        if out.numel():
            launch(grouped_mm_triton.grouped_sum_kernel, x)[(-(-out.shape[1] // tile.columns), out.shape[0])](
                *(x, offsets, out, out.shape[1], x.stride(0)),
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
        return out
    out = x.new_zeros((offsets.shape[0], x.shape[1]))
    for group, rows in _groups(offsets, x.shape[0]):
        torch.sum(x[rows], dim=0, out=out[group])
    return out


@torch.library.register_fake("turbo_compile::grouped_sum")
def _grouped_sum_fake(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, w, offsets, _ = inputs
    ctx.save_for_backward(x, w, offsets)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
    x, w, offsets = ctx.saved_tensors
    needs_x, needs_w, _, needs_bias = ctx.needs_input_grad
    grad_x = grouped_mm(grad, w.transpose(1, 2), offsets, None) if needs_x else None
    grad_w = _weight_gradient(x, w, grad, offsets) if needs_w else None
    grad_bias = grouped_sum(grad, offsets) if needs_bias else None
    return grad_x, grad_w, None, grad_bias


torch.library.register_autograd("turbo_compile::grouped_mm", _differentiate, setup_context=_save)


def _weight_gradient(x: Tensor, w: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Laid out in memory like the weight, so that the parameter behind a transposed view gets a contiguous gradient."""
    if w.stride(1) < w.stride(2):
        return grouped_outer(grad, x, offsets).transpose(1, 2)
    return grouped_outer(x, grad, offsets)


# --- what runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows by index, in place of rows: row n is `rows[index[n] // divisor]`."""

    rows: Tensor
    index: Tensor
    divisor: int = 1

    def gathered(self) -> Tensor:
        return take(self.rows, self.index, divisor=self.divisor)


def products(x: Tensor | Taken, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    if _takes_triton(x, w.shape[1], w.shape[2]):
        return _triton_products(x, w, offsets, bias)
    return grouped_mm(x.gathered() if isinstance(x, Taken) else x, w, offsets, bias)


def outer_products(x: Tensor | Taken, y: Tensor | Taken, offsets: Tensor) -> Tensor:
    if _takes_triton(x, _source(x).shape[1], _source(y).shape[1]):
        return _triton_outer_products(x, y, offsets)
    x, y = (each.gathered() if isinstance(each, Taken) else each for each in (x, y))
    return grouped_outer(x, y, offsets)


def _triton_products(x: Tensor | Taken, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    rows, index, divisor = _where(x)
    count = index.shape[0] if isinstance(x, Taken) else rows.shape[0]
    out = rows.new_empty((count, w.shape[2]))
    tile, started = (tuning(rows).half if rows.dtype.itemsize == 2 else tuning(rows).single), programs(rows)
    if out.numel():
        launch(grouped_mm_triton.grouped_mm_kernel, rows)[(started,)](
            *(rows, index, w, rows if bias is None else bias.contiguous(), offsets, out),
            *(w.shape[0], w.shape[1], w.shape[2], rows.stride(0), *w.stride()),
            TAKEN=isinstance(x, Taken),
            DIVISOR=divisor,
            BIASED=bias is not None,
            PROGRAMS=started,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            INNER=tile.inner,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _triton_outer_products(x: Tensor | Taken, y: Tensor | Taken, offsets: Tensor) -> Tensor:
    x_rows, x_index, x_divisor = _where(x)
    y_rows, y_index, y_divisor = _where(y)
    out = x_rows.new_empty((offsets.shape[0], x_rows.shape[1], y_rows.shape[1]))
    tile = tuning(x_rows).half_outer if x_rows.dtype.itemsize == 2 else tuning(x_rows).single_outer
    tiles = -(-out.shape[1] // tile.rows) * -(-out.shape[2] // tile.columns)
    if out.numel():
        launch(grouped_mm_triton.grouped_outer_kernel, x_rows)[(tiles, out.shape[0])](
            *(x_rows, x_index, y_rows, y_index, offsets, out),
            *(out.shape[1], out.shape[2], x_rows.stride(0), y_rows.stride(0), *out.stride()),
            X_TAKEN=isinstance(x, Taken),
            X_DIVISOR=x_divisor,
            Y_TAKEN=isinstance(y, Taken),
            Y_DIVISOR=y_divisor,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            INNER=tile.inner,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _where(x: Tensor | Taken) -> tuple[Tensor, Tensor, int]:
    """The rows as a kernel reads them, the index (any tensor where there is none), and its divisor."""
    if isinstance(x, Taken):
        return _dense(x.rows), x.index, x.divisor
    rows = _dense(x)
    return rows, rows, 1


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _groups(offsets: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """The groups that have rows. Reads the offsets to the host."""
    ends = offsets.tolist()
    if ends[-1] != rows:
        raise InvalidProgram(f"the groups end at row {ends[-1]} of {rows}; every row must belong to a group")
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield group, slice(start, end)


def group_of_row(offsets: Tensor, rows: int) -> Tensor:
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets, index, right=True)


def _takes_triton(x: Tensor | Taken, inner: int, outer: int) -> bool:
    """Whether Triton multiplies. Torch's kernel wants rows and columns of a multiple of 16 bytes."""
    rows = _source(x)
    if not takes_kernel(rows):
        return False
    fits_torch = rows.device.type == "cuda" and rows.dtype == torch.bfloat16 and inner % 8 == 0 and outer % 8 == 0
    return not (fits_torch and tuning(rows).grouped_mm == "torch")


def _source(x: Tensor | Taken) -> Tensor:
    return x.rows if isinstance(x, Taken) else x
