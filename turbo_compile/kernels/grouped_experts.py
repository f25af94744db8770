"""A mixture's experts in three ops, whose backwards keep one value a row: what goes into the activation.

    order [N], offsets [E] = route(index [T, K], E)                 # N = T * K, sorted by expert, then token
    pre [N, O] = gathered_mm(hidden [T, H], order, offsets, w [E, H, O], bias [E, O] or None, K)
    out [T, H] = gated_mm_combine(pre, w [E, I, H], bias, order, offsets, weights [T, K], *gate)

The first product reads the rows of its tokens where they lie. The second keeps neither the activation nor its result:
backward computes the one again, and takes the gradient of `weights` from the products with the other's gradient. Where
rows travel to other ranks before they are summed, `gated_mm` gives rows [N, H] instead:

    rows [N, H] = gated_mm(pre, w, offsets, bias, *gate)

`gate` is a `turbo_compile.kernels.gate.Gate`, spelled out. A backward op takes `wants`, which of its results are
needed; the others are empty. Sums are in fp32 at least; nothing is read to the host on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turbo_compile.ir.locality import Placement, declare
from turbo_compile.kernels.device import kernel_op
from turbo_compile.kernels.gate import Gate, activate, activate_backward
from turbo_compile.kernels.grouped_mm import Taken, group_of_row, grouped_sum, outer_products, products
from turbo_compile.kernels.rows import accumulate_dtype, collect, sort_by_expert

_SWIGLU = Gate()


def grouped_experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate: Gate = _SWIGLU,
) -> Tensor:
    """The whole mixture: hidden (T, H), index and weights (T, K), up (E, H, 2I or I), down (E, I, H) -> (T, H)."""
    order, offsets = route(index, up.shape[0])
    pre = gathered_mm(hidden, order, offsets, up, up_bias, index.shape[1])
    return gated_mm_combine(pre, down, down_bias, order, offsets, weights, *gate.spelled())


@kernel_op("turbo_compile::route", mutates_args=())
def route(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return sort_by_expert(index, num_experts)


@route.register_fake
def _(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    rows = index.shape[0] * index.shape[1]
    return index.new_empty((rows,)), index.new_empty((num_experts,), dtype=torch.int32)


# --- rows of tokens times the matrix of their expert -----------------------------------------------------------------


@kernel_op("turbo_compile::gathered_mm", mutates_args=())
def gathered_mm(hidden: Tensor, order: Tensor, offsets: Tensor, w: Tensor, bias: Tensor | None, top_k: int) -> Tensor:
    return products(Taken(hidden, order, top_k), w, offsets, bias)


@gathered_mm.register_fake
def _(hidden: Tensor, order: Tensor, offsets: Tensor, w: Tensor, bias: Tensor | None, top_k: int) -> Tensor:
    return hidden.new_empty((order.shape[0], w.shape[2]))


@kernel_op("turbo_compile::gathered_mm_backward", mutates_args=())
def gathered_mm_backward(
    grad: Tensor, hidden: Tensor, order: Tensor, offsets: Tensor, w: Tensor, top_k: int, wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    grad_hidden, grad_w, grad_bias = _empties(grad, 3)
    if wants[0]:
        grad_hidden = collect(products(grad, w.transpose(1, 2), offsets, None), order, top_k)
    if wants[1]:
        grad_w = _weight_gradient(Taken(hidden, order, top_k), w, grad, offsets)
    if wants[2]:
        grad_bias = grouped_sum(grad, offsets)
    return grad_hidden, grad_w, grad_bias


@gathered_mm_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, order: Tensor, offsets: Tensor, w: Tensor, top_k: int, wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    results = hidden.new_empty(hidden.shape), _like_weight(w), w.new_empty((w.shape[0], w.shape[2]))
    return tuple(_wanted(results, wants))  # type: ignore[return-value]


def _gathered_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, order, offsets, w, _, ctx.top_k = inputs
    ctx.save_for_backward(hidden, order, offsets, w)


def _gathered_differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    wants = [needs[0], needs[3], needs[4]]
    results = gathered_mm_backward(grad, *ctx.saved_tensors, ctx.top_k, wants)
    grad_hidden, grad_w, grad_bias = _or_none(results, wants)
    return grad_hidden, None, None, grad_w, grad_bias, None


gathered_mm.register_autograd(_gathered_differentiate, setup_context=_gathered_save)


# --- the activation, times the matrix of each row's expert -----------------------------------------------------------


@kernel_op("turbo_compile::gated_mm", mutates_args=())
def gated_mm(
    pre: Tensor,
    w: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    shift: float,
) -> Tensor:
    return products(activate(Gate(activation, gated, interleaved, alpha, limit, shift), pre), w, offsets, bias)


@gated_mm.register_fake
def _(pre: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, *gate: Any) -> Tensor:
    return pre.new_empty((pre.shape[0], w.shape[2]))


@kernel_op("turbo_compile::gated_mm_backward", mutates_args=())
def gated_mm_backward(
    grad: Tensor,
    pre: Tensor,
    w: Tensor,
    offsets: Tensor,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    shift: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    gate = Gate(activation, gated, interleaved, alpha, limit, shift)
    grad_pre, grad_w, grad_bias = _empties(grad, 3)
    out = grad_pre
    if wants[0]:
        grad_pre, out, _ = activate_backward(gate, products(grad, w.transpose(1, 2), offsets, None), pre)
    elif wants[1]:
        out = activate(gate, pre)
    if wants[1]:
        grad_w = _weight_gradient(out, w, grad, offsets)
    if wants[2]:
        grad_bias = grouped_sum(grad, offsets)
    return grad_pre, grad_w, grad_bias


@gated_mm_backward.register_fake
def _(
    grad: Tensor,
    pre: Tensor,
    w: Tensor,
    offsets: Tensor,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    shift: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    results = pre.new_empty(pre.shape), _like_weight(w), w.new_empty((w.shape[0], w.shape[2]))
    return tuple(_wanted(results, wants))  # type: ignore[return-value]


def _gated_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, w, offsets, _, *ctx.gate = inputs
    ctx.save_for_backward(pre, w, offsets)


def _gated_differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    wants = [needs[0], needs[1], needs[3]]
    results = gated_mm_backward(grad, *ctx.saved_tensors, *ctx.gate, wants)
    grad_pre, grad_w, grad_bias = _or_none(results, wants)
    return grad_pre, grad_w, None, grad_bias, *[None] * 6


gated_mm.register_autograd(_gated_differentiate, setup_context=_gated_save)


# --- the same, and each token's sum of its rows ----------------------------------------------------------------------


@kernel_op("turbo_compile::gated_mm_combine", mutates_args=())
def gated_mm_combine(
    pre: Tensor,
    w: Tensor,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    weights: Tensor,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    shift: float,
) -> Tensor:
    gate = Gate(activation, gated, interleaved, alpha, limit, shift)
    return collect(products(activate(gate, pre), w, offsets, bias), order, weights.shape[1], weights)


@gated_mm_combine.register_fake
def _(
    pre: Tensor, w: Tensor, bias: Tensor | None, order: Tensor, offsets: Tensor, weights: Tensor, *gate: Any
) -> Tensor:
    return pre.new_empty((weights.shape[0], w.shape[2]))


@kernel_op("turbo_compile::gated_mm_combine_backward", mutates_args=())
def gated_mm_combine_backward(
    grad: Tensor,
    pre: Tensor,
    w: Tensor,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    weights: Tensor,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    shift: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of pre, weights, w and bias; the first two come together."""
    gate = Gate(activation, gated, interleaved, alpha, limit, shift)
    _, _, grad_w, grad_bias = _empties(grad, 4)
    given = Taken(grad, order, weights.shape[1])
    grad_out = products(given, w.transpose(1, 2), offsets, None)
    grad_pre, out, grad_weights = activate_backward(gate, grad_out, pre, order, weights)
    assert grad_weights is not None
    dtype = accumulate_dtype(pre, weights)
    if bias is not None and wants[1]:
        # A row's result holds its expert's bias too: the gradient with each bias, then each row's own.
        every = grad.to(dtype) @ bias.to(dtype).t()
        own = every[order // weights.shape[1], group_of_row(offsets, order.shape[0])]
        added = torch.empty_like(own).scatter_(0, order, own).view(weights.shape)
        grad_weights = (grad_weights.to(dtype) + added).to(weights.dtype)
    if wants[2]:
        grad_w = _weight_gradient(out, w, given, offsets)
    if wants[3]:
        share = grad.new_zeros((grad.shape[0], w.shape[0]), dtype=dtype)
        group = group_of_row(offsets, order.shape[0])
        share.index_put_((order // weights.shape[1], group), weights.to(dtype).flatten()[order], accumulate=True)
        grad_bias = (share.t() @ grad.to(dtype)).to(w.dtype)
    return grad_pre, grad_weights, grad_w, grad_bias


@gated_mm_combine_backward.register_fake
def _(
    grad: Tensor,
    pre: Tensor,
    w: Tensor,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    weights: Tensor,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    shift: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_w, grad_bias = _wanted((_like_weight(w), w.new_empty((w.shape[0], w.shape[2]))), wants[2:])
    return pre.new_empty(pre.shape), weights.new_empty(weights.shape), grad_w, grad_bias


def _combined_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, w, bias, order, offsets, weights, *ctx.gate = inputs
    ctx.save_for_backward(pre, w, bias, order, offsets, weights)


def _combined_differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    wants = [needs[0], needs[5], needs[1], needs[2]]
    results = gated_mm_combine_backward(grad, *ctx.saved_tensors, *ctx.gate, wants)
    grad_pre, grad_weights, grad_w, grad_bias = _or_none(results, wants)
    return grad_pre, grad_w, grad_bias, None, None, grad_weights, *[None] * 6


gated_mm_combine.register_autograd(_combined_differentiate, setup_context=_combined_save)


# --- what the backwards share ----------------------------------------------------------------------------------------


def _weight_gradient(x: Tensor | Taken, w: Tensor, grad: Tensor | Taken, offsets: Tensor) -> Tensor:
    """Laid out in memory like the weight, so that the parameter behind a transposed view gets a contiguous gradient."""
    if w.stride(1) < w.stride(2):
        return outer_products(grad, x, offsets).transpose(1, 2)
    return outer_products(x, grad, offsets)


def _like_weight(w: Tensor) -> Tensor:
    E, inner, outer = w.shape
    if w.stride(1) < w.stride(2):
        return w.new_empty((E, outer, inner)).transpose(1, 2)
    return w.new_empty((E, inner, outer))


def _empties(like: Tensor, count: int) -> list[Tensor]:
    return [like.new_empty(0) for _ in range(count)]


def _wanted(results: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor]:
    return [each if wanted else each.new_empty(0) for each, wanted in zip(results, wants, strict=True)]


def _or_none(results: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor | None]:
    return [each if wanted else None for each, wanted in zip(results, wants, strict=True)]


# --- what the compiler knows of them ---------------------------------------------------------------------------------

# Each rank sorts the tokens it holds, so order and offsets are its own.
declare(
    {
        route._opoverload: Placement(("tokens",), ("tokens", "tokens")),
        gathered_mm._opoverload: Placement(("tokens", "tokens", "tokens", "replicate", "replicate"), ("tokens",)),
        gated_mm._opoverload: Placement(("tokens", "replicate", "tokens", "replicate"), ("tokens",)),
        gated_mm_combine._opoverload: Placement(
            ("tokens", "replicate", "replicate", "tokens", "tokens", "tokens"), ("tokens",)
        ),
    }
)


def gated_mm_flops(rows: Any, inner: Any, outer: Any) -> Any:
    """The products, in front of which the activation counts for nothing; a combine adds `combine_flops`."""
    return 2 * rows * inner * outer
