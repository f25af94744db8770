"""The head and the loss as one declared op: no logits of all tokens, in forward or in backward.

    loss, grads = linear_cross_entropy(hidden [..., H], weight [V, H], bias [V], targets [...], denominator, ...)
    loss, logprobs [...], entropy [...], lse [...] = linear_logprobs(the same)

logits = z(hidden @ weight.T + bias), z(x) = scale * x, or softcap * tanh(scale * x / softcap); the loss is what
causal_lm_loss says of them. The first op gives its gradients along, for the sum of the losses and as far as `wanted`
(hidden, weight, bias): backward multiplies them by the tangent over the denominator. The second serves losses of the
caller's own, and computes the logits again in backward, a chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.locality import Placement, Role, declare
from turbo_compile.kernels import linear_cross_entropy as kernel
from turbo_compile.kernels.cross_entropy import accumulate_dtype

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor denominator, float scale, float softcap"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # inputs may have any strides; outputs are contiguous

torch.library.define(
    "turbo_compile::linear_cross_entropy",
    f"({_HEAD}, bool[] wanted) -> (Tensor loss, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    tags=_TAGS,
)
torch.library.define(
    "turbo_compile::linear_logprobs",
    f"({_HEAD}) -> (Tensor loss, Tensor logprobs, Tensor entropy, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "turbo_compile::linear_logprobs_backward",
    "(Tensor? grad_loss, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor entropy, Tensor lse, "
    f"{_HEAD}, bool[] wanted) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    tags=_TAGS,
)
linear_cross_entropy = torch.ops.turbo_compile.linear_cross_entropy.default
linear_logprobs = torch.ops.turbo_compile.linear_logprobs.default
linear_logprobs_backward = torch.ops.turbo_compile.linear_logprobs_backward.default

_GIVEN: tuple[Role, ...] = ("tokens", "replicate", "replicate", "tokens", "replicate")
PLACEMENTS = {
    linear_cross_entropy: Placement(_GIVEN, ("partial", "tokens", "partial", "partial")),
    linear_logprobs: Placement(_GIVEN, ("partial", "tokens", "tokens", "tokens")),
    linear_logprobs_backward: Placement(
        ("replicate", "tokens", "tokens", "tokens", "tokens", *_GIVEN), ("tokens", "partial", "partial")
    ),
}
declare(PLACEMENTS)


def linear_cross_entropy_flops(tokens: Any, hidden: Any, vocabulary: Any, gradients: int = 2) -> Any:
    """A product for the logits and one for each of two gradients, and what the softmax and its derivative take."""
    return tokens * vocabulary * (2 * hidden * (1 + gradients) + 7)


def linear_logprobs_flops(tokens: Any, hidden: Any, vocabulary: Any) -> Any:
    return tokens * vocabulary * (2 * hidden + 6)


def linear_logprobs_backward_flops(tokens: Any, hidden: Any, vocabulary: Any, gradients: int = 2) -> Any:
    """The logits again, and a product for each of two gradients."""
    return tokens * vocabulary * (2 * hidden * (1 + gradients) + 8)


# --- the loss, its gradients along -----------------------------------------------------------------------------------


@torch.library.impl("turbo_compile::linear_cross_entropy", ("cpu", "cuda"))
def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    denominator: Tensor,
    scale: float,
    softcap: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, grad_hidden, grad_weight, grad_bias = kernel.loss_and_gradients(
        _rows(hidden), weight, bias, targets.reshape(-1), scale, softcap, _three(wanted)
    )
    grad_hidden = grad_hidden.view(hidden.shape) if wanted[0] else grad_hidden
    return loss / denominator.to(loss.dtype), grad_hidden, grad_weight, grad_bias


@torch.library.register_fake("turbo_compile::linear_cross_entropy")
def _loss_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    denominator: Tensor,
    scale: float,
    softcap: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulate_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,), dtype=dtype),
        weight.new_empty(weight.shape[:1] if wanted[2] and bias is not None else (0,), dtype=dtype),
    )


def _loss_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, weight, bias, _, denominator, *_, ctx.wanted = inputs
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)  # those of gradients are None, not zeros as large as the weight
    ctx.dtypes = (weight.dtype, bias.dtype if bias is not None else None)
    ctx.save_for_backward(denominator, *gradients)


def _loss_differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    denominator, grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    if grad is None:
        return (None,) * 8
    if any(need and not given for need, given in zip(needs, ctx.wanted, strict=True)):
        raise UnsupportedOp(f"linear_cross_entropy was asked for gradients {ctx.wanted} and must give {list(needs)}")
    rate = grad / denominator
    weight, bias = ctx.dtypes
    return (
        (grad_hidden.to(rate.dtype) * rate).to(grad_hidden.dtype) if needs[0] else None,
        (grad_weight * rate).to(weight) if needs[1] else None,
        (grad_bias * rate).to(bias) if needs[2] else None,
        *(None,) * 5,
    )


torch.library.register_autograd("turbo_compile::linear_cross_entropy", _loss_differentiate, setup_context=_loss_save)


# --- log-probabilities, their gradients later ------------------------------------------------------------------------


@torch.library.impl("turbo_compile::linear_logprobs", ("cpu", "cuda"))
def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    denominator: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = kernel.logprobs_and_entropy(_rows(hidden), weight, bias, targets.reshape(-1), scale, softcap)
    loss = -made[0].sum() / denominator.to(made[0].dtype)
    logprobs, entropy, lse = (each.view(targets.shape) for each in made)
    return loss, logprobs, entropy, lse


@torch.library.register_fake("turbo_compile::linear_logprobs")
def _logprobs_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtype = accumulate_dtype(hidden.dtype)
    return hidden.new_empty((), dtype=dtype), *(hidden.new_empty(targets.shape, dtype=dtype) for _ in range(3))


@torch.library.impl("turbo_compile::linear_logprobs_backward", ("cpu", "cuda"))
def _logprobs_backward(
    grad_loss: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    denominator: Tensor,
    scale: float,
    softcap: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    d_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs.to(lse.dtype)
    if grad_loss is not None:
        d_logprobs = d_logprobs - grad_loss.to(lse.dtype) / denominator.to(lse.dtype)
    d_entropy = torch.zeros_like(lse) if grad_entropy is None else grad_entropy.to(lse.dtype)
    grad_hidden, grad_weight, grad_bias = kernel.logprobs_backward(
        *(d_logprobs.reshape(-1), d_entropy.reshape(-1), _rows(hidden), weight, bias, targets.reshape(-1)),
        *(lse.reshape(-1), entropy.reshape(-1), scale, softcap, _three(wanted)),
    )
    grad_hidden = grad_hidden.view(hidden.shape) if wanted[0] else grad_hidden
    return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype if bias is None else bias.dtype)


@torch.library.register_fake("turbo_compile::linear_logprobs_backward")
def _logprobs_backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias = arguments[5:8]
    wanted = arguments[-1]
    return (
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,)),
        (weight if bias is None else bias).new_empty(weight.shape[:1] if wanted[2] and bias is not None else (0,)),
    )


def _logprobs_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    hidden, weight, bias, targets, denominator, *ctx.options = inputs
    _, _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(entropy, lse, hidden, weight, bias, targets, denominator)


def _logprobs_differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(grad is None for grad in grads[:3]):
        return (None,) * 7
    needs = ctx.needs_input_grad[:3]
    made = linear_logprobs_backward(*grads[:3], *ctx.saved_tensors, *ctx.options, list(needs))
    return *(grad if need else None for grad, need in zip(made, needs, strict=True)), *(None,) * 4


torch.library.register_autograd("turbo_compile::linear_logprobs", _logprobs_differentiate, setup_context=_logprobs_save)


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _three(wanted: list[bool]) -> tuple[bool, bool, bool]:
    hidden, weight, bias = wanted
    return hidden, weight, bias
