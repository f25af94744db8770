"""The loss boundary: the summed cross entropy of the tokens this rank holds, over a denominator the caller gives.

    loss, lse [...] = causal_lm_loss(logits [..., V], targets [...], denominator)
    grad_logits [..., V] = causal_lm_loss_backward(grad, logits, targets, lse, denominator)

    logprobs [...], entropy [...], lse [...] = token_logprobs(logits [..., V], targets [...])

The denominator counts the valid tokens of the whole batch. It is inside the op because a rank's gradients reach other
ranks through attention, so that scaling them after backward would be too late.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_compile.errors import TurboCompileError
from turbo_compile.ir.locality import Placement, declare
from turbo_compile.kernels import cross_entropy as kernel
from turbo_compile.kernels import softmax_rows

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # inputs may have any strides; outputs are contiguous

torch.library.define(
    "turbo_compile::causal_lm_loss",
    "(Tensor logits, Tensor targets, Tensor denominator) -> (Tensor loss, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "turbo_compile::causal_lm_loss_backward",
    "(Tensor grad, Tensor logits, Tensor targets, Tensor lse, Tensor denominator) -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    "turbo_compile::token_logprobs",
    "(Tensor logits, Tensor targets) -> (Tensor logprobs, Tensor entropy, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "turbo_compile::token_logprobs_backward",
    "(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor logits, Tensor targets, Tensor entropy, Tensor lse) "
    "-> Tensor",
    tags=_TAGS,
)
causal_lm_loss_op = torch.ops.turbo_compile.causal_lm_loss.default
causal_lm_loss_backward = torch.ops.turbo_compile.causal_lm_loss_backward.default
token_logprobs = torch.ops.turbo_compile.token_logprobs.default
token_logprobs_backward = torch.ops.turbo_compile.token_logprobs_backward.default

PLACEMENTS = {
    causal_lm_loss_op: Placement(("tokens", "tokens", "replicate"), ("partial", "tokens")),
    causal_lm_loss_backward: Placement(("replicate", "tokens", "tokens", "tokens", "replicate"), ("tokens",)),
    token_logprobs: Placement(("tokens", "tokens"), ("tokens", "tokens", "tokens")),
    token_logprobs_backward: Placement(("tokens",) * 6, ("tokens",)),
}
declare(PLACEMENTS)


def causal_lm_loss(logits: Tensor, targets: Tensor, denominator: Tensor) -> Tensor:
    """Sum over `targets != -100` of the cross entropy, divided by `denominator`; 0-d, fp32 (fp64 for fp64 logits).

    logits (..., V); targets (...) int64, already shifted; denominator 0-d float, at least 1. With no valid target the
    loss is 0 and so are its gradients.

    Raises TurboCompileError on CPU for a target outside the vocabulary; a GPU reports it at its next synchronisation.
    """
    loss, _ = causal_lm_loss_op(logits, targets, denominator)
    return loss


def causal_lm_loss_flops(tokens: Any, vocabulary: Any) -> Any:
    """Per logit: a maximum, a subtraction, an exponential and a sum."""
    return 4 * tokens * vocabulary


def causal_lm_loss_backward_flops(tokens: Any, vocabulary: Any) -> Any:
    """Per logit: a subtraction, an exponential and a product."""
    return 3 * tokens * vocabulary


@torch.library.impl("turbo_compile::causal_lm_loss", ("cpu", "cuda"))
def _forward(logits: Tensor, targets: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    vocabulary = logits.shape[-1]
    if targets.shape != logits.shape[:-1]:
        raise TurboCompileError(
            f"targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}: "
            "there must be one target for each row of logits"
        )
    if targets.device.type == "cpu":
        _check_targets(targets, vocabulary)
    losses, lse = kernel.cross_entropy(logits.reshape(-1, vocabulary), targets.reshape(-1))
    return losses.sum() / denominator.to(losses.dtype), lse.view(targets.shape)


@torch.library.register_fake("turbo_compile::causal_lm_loss")
def _forward_fake(logits: Tensor, targets: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    dtype = kernel.accumulate_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty(targets.shape, dtype=dtype)


@torch.library.impl("turbo_compile::causal_lm_loss_backward", ("cpu", "cuda"))
def _backward(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, denominator: Tensor) -> Tensor:
    scale = grad.to(lse.dtype) / denominator.to(lse.dtype)
    rows = logits.reshape(-1, logits.shape[-1])
    return kernel.cross_entropy_backward(scale, rows, targets.reshape(-1), lse.reshape(-1)).view(logits.shape)


@torch.library.register_fake("turbo_compile::causal_lm_loss_backward")
def _backward_fake(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, denominator: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, denominator = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # the gradient of `lse` is None, not a tensor of zeros
    ctx.save_for_backward(logits, targets, lse, denominator)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        return None, None, None
    return causal_lm_loss_backward(grad, *ctx.saved_tensors), None, None


torch.library.register_autograd("turbo_compile::causal_lm_loss", _differentiate, setup_context=_save)


# --- log-probabilities of targets, and entropies: 0 where the target is ignored ---------------------------------------


def token_logprobs_flops(tokens: Any, vocabulary: Any) -> Any:
    """Per logit: a maximum, a subtraction, an exponential, a product and two sums."""
    return 6 * tokens * vocabulary


def token_logprobs_backward_flops(tokens: Any, vocabulary: Any) -> Any:
    """Per logit: two subtractions, an exponential, and the two gradients' products and sum."""
    return 7 * tokens * vocabulary


