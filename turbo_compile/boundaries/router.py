"""The router statistics boundary: the load-balancing loss of Switch Transformer, its batch spread over ranks.

    counts [E + 1] = router_counts(logits: [T, E] a layer, valid [T], top_k)
    loss = router_loss(logits, valid, counts of all ranks together)

The loss multiplies two statistics of all valid tokens of all layers: how often each expert was picked, which autograd
sees as a constant, and the mean probability it was given. Each rank counts its tokens, the counts are summed over
ranks, and `router_loss` gives this rank's share: the shares add up to the loss of the global batch.

Source: Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6; picks and sums as transformers'
`load_balancing_loss_func` computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_compile.ir.locality import Placement, declare

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # inputs may have any strides; outputs are contiguous

torch.library.define("turbo_compile::router_counts", "(Tensor[] logits, Tensor valid, int top_k) -> Tensor", tags=_TAGS)
torch.library.define(
    "turbo_compile::router_loss", "(Tensor[] logits, Tensor valid, Tensor counts) -> Tensor", tags=_TAGS
)
torch.library.define(
    "turbo_compile::router_loss_backward",
    "(Tensor grad, Tensor[] logits, Tensor valid, Tensor counts) -> Tensor[]",
    tags=_TAGS,
)
router_counts = torch.ops.turbo_compile.router_counts.default
router_loss = torch.ops.turbo_compile.router_loss.default
router_loss_backward = torch.ops.turbo_compile.router_loss_backward.default

PLACEMENTS = {
    router_counts: Placement(("tokens", "tokens"), ("partial",)),
    router_loss: Placement(("tokens", "tokens", "replicate"), ("partial",)),
    router_loss_backward: Placement(("replicate", "tokens", "tokens", "replicate"), ("tokens",)),
}
declare(PLACEMENTS)


def router_counts_flops(layers: Any, tokens: Any, experts: Any) -> Any:
    """A softmax: maximum, subtraction, exponential, sum, division."""
    return 5 * layers * tokens * experts


def router_loss_flops(layers: Any, tokens: Any, experts: Any) -> Any:
    """A softmax, and the sum over tokens."""
    return 6 * layers * tokens * experts


def router_loss_backward_flops(layers: Any, tokens: Any, experts: Any) -> Any:
    """A softmax, and its derivative: product, sum, subtraction, product."""
    return 9 * layers * tokens * experts


@torch.library.impl("turbo_compile::router_counts", ("cpu", "cuda"))
def _counts(logits: list[Tensor], valid: Tensor, top_k: int) -> Tensor:
    """How often each expert is picked, then the number of valid rows, both over all layers: (E + 1,) fp32."""
    experts = logits[0].shape[1]
    refused = ~valid.unsqueeze(1)
    # The bin after the last expert takes what refused tokens pick. Integers: exact, and in any order the same.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=valid.device)
    one = counts.new_ones(()).expand(valid.shape[0] * top_k)
    for layer in logits:
        # The softmax stays in the layer's dtype: its rounding decides ties, and transformers picks after it.
        picked = layer.softmax(dim=1).topk(top_k, dim=1).indices
        counts.scatter_add_(0, picked.masked_fill_(refused, experts).flatten(), one)
    counts[experts] = valid.sum() * len(logits)
    return counts.float()


@torch.library.register_fake("turbo_compile::router_counts")
def _counts_fake(logits: list[Tensor], valid: Tensor, top_k: int) -> Tensor:
    return logits[0].new_empty((logits[0].shape[1] + 1,), dtype=torch.float32)


def _counts_are_constants(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _no_gradient(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
    return None, None, None


torch.library.register_autograd("turbo_compile::router_counts", _no_gradient, setup_context=_counts_are_constants)


@torch.library.impl("turbo_compile::router_loss", ("cpu", "cuda"))
def _loss(logits: list[Tensor], valid: Tensor, counts: Tensor) -> Tensor:
    """E * sum over experts of (picks / rows) * (probability / rows); 0-d, fp32 (fp64 for fp64); 0 without rows."""
    refused = ~valid.unsqueeze(1)
    frequency = _frequency_over_rows(counts, logits[0].dtype)
    probability = torch.zeros_like(frequency)
    for layer in logits:
        probability += layer.softmax(dim=1, dtype=frequency.dtype).masked_fill_(refused, 0.0).sum(dim=0)
    return torch.dot(frequency, probability)


@torch.library.register_fake("turbo_compile::router_loss")
def _loss_fake(logits: list[Tensor], valid: Tensor, counts: Tensor) -> Tensor:
    return logits[0].new_empty((), dtype=_statistics_dtype(logits[0].dtype))


@torch.library.impl("turbo_compile::router_loss_backward", ("cpu", "cuda"))
def _loss_backward(grad: Tensor, logits: list[Tensor], valid: Tensor, counts: Tensor) -> list[Tensor]:
    refused = ~valid.unsqueeze(1)
    frequency = _frequency_over_rows(counts, logits[0].dtype) * grad
    grads = []
    for layer in logits:
        probability = layer.softmax(dim=1, dtype=frequency.dtype)
        expected = (probability * frequency).sum(dim=1, keepdim=True)
        gradient = probability.mul_(frequency - expected).masked_fill_(refused, 0.0)
        grads.append(gradient.to(layer.dtype, memory_format=torch.contiguous_format))
    return grads


@torch.library.register_fake("turbo_compile::router_loss_backward")
def _loss_backward_fake(grad: Tensor, logits: list[Tensor], valid: Tensor, counts: Tensor) -> list[Tensor]:
    return [layer.new_empty(layer.shape) for layer in logits]


def _save(ctx: Any, inputs: tuple[list[Tensor], Tensor, Tensor], output: Tensor) -> None:
    logits, valid, counts = inputs
    ctx.save_for_backward(*logits, valid, counts)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None]:
    *logits, valid, counts = ctx.saved_tensors
    return router_loss_backward(grad, logits, valid, counts), None, None


torch.library.register_autograd("turbo_compile::router_loss", _differentiate, setup_context=_save)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _frequency_over_rows(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """E * picks / rows^2 for each expert, so that its product with summed probabilities is the loss; 0 without rows."""
    picks, rows = counts[:-1], counts[-1].clamp(min=1.0)
    frequency = picks / rows  # in fp32 whatever the logits are, as in transformers
    return frequency.to(_statistics_dtype(dtype)) * picks.shape[0] / rows
