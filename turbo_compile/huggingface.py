"""What the compiler asks of transformers: its interfaces for attention, experts, masks and losses; its dtype rules."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from turbo_compile import _torch
from turbo_compile.boundaries.attention import attention
from turbo_compile.boundaries.documents import mask_layout_op
from turbo_compile.boundaries.experts import experts_forward
from turbo_compile.boundaries.loss import causal_lm_loss_op, token_logprobs
from turbo_compile.boundaries.router import router_counts, router_loss
from turbo_compile.errors import CaptureError, TurboCompileError, UnsupportedOp
from turbo_compile.rotary import length_given

NAME = "turbo_compile"
# Tensors that models hand to attention and that the mask says already, or the loss takes.
_HARMLESS = (
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "labels",
    "shift_labels",
    "num_items_in_batch",
)
# What modeling files import to keep padding out of recurrences and convolutions.
_MASK_READERS = ("create_recurrent_attention_mask", "apply_mask_to_padding_states")
_ANY_NUMBER = 4096  # of different blocks under one class: past it, Dynamo would give up the regions


@dataclass(slots=True)
class Inputs:
    """The batch fields that boundaries read, set by the traced entry before it calls the model.

    `logprobs` and `entropy` are what the loss boundary found on the way, where `token_logprobs` asked for it.
    """

    layout: Tensor | None = None
    valid: Tensor | None = None
    seed: Tensor | None = None
    targets: Tensor | None = None
    denominator: Tensor | None = None
    longest: Tensor | None = None
    token_logprobs: bool | None = None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None


_INPUTS = Inputs()


def block_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by FQN: every `GradientCheckpointingLayer` that is not inside another."""
    blocks: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(fqn.startswith(f"{outer}.") for outer in blocks):
            blocks[fqn] = module
    return blocks


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the name of its owner, the first that has it."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def refuse_own_positions(model: nn.Module) -> None:
    """Refuse a model that counts positions from its padding token: a compiled model counts them from 0.

    Raises:
        UnsupportedOp: names the module.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in fqn and module.padding_idx is not None:
            raise UnsupportedOp(
                f"{fqn} of {type(model).__name__} counts positions from its padding token, which has no rule"
            )


_RECURRENT = ("linear_attention", "conv", "hybrid")  # of a configuration's layer_types
_STATES = ("A_log", "dt_bias")  # parameters that only state-space and gated delta layers have


def refuse_recurrences(model: PreTrainedModel) -> None:
    """Refuse blocks that carry a state from token to token: linear attention, state spaces, convolutions over tokens.

    Raises:
        UnsupportedOp: names the layer, and the layers that the model would have to do without.
    """
    blocks = block_modules(model)
    kinds = getattr(model.config, "layer_types", None) or ()
    found = []
    for place, (fqn, block) in enumerate(blocks.items()):
        own = next((f"{fqn}.{name}" for name, part in block.named_children() if _carries_state(part)), "")
        recurrent = len(kinds) == len(blocks) and kinds[place] in _RECURRENT
        if own or recurrent:
            found.append(own or fqn)
    if found:
        raise UnsupportedOp(
            f"{found[0]} ({type(model.get_submodule(found[0])).__name__}) carries a state from token to token, which "
            f"has no boundary yet; {len(found)} of the {len(blocks)} blocks of {type(model).__name__} do"
        )


def _carries_state(part: nn.Module) -> bool:
    named = any(name.rpartition(".")[2] in _STATES for name, _ in part.named_parameters())
    return named or any(isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 for module in part.modules())


def mask_reader(model: nn.Module) -> str:
    """The class of a part that reads the padding mask outside attention, as recurrences and convolutions do; or ""."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(type(module).forward).parameters:
            return type(module).__name__
        home = sys.modules.get(type(module).__module__)
        if isinstance(module, PreTrainedModel) and any(hasattr(home, name) for name in _MASK_READERS):
            return type(module).__name__
    return ""


def expert_counts(model: nn.Module) -> dict[str, int]:
    """The number of experts of every module behind transformers' experts interface, by FQN."""
    found = {fqn: module for fqn, module in model.named_modules() if hasattr(module, "_apply_gate")}
    return {fqn: int(module.num_experts) for fqn, module in found.items()}


@contextlib.contextmanager
def boundaries_installed(model: PreTrainedModel, recorded: bool) -> Iterator[Inputs]:
    """Every boundary of `model` an op of ours, every block a nested region; all as it was on leaving.

    `recorded` says that hooks record values inside blocks (router logits). Only then does a region return them:
    Dynamo reuses a region that touches nothing outside it, and traces one that does anew for every block.
    """
    with contextlib.ExitStack() as stack:
        _install_recorders(model)
        stack.enter_context(_unguarded(model))
        stack.enter_context(_attention(model))
        stack.enter_context(_experts(model))
        stack.enter_context(_loss(model))
        stack.enter_context(_router(model))
        stack.enter_context(_masks())
        stack.enter_context(length_given(model, _longest))
        stack.enter_context(_blocks(model, _recording_region if recorded else _region))
        stack.callback(_clear)
        yield _INPUTS


