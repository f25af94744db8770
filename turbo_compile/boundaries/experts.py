"""The experts boundary: tokens go to the rows of their experts, the experts compute, the rows come back as a sum.

    rows [T*K, H], order [T*K], offsets [E] = dispatch(hidden [T, H], index [T, K], E)    # sorted by expert, then token
    rows [T*K, H] = expert_rows(module, rows, offsets)                                    # row by row
    out [T, H] = combine(rows, order, weights [T, K])

Expert parallelism puts its exchanges after `dispatch` and before `combine`. Row j of `rows` is token `order[j] // K`,
for its choice `order[j] % K`; `offsets[e]` (int32) is where the rows of expert e end; an expert without a token is
normal. `combine` gives the dtype of the rows; its products and sums are in the wider of the two dtypes and at least in
fp32, as transformers sums them, except that low-precision products are not rounded before the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.locality import Placement, declare
from turbo_compile.kernels.grouped_mm import grouped_mm
from turbo_compile.kernels.rows import collect, sort_by_expert, spread, uncollect

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # inputs may have any strides; outputs are contiguous

torch.library.define(
    "turbo_compile::dispatch",
    "(Tensor hidden, Tensor index, int num_experts) -> (Tensor rows, Tensor order, Tensor offsets)",
    tags=_TAGS,
)
torch.library.define("turbo_compile::dispatch_backward", "(Tensor grad, Tensor order, int top_k) -> Tensor", tags=_TAGS)
torch.library.define("turbo_compile::combine", "(Tensor rows, Tensor order, Tensor weights) -> Tensor", tags=_TAGS)
torch.library.define(
    "turbo_compile::combine_backward",
    "(Tensor grad, Tensor rows, Tensor order, Tensor weights) -> (Tensor grad_rows, Tensor grad_weights)",
    tags=_TAGS,
)
dispatch = torch.ops.turbo_compile.dispatch.default
dispatch_backward = torch.ops.turbo_compile.dispatch_backward.default
combine = torch.ops.turbo_compile.combine.default
combine_backward = torch.ops.turbo_compile.combine_backward.default

# Each rank sorts the tokens it holds, so rows, order and offsets are its own.
PLACEMENTS = {
    dispatch: Placement(("tokens", "tokens"), ("tokens", "tokens", "tokens")),
    dispatch_backward: Placement(("tokens", "tokens"), ("tokens",)),
    combine: Placement(("tokens", "tokens", "tokens"), ("tokens",)),
    combine_backward: Placement(("tokens", "tokens", "tokens", "tokens"), ("tokens", "tokens")),
    grouped_mm: Placement(("tokens", "replicate", "tokens", "replicate"), ("tokens",)),
}
declare(PLACEMENTS)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' `ExpertsInterface` calls for an experts module: (T, H).

    hidden_states (T, H); top_k_index (T, K) int64, below the number of experts; top_k_weights (T, K). `module` is of a
    class under `use_experts_implementation`: its weights, its flags and its gate decide the compute.

    Raises UnsupportedOp for a module that transformers itself has already spread over ranks.
    """
    if module._is_expert_parallel:
        raise UnsupportedOp(
            f"{type(module).__name__} is already sharded by transformers' own expert parallelism; "
            "load the model without a tensor-parallel or expert-parallel plan, and give mesh.ep to turbo_compile"
        )
    rows, order, offsets = dispatch(hidden_states, top_k_index, module.num_experts)
    rows = expert_rows(module, rows, offsets)
    return combine(rows, order, top_k_weights).to(hidden_states.dtype)


def expert_rows(module: Any, rows: Tensor, offsets: Tensor) -> Tensor:
    """The experts' compute on rows sorted by expert: (N, H) to (N, H)."""
    if module.has_gate:
        rows = module._apply_gate(_project(module, "gate_up_proj", rows, offsets))
    else:
        rows = module.act_fn(_project(module, "up_proj", rows, offsets))
    rows = _project(module, "down_proj", rows, offsets)
    return module.post_expert_norm(rows) if module.has_post_expert_norm else rows


def owner_first(index: Tensor, experts: int, ranks: int, shards: int) -> Tensor:
    """Expert numbers such that the experts of one rank follow each other.

    The parameters of `experts` lie in equal stretches over `shards` x `ranks`, fastest last; a rank computes those of
    its stretches in all shards: expert (s * ranks + r) * n + i becomes (r * shards + s) * n + i.
    """
    held = experts // (ranks * shards)
    place, stretch = index % held, index // held
    return (stretch % ranks * shards + stretch // ranks) * held + place


def _project(module: Any, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_mm(rows, weight if module.is_transposed else weight.transpose(1, 2), offsets, bias)


def dispatch_flops(tokens: Any, top_k: Any, hidden: Any) -> int:
    """None: it copies."""
    return 0


def dispatch_backward_flops(tokens: Any, top_k: Any, hidden: Any) -> Any:
    return tokens * top_k * hidden


def combine_flops(tokens: Any, top_k: Any, hidden: Any) -> Any:
    return 2 * tokens * top_k * hidden


def combine_backward_flops(tokens: Any, top_k: Any, hidden: Any) -> Any:
    """A product for the rows, a dot product for the weights."""
    return 3 * tokens * top_k * hidden


@torch.library.impl("turbo_compile::dispatch", ("cpu", "cuda"))
def _dispatch(hidden: Tensor, index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, offsets = sort_by_expert(index, num_experts)
    return spread(hidden, order, index.shape[1]), order, offsets


@torch.library.register_fake("turbo_compile::dispatch")
def _dispatch_fake(hidden: Tensor, index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = index.shape[0] * index.shape[1]
    return (
        hidden.new_empty((rows, hidden.shape[1])),
        index.new_empty((rows,)),
        index.new_empty((num_experts,), dtype=torch.int32),
    )


@torch.library.impl("turbo_compile::dispatch_backward", ("cpu", "cuda"))
def _dispatch_backward(grad: Tensor, order: Tensor, top_k: int) -> Tensor:
    return collect(grad, order, top_k)


@torch.library.register_fake("turbo_compile::dispatch_backward")
def _dispatch_backward_fake(grad: Tensor, order: Tensor, top_k: int) -> Tensor:
    return grad.new_empty((order.shape[0] // top_k, grad.shape[1]))


def _dispatch_save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, index, _ = inputs
    _, order, offsets = output
    ctx.mark_non_differentiable(order, offsets)
    ctx.set_materialize_grads(False)  # order and offsets have none, instead of zeros
    ctx.save_for_backward(order)
    ctx.top_k = index.shape[1]


def _dispatch_differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        return None, None, None
    (order,) = ctx.saved_tensors
    return dispatch_backward(grad, order, ctx.top_k), None, None


torch.library.register_autograd("turbo_compile::dispatch", _dispatch_differentiate, setup_context=_dispatch_save)


@torch.library.impl("turbo_compile::combine", ("cpu", "cuda"))
def _combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return collect(rows, order, weights.shape[1], weights)


@torch.library.register_fake("turbo_compile::combine")
def _combine_fake(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((weights.shape[0], rows.shape[1]))


@torch.library.impl("turbo_compile::combine_backward", ("cpu", "cuda"))
def _combine_backward(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return uncollect(grad, rows, order, weights)


@torch.library.register_fake("turbo_compile::combine_backward")
def _combine_backward_fake(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _combine_save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    grad_rows, grad_weights = combine_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


torch.library.register_autograd("turbo_compile::combine", _combine_differentiate, setup_context=_combine_save)