@torch.library.impl("turbo_compile::token_logprobs", ("cpu", "cuda"))
def _logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    lse, logprobs, entropy = softmax_rows.statistics(rows, targets.reshape(-1), 1.0, 0.0, entropy=True)
    return logprobs.view(targets.shape), entropy.view(targets.shape), lse.view(targets.shape)


@torch.library.register_fake("turbo_compile::token_logprobs")
def _logprobs_fake(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = kernel.accumulate_dtype(logits.dtype)
    logprobs, entropy, lse = (logits.new_empty(targets.shape, dtype=dtype) for _ in range(3))
    return logprobs, entropy, lse


@torch.library.impl("turbo_compile::token_logprobs_backward", ("cpu", "cuda"))
def _logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    lse: Tensor,
) -> Tensor:
    d_logprobs, d_entropy = (
        torch.zeros(lse.numel(), dtype=lse.dtype, device=lse.device) if grad is None else grad.reshape(-1).to(lse.dtype)
        for grad in (grad_logprobs, grad_entropy)
    )
    made = logits.clone(memory_format=torch.contiguous_format)
    rows = made.view(-1, logits.shape[-1])
    targets, lse, entropy = (each.reshape(-1) for each in (targets, lse, entropy))
    softmax_rows.gradient_(rows, targets, lse, entropy, d_logprobs, d_entropy, 1.0, 0.0)
    return made


@torch.library.register_fake("turbo_compile::token_logprobs_backward")
def _logprobs_backward_fake(
    grad_logprobs: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *_: Tensor
) -> Tensor:
    return logits.new_empty(logits.shape)


def _logprobs_save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, entropy, lse)


def _logprobs_differentiate(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
) -> tuple[Tensor | None, None]:
    if grad_logprobs is None and grad_entropy is None:
        return None, None
    return token_logprobs_backward(grad_logprobs, grad_entropy, *ctx.saved_tensors), None


torch.library.register_autograd("turbo_compile::token_logprobs", _logprobs_differentiate, setup_context=_logprobs_save)


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    wrong = (targets != kernel.IGNORED) & ((targets < 0) | (targets >= vocabulary))
    if not wrong.any():
        return
    position = int(wrong.flatten().nonzero()[0])
    value = int(targets.flatten()[position])
    raise TurboCompileError(
        f"label {value} at flat position {position} is outside the vocabulary of {vocabulary}; "
        f"a label is 0 to {vocabulary - 1}, or {kernel.IGNORED} for a token without a loss"
    )