def _longest() -> Tensor:
    assert _INPUTS.longest is not None
    return _INPUTS.longest


def _clear() -> None:
    for field in _INPUTS.__slots__:
        setattr(_INPUTS, field, None)


# --- attention and its mask ------------------------------------------------------------------------------------------


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name, value in more.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    if unknown:
        raise UnsupportedOp(
            f"UnsupportedOp: an attention of {type(module).__name__} passes {unknown[0]}, which has no rule"
        )
    if attention_mask is None:
        raise UnsupportedOp(f"an attention of {type(module).__name__} gets no mask, so documents and padding are lost")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seed = _INPUTS.seed if dropout > 0 else None
    out, _lse = attention(
        query, key, value, attention_mask, s_aux, seed, float(scale), True, sliding_window, softcap, float(dropout)
    )
    return out, None


def _layout_mask(*_: Any, local_size: int | None = None, use_vmap: bool = False, **more: Any) -> Tensor:
    if use_vmap or "allow_is_bidirectional_skip" in more:  # what only transformers' bidirectional masks say
        raise UnsupportedOp(
            "bidirectional attention, or another mask of the model's own making, has no rule; masks are causal plus "
            "padding plus documents"
        )
    assert _INPUTS.layout is not None
    return mask_layout_op(_INPUTS.layout, True, local_size)


@contextlib.contextmanager
def _attention(model: PreTrainedModel) -> Iterator[None]:
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _layout_mask)
    with _switched(model, "_attn_implementation", model.set_attn_implementation):
        yield


@contextlib.contextmanager
def _masks() -> Iterator[None]:
    """Refuse, by name, the mask pieces that a document layout cannot say."""
    refused = {
        "chunked_overlay": "chunked attention",
        "blockwise_overlay": "attention in both directions inside blocks of tokens",
        "sliding_window_bidirectional_overlay": "bidirectional sliding-window attention",
    }
    with contextlib.ExitStack() as stack:
        for name, what in refused.items():
            stack.enter_context(_replaced(masking_utils, name, _refuse(what)))
        yield


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOp(f"UnsupportedOp: {what} has no rule; masks are causal plus padding plus documents")

    return refuse


@contextlib.contextmanager
def _switched(model: PreTrainedModel, attribute: str, setter: Callable[[str], Any]) -> Iterator[None]:
    """A model's implementation switch set to ours, on every config it has, and back."""
    configs = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    before = {key: getattr(config, attribute, None) for key, config in configs.items()}
    setter(NAME)
    for key, config in configs.items():
        if before[key] is not None and getattr(config, attribute) != NAME:
            setattr(config, attribute, NAME)
    try:
        yield
    finally:
        for key, config in configs.items():
            if before[key] is not None or getattr(config, attribute, None) is not None:
                setattr(config, attribute, before[key])


# --- experts, router, loss -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _experts(model: PreTrainedModel) -> Iterator[None]:
    if not any(hasattr(module, "_apply_gate") for module in model.modules()):
        yield
        return
    ExpertsInterface.register(NAME, experts_forward)
    with _switched(model, "_experts_implementation", model.set_experts_implementation):
        yield


@contextlib.contextmanager
def _loss(model: PreTrainedModel) -> Iterator[None]:
    def causal_lm_loss(logits: Tensor, *_: Any, shift_labels: Tensor | None = None, **__: Any) -> Tensor:
        if shift_labels is not _INPUTS.targets:
            name = type(model).__name__
            raise UnsupportedOp(f"the loss of {name} is not the causal language model loss of shifted labels")
        loss, _lse = causal_lm_loss_op(logits, _INPUTS.targets, _INPUTS.denominator)
        if _INPUTS.token_logprobs:
            _INPUTS.logprobs, _INPUTS.entropy, _lse = token_logprobs(logits, _INPUTS.targets)
        return loss

    before = model.__dict__.get("_loss_function")
    model.loss_function = causal_lm_loss
    try:
        yield
    finally:
        if before is None:
            model.__dict__.pop("_loss_function", None)
        else:
            model.loss_function = before


def _router_loss(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None
) -> Tensor | int:
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    assert _INPUTS.valid is not None
    valid = _INPUTS.valid.reshape(-1)
    layers = [layer if layer.dim() == 2 else layer.reshape(-1, layer.shape[-1]) for layer in gate_logits]
    return router_loss(layers, valid, router_counts(layers, valid, top_k))


