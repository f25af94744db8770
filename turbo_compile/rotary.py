"""Rotary frequencies that depend on how long a batch is: from the whole batch's length, and without a written buffer.

transformers chooses them (`longrope`, `dynamic`) by the largest position it sees and writes them to a buffer. A rank
sees some rows, or a chunk of them, so the choice is made from a field of the batch that is the same on every rank. Each
batch decides for itself, where transformers' `dynamic` remembers the longest since a short one came by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@contextlib.contextmanager
def length_given(model: nn.Module, longest: Callable[[], Tensor]) -> Iterator[None]:
    """Every rotary embedding of `model` that adapts to the length takes it from `longest()`: 0-d, positions + 1."""
    adapting = [module for module in model.modules() if _adapts(module)]
    for module in adapting:
        module.forward = _forward(module, longest)
    try:
        yield
    finally:
        for module in adapting:
            del module.forward


def _adapts(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    used = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(_is_adaptive(kind) for kind in used) and hasattr(type(module).forward, "__wrapped__")


def _is_adaptive(kind: str | None) -> bool:
    return kind is not None and (kind == "longrope" or "dynamic" in kind)


class _Frequencies:
    """A rotary embedding with other frequencies: all it does not hold is the module's."""

    def __init__(self, module: nn.Module, name: str, inv_freq: Tensor, scaling: Any) -> None:
        self.module = module
        self.__dict__[f"{name}inv_freq"] = inv_freq
        self.__dict__[f"{name}attention_scaling"] = scaling

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _forward(module: Any, longest: Callable[[], Tensor]) -> Callable[..., Any]:
    plain: Any = type(module).forward.__wrapped__

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        given = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not _is_adaptive(kind):
            return plain(module, x, position_ids, **given)
        name = "" if layer_type is None else f"{layer_type}_"
        inv_freq, scaling = _chosen(module, name, kind, longest(), x.device, given)
        return plain(_Frequencies(module, name, inv_freq, scaling), x, position_ids, **given)

    return forward


def _chosen(
    module: Any, name: str, kind: str, longest: Tensor, device: torch.device, given: dict[str, str]
) -> tuple[Tensor, Any]:
    """The frequencies and the scaling of cos and sin for a batch of `longest`."""
    scaling = getattr(module, f"{name}attention_scaling")
    if kind == "longrope":
        parameters = module.config.rope_parameters
        parameters = parameters[given["layer_type"]] if given else parameters
        limit = parameters["original_max_position_embeddings"]
        short = getattr(module, f"{name}original_inv_freq").to(device)
        long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=limit + 1, **given)
        return torch.where(longest > limit, long, short), scaling
    return ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=longest, **given)
