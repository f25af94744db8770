"""Attention as one declared op: grouped heads, documents, padding, windows, soft caps, sinks and dropout.

    out [B,S,H,V], lse [B,H,S] = attention(q [B,H,S,D], k [B,G,S,D], v [B,G,S,V], layout [B,S], sinks [H], seed, ...)

`layout` (int32) says who sees whom. A token that can be attended to holds the index of its document's first token; a
padded token holds -1 minus such an index; documents do not interleave. Causal: query s sees the keys t with
start(s) <= t <= s that are not padded; otherwise it sees the unpadded keys of its own start. A window further asks
|s - t| < window. So a plain row is all zeros, and a padded query still sees what Hugging Face's two-dimensional mask
shows it. Queries that see nothing give zeros, lse = -inf (their sink, with sinks), and no gradient.

p = dropout(exp(logit - lse)), logit = softcap * tanh(scale * q.k / softcap), lse = log(sum of exp(logit), exp(sink)).
`seed` is a 0-d int64 on the device of q; each use of dropout needs its own (counter_random.fork).

Strides do not follow the inputs': `out` and `lse` are contiguous, gradients of q, k and v are stored [B,S,heads,width].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.locality import Placement, declare
from turbo_compile.kernels import attention_cpu, attention_cuda
from turbo_compile.kernels.attention_cpu import accumulate_dtype
from turbo_compile.kernels.attention_layout import Options

_INPUTS = "Tensor q, Tensor k, Tensor v"
_OPTIONS = "float scale, bool causal, int? window, float? softcap, float dropout"
_FACTS = f"Tensor layout, Tensor? sinks, Tensor? seed, {_OPTIONS}"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # any strides of q, k and v will do

torch.library.define("turbo_compile::attention", f"({_INPUTS}, {_FACTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
torch.library.define(
    "turbo_compile::attention_backward",
    f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, {_FACTS}) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)",
    tags=_TAGS,
)
attention = torch.ops.turbo_compile.attention.default
attention_backward = torch.ops.turbo_compile.attention_backward.default


@dataclass(frozen=True, slots=True)
class AttentionPlacement:
    """Which dimensions an axis cuts: inside, all tokens of some heads; outside, some tokens of all heads.

    `layout` is whole on every rank. The exchange before the op turns `sequence_in` into `heads_in`, the one after it
    `heads_out` into `sequence_out`.
    """

    axis: str = "sp"
    heads_in: dict[str, int] = field(default_factory=lambda: {"q": 1, "k": 1, "v": 1, "sinks": 0})
    sequence_in: dict[str, int] = field(default_factory=lambda: {"q": 2, "k": 2, "v": 2})
    heads_out: int = 2
    sequence_out: int = 1


PLACEMENT = AttentionPlacement()
declare({attention: Placement(("whole",) * 6, ("whole", "whole"))})


def FLOPS(B: Any, S: Any, H: Any, D: Any, V: Any, window: Any = None, causal: bool = True) -> Any:
    """Multiply-adds of the forward counted as 2, for numbers or sympy expressions; a causal row is half a full one.

    Backward is 2.5 times this: five products against two. Documents, which only the layout knows, are not discounted.
    """
    if window is None:
        pairs = S * S / 2 if causal else S * S
    else:
        reach = sympy.Min(window, S)
        pairs = reach * S - reach * reach / 2 if causal else 2 * reach * S - reach * reach
    return 2 * B * H * pairs * (D + V)


@torch.library.impl("turbo_compile::attention", "CPU")
def _attention_cpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    return attention_cpu.forward(_checked_options(*arguments), *arguments[:6])


@torch.library.impl("turbo_compile::attention", "CUDA")
def _attention_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    return attention_cuda.forward(_checked_options(*arguments), *arguments[:6])


@torch.library.register_fake("turbo_compile::attention")
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _checked_options(q, k, v, *rest)
    B, H, S, _ = q.shape
    return q.new_empty(B, S, H, v.shape[3]), q.new_empty(B, H, S, dtype=accumulate_dtype(q.dtype))


def _checked_options(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, sinks: Tensor | None, seed: Tensor | None, *rest: Any
) -> Options:
    options = Options(*rest)
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} query heads need key and value heads that divide them and agree; "
            f"got {k.shape[1]} and {v.shape[1]}"
        )
    if layout.dtype != torch.int32 or layout.dim() != 2:
        raise ValueError(f"attention: layout must be int32 [B, S], got {layout.dtype} with {layout.dim()} dimensions")
    if options.dropout > 0.0 and seed is None:
        raise ValueError(f"attention: dropout {options.dropout} needs a seed (0-d int64)")
    return options


@torch.library.impl("turbo_compile::attention_backward", "CPU")
def _attention_backward_cpu(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return attention_cpu.backward(Options(*arguments[9:]), *arguments[:9])


@torch.library.impl("turbo_compile::attention_backward", "CUDA")
def _attention_backward_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return attention_cuda.backward(Options(*arguments[9:]), *arguments[:9])


@torch.library.register_fake("turbo_compile::attention_backward")
def _attention_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = rest[0]
    B, _, S, _ = q.shape
    grad_q, grad_k, grad_v = (x.new_empty(B, S, x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))
    return grad_q, grad_k, grad_v, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, layout, sinks, seed, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, layout, sinks, seed)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise UnsupportedOp("attention has no second derivative; call backward without create_graph=True")
    *grads, grad_sinks = attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    has_sinks = ctx.saved_tensors[6] is not None
    return *grads, None, grad_sinks if has_sinks else None, *[None] * (1 + len(ctx.options))


torch.library.register_autograd("turbo_compile::attention", _differentiate, setup_context=_save)