@contextlib.contextmanager
def _router(model: PreTrainedModel) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
        for name in sorted(names):
            if hasattr(sys.modules.get(name), "load_balancing_loss_func"):
                stack.enter_context(_replaced(sys.modules[name], "load_balancing_loss_func", _router_loss))
        yield


# --- blocks and recorders --------------------------------------------------------------------------------------------


def _install_recorders(model: PreTrainedModel) -> None:
    """transformers installs its output hooks on first use, behind a lock that cannot be traced: do it before."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            output_capturing.maybe_install_capturing_hooks(module)


@contextlib.contextmanager
def _blocks(model: nn.Module, region: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    classes = {type(block) for block in block_modules(model).values()}
    if not classes:
        name = type(model).__name__
        raise CaptureError(f"{name} has no GradientCheckpointingLayer, so its blocks cannot be told apart")
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(_replaced(cls, "forward", region(cls.forward)))
        for block in block_modules(model).values():
            stack.enter_context(_replaced(block, "gradient_checkpointing", False))
        yield


def _region(forward: Callable[..., Any]) -> Callable[..., Any]:
    nested: Callable[..., Any] = torch.compiler.nested_compile_region(forward, max_reuse_entries=_ANY_NUMBER)
    return nested


def _recording_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward as a nested region that returns what hooks recorded inside it, instead of leaking it out."""

    def inside(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]] | None]:
        collector = output_capturing._active_collector
        outer = collector.get()
        recorded: dict[str, list[Any]] | None = {key: [] for key in outer} if outer is not None else None
        collector.set(recorded)
        out = forward(self, *args, **kwargs)
        collector.set(outer)
        return out, recorded

    region = torch.compiler.nested_compile_region(inside, max_reuse_entries=_ANY_NUMBER)

    def block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out, recorded = region(self, *args, **kwargs)
        if recorded is not None:
            outer = output_capturing._active_collector.get()
            for key in recorded:
                outer[key].extend(recorded[key])
        return out

    return block


def refuse_parts(module: nn.Module, *_: Any) -> None:
    """A hook: calling a part of a compiled model would read shards as if they were whole."""
    raise TurboCompileError(
        f"{type(module).__name__} is part of a compiled model and its weights are sharded; call the whole model"
    )


@contextlib.contextmanager
def _unguarded(model: nn.Module) -> Iterator[None]:
    """Without the hooks that guard the parts of a compiled model: capture calls them."""
    taken = []
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is refuse_parts:
                taken.append((module, key))
                del module._forward_pre_hooks[key]
    try:
        yield
    finally:
        for module, key in taken:
            module._forward_pre_hooks[key] = refuse_parts


# --- weights ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_weights(model: nn.Module, dtypes: dict[str, torch.dtype], device: torch.device) -> Iterator[None]:
    """Every parameter, in its dtype of `dtypes`, and every buffer a fake on `device`: capture reads no weights."""
    mode = _torch.FakeTensorMode(shape_env=_torch.ShapeEnv())
    made: dict[int, Any] = {}
    restore: list[tuple[dict[str, Any], str, Any]] = []
    with mode:
        for holder, name, fqn in _weights(model):
            tensor = holder[name]
            if isinstance(tensor, _torch.FakeTensor):
                continue
            restore.append((holder, name, tensor))
            if id(tensor) not in made:
                fake = torch.empty(tensor.shape, dtype=dtypes.get(fqn, tensor.dtype), device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(fake, fake.is_floating_point()) if is_parameter else fake
            holder[name] = made[id(tensor)]
    try:
        yield
    finally:
        for holder, name, tensor in restore:
            holder[name] = tensor


def _weights(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where each parameter and buffer is held, its name there, and its FQN; a shared one as often as it is held."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for holder in holders:
            for name in [name for name, tensor in holder.items() if tensor is not None]:
                yield holder, name, f"{prefix}.{name}" if prefix else name


def compute_dtypes(model: PreTrainedModel, compute: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype each parameter has after `from_pretrained(dtype=compute)`; None keeps what the model has.

    Integer parameters keep their dtype, and so do the modules transformers lists to be kept in fp32.
    """
    if compute is None:
        return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    plan = model._get_dtype_plan(compute)
    kept = [(re.compile(_as_pattern(name)), dtype) for name, dtype in plan.items()]
    dtypes = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        special = [dtype for pattern, dtype in kept if pattern.search(name)]
        wanted = special[0] if special else compute
        dtypes[name] = wanted if parameter.is_floating_point() else parameter.dtype
    return dtypes


def _as_pattern(name: str) -> str:
    """transformers matches a kept module as a whole dotted component, or as a regular expression of its own."""
    return rf"(^|\.){name}($|\.)"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name = value`, and back, whether or not the attribute was the owner's own."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
