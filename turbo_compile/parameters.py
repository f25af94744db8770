"""A model's parameters as DTensors: sharded in place, gathered for export, loaded from full tensors, born on meta."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import PreTrainedModel

from turbo_compile.errors import TurboCompileError
from turbo_compile.huggingface import block_modules, tied_names
from turbo_compile.ir.mesh import Axes
from turbo_compile.ir.placement import Layout


@dataclass(slots=True)
class Sharded:
    """The parameters of a compiled model by FQN (each once, under the name of its owner)."""

    axes: Axes
    layouts: dict[str, Layout]
    parameters: dict[str, nn.Parameter]
    exported: dict[str, torch.dtype]
    tied: dict[str, str]


def shard_parameters(
    model: PreTrainedModel, axes: Axes, layouts: dict[str, Layout], masters: dict[str, torch.dtype]
) -> Sharded:
    """Replace every parameter of `model`, in place, by this rank's part of it as a DTensor, and free the rest.

    A model on meta is initialised on the way, one module at a time, with the values one process would give it.
    """
    tied = tied_names(model)
    exported = {fqn: p.dtype for fqn, p in model.named_parameters()}
    sharded = Sharded(axes, layouts, {}, exported, tied)
    if any(p.is_meta for p in model.parameters()):
        _initialise(model, sharded, masters)
    for prefix, module in model.named_modules(remove_duplicate=False):
        _shard_module(prefix, module, sharded, masters)
    for fqn, owner in tied.items():
        parent, _, name = fqn.rpartition(".")
        model.get_submodule(parent)._parameters[name] = sharded.parameters[owner]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(axes.device)
    return sharded


def _shard_module(prefix: str, module: nn.Module, sharded: Sharded, masters: dict[str, torch.dtype]) -> None:
    for name, parameter in module._parameters.items():
        fqn = f"{prefix}.{name}" if prefix else name
        if parameter is None or sharded.tied.get(fqn) != fqn or isinstance(parameter.data, DTensor):
            continue
        sharded.parameters[fqn] = _as_dtensor(parameter, sharded.axes, sharded.layouts[fqn], masters[fqn])
        module._parameters[name] = sharded.parameters[fqn]


def _as_dtensor(parameter: nn.Parameter, axes: Axes, layout: Layout, master: torch.dtype) -> nn.Parameter:
    first, last = layout.rows(axes.coordinates["shard"])
    part = parameter.data[first:last] if layout.sharded else parameter.data
    local = part.to(device=axes.device, dtype=master, copy=True).contiguous()
    new = nn.Parameter(from_local(local, axes, layout), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def from_local(local: Tensor, axes: Axes, layout: Layout) -> DTensor:
    """This rank's rows as a DTensor of the full shape."""
    placement: Placement = Shard(0) if layout.sharded else Replicate()
    placements = [Replicate(), placement] if axes.replicated else [placement]
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(local, axes.parameters, placements, run_check=False, shape=layout.shape, stride=stride)


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole of a parameter or gradient, on every rank."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@contextlib.contextmanager
def gathered(model: nn.Module, sharded: Sharded, keep: bool) -> Iterator[None]:
    """Every parameter whole, on the CPU and in the dtype it came with, on ranks that `keep` them; back on leaving.

    All ranks take part: parameters are gathered one at a time.
    """
    whole: dict[str, nn.Parameter] = {}
    for fqn, parameter in sharded.parameters.items():
        full = full_tensor(parameter.data)
        if keep:
            whole[fqn] = nn.Parameter(full.to("cpu", sharded.exported[fqn]), parameter.requires_grad)
    _swap(model, sharded, whole)
    try:
        yield
    finally:
        _swap(model, sharded, sharded.parameters)


def _swap(model: nn.Module, sharded: Sharded, parameters: dict[str, nn.Parameter]) -> None:
    for fqn, owner in sharded.tied.items():
        if owner in parameters:
            parent, _, name = fqn.rpartition(".")
            model.get_submodule(parent)._parameters[name] = parameters[owner]


# --- loading ---------------------------------------------------------------------------------------------------------


def accept_full_tensors(model: nn.Module, sharded: Sharded) -> None:
    """Let `load_state_dict` take full tensors: each is cut to this rank's rows; a tied name may be missing."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, facts: dict[str, Any], *_: Any) -> None:
        if facts.get("assign_to_params_buffers"):
            raise TurboCompileError(
                "load_state_dict(assign=True) would replace the weights a compiled model trains; leave assign out"
            )
        for fqn, owner in sharded.tied.items():
            key, source = prefix + fqn, prefix + owner
            if key not in state and source in state:
                state[key] = state[source]
            elif owner != fqn and key in state and source not in state:
                state[source] = state[key]
        for fqn, owner in sharded.tied.items():
            value = state.get(prefix + fqn)
            layout = sharded.layouts[owner]
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == layout.shape:
                first, last = layout.rows(sharded.axes.coordinates["shard"])
                local = value[first:last] if layout.sharded else value
                state[prefix + fqn] = from_local(local.to(sharded.axes.device).contiguous(), sharded.axes, layout)

    model.register_load_state_dict_pre_hook(hook)


# --- meta ------------------------------------------------------------------------------------------------------------


def _initialise(model: PreTrainedModel, sharded: Sharded, masters: dict[str, torch.dtype]) -> None:
    """Initialise a model that is on meta, in the order transformers does, each unit whole only while it is filled.

    A unit is a block, or a part with no block inside: a module may fill its children's weights anew, as GPT-2's do.
    Every rank starts from rank 0's random state, so that all fill the same values.
    """
    _share_random_state(sharded.axes)
    blocks = block_modules(model)
    names = {id(module): prefix for prefix, module in model.named_modules()}
    around = {id(model.get_submodule(path)) for block in blocks for path in _paths_above(block)}

    def fill(module: nn.Module, root: PreTrainedModel) -> None:
        if id(module) not in around:
            for child in module.children():
                fill(child, child if isinstance(child, PreTrainedModel) else root)
        module._is_hf_initialized = False  # type: ignore[assignment]
        root._initialize_weights(module)

    def visit(module: nn.Module, root: PreTrainedModel) -> None:
        parts = dict(module.named_modules(prefix=names[id(module)]))
        if id(module) in around:
            for child in module.children():
                visit(child, child if isinstance(child, PreTrainedModel) else root)
            parts = {names[id(module)]: module}
        for part in parts.values():
            _materialise(part, sharded.axes.device)
        fill(module, root)
        for prefix, part in parts.items():
            _shard_module(prefix, part, sharded, masters)

    with torch.no_grad():
        visit(model, model)


def _paths_above(fqn: str) -> list[str]:
    """The modules around a module: the root, then `a`, `a.b` for `a.b.c`."""
    parts = fqn.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Storage for a module's own meta tensors; parameters tied to another module's stay on meta, replaced later."""
    holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for holder in holders:
        for name, tensor in holder.items():
            if tensor is not None and tensor.is_meta:
                empty = torch.empty_like(tensor, device=device)
                holder[name] = nn.Parameter(empty, tensor.requires_grad) if holder is module._parameters else empty


def _share_random_state(axes: Axes) -> None:
    """Rank 0's random state on every rank."""
    if axes.sizes["world"] == 1:
        return
    accelerator = torch.cuda if axes.device.type == "cuda" else torch
    state = accelerator.get_rng_state().to(axes.device)
    torch.distributed.broadcast(state, src=0)
    accelerator.set_rng_state(state.cpu())
