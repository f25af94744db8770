"""Matrix products of rows sorted by group, each group with its own matrix: the compute of a mixture of experts.

    out [N, O] = grouped_mm(x [N, I], w [E, I, O], offsets [E], bias [E, O] or None)    # x[n] @ w[e] + bias[e]
    out [E, I, O] = grouped_outer(x [N, I], y [N, O], offsets)                          # x[rows].T @ y[rows]
    out [E, O] = grouped_sum(x [N, O], offsets)

`offsets` (int32) holds the end of each group: e is rows `offsets[e - 1]:offsets[e]`, the last offset is N, a group may
be empty. `w` may be a transposed view. On CPU, and on a GPU for dtypes other than bf16, a loop over the groups; on a
GPU in bf16 torch's grouped kernel, without a host read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_compile.errors import InvalidProgram

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
    if _has_grouped_kernel(x, w.shape[1], w.shape[2]):
        out = F.grouped_mm(x.contiguous(), w, offs=offsets)
        return out if bias is None else out.add_(bias[_group_of_row(offsets, x.shape[0])])
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
    if _has_grouped_kernel(x, x.shape[1], y.shape[1]):
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
    if _has_grouped_kernel(x, 8, x.shape[1]):
        ones = x.new_ones((x.shape[0], 8))  # the narrowest matrix the grouped kernel takes; it accumulates in fp32
        return F.grouped_mm(ones.t(), x.contiguous(), offs=offsets)[:, 0].contiguous()
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


def _groups(offsets: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """The groups that have rows. Reads the offsets to the host."""
    ends = offsets.tolist()
    if ends[-1] != rows:
        raise InvalidProgram(f"the groups end at row {ends[-1]} of {rows}; every row must belong to a group")
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield group, slice(start, end)


def _group_of_row(offsets: Tensor, rows: int) -> Tensor:
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets, index, right=True)


def _has_grouped_kernel(x: Tensor, inner: int, outer: int) -> bool:
    """Torch's kernel wants rows and columns of a multiple of 16 bytes."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and inner % 8 == 0 and outer % 8 == 0
