"""Capture: every block of every family is one call of a shared segment, at any depth; what cannot be is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.families import FAMILIES, WINDOW, build
from turbo_compile.capture import Signature, capture
from turbo_compile.errors import CaptureError, UnsupportedOp
from turbo_compile.huggingface import block_modules, compute_dtypes
from turbo_compile.ir.program import Program, source, split_groups

_ATTENTION = torch.ops.turbo_compile.attention.default
_ROUTED = {"output_router_logits": True}


def captured(model: Any, **signature: Any) -> Program:
    trainable = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    asked = {"loss": True, "logits": False, "training": True, "differentiable": True, "trainable": trainable}
    return capture(model, Signature(**(asked | signature)), compute_dtypes(model, None), torch.device("cpu"))


def check_blocks(model: Any, program: Program) -> None:
    """Each block instance is one call, its parameters are all that call's, and nobody else reads them."""
    calls: dict[str, set[str]] = {}
    for call in program.calls():
        names = {fqn for group in split_groups(call)[0] for fqn in source(group).names}
        assert call.meta["call"].fqn not in calls, "two calls of one block"
        calls[call.meta["call"].fqn] = names
    blocks = block_modules(model)
    assert program.blocks == tuple(blocks)
    read = [fqn for names in calls.values() for fqn in names]
    for fqn, block in blocks.items():
        own = {f"{fqn}.{name}" for name, _ in block.named_parameters()}
        assert calls[fqn] == own
        assert all(read.count(name) == 1 for name in own)
    owners = {name for name, _ in model.named_parameters()}
    assert set(read) == owners == set(program.parameters)
    order = [fqn for fqn in calls if fqn in blocks]
    assert order == list(blocks), "blocks are called in the model's order"


def check_sizes(program: Program) -> None:
    """B and S are free: nothing the model does depends on which sizes they are."""
    assert program.guards == ()
    assert program.batch_symbol.is_symbol and program.sequence_symbol.is_symbol
    assert program.batch_symbol != program.sequence_symbol


def windows(model: Any, program: Program) -> list[int | None]:
    """The window of each block's attention, in the order of the blocks."""
    names = [argument.name for argument in _ATTENTION._schema.arguments]
    found = {}
    for call in program.calls():
        graph = program.segments[str(call.target)].module.graph
        attentions = [dict(zip(names, node.args, strict=True)) for node in graph.nodes if node.target is _ATTENTION]
        assert all(arguments["causal"] is True for arguments in attentions)
        if call.meta["call"].fqn in program.blocks:
            (arguments,) = attentions
            found[call.meta["call"].fqn] = arguments["window"]
        else:
            assert not attentions
    return [found[fqn] for fqn in program.blocks]


def block_segments(program: Program) -> dict[str, str]:
    return {
        call.meta["call"].fqn: str(call.target) for call in program.calls() if call.meta["call"].fqn in program.blocks
    }


# Blocks of each family that compute something else: windowed and full attention, dense and sparse.
_KINDS = {"gemma3": 2, "gpt_oss": 2, "deepseek_v3": 2}


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_is_one_call(family: str, layers: int) -> None:
    model = build(family, layers)
    program = captured(model)
    check_blocks(model, program)
    check_sizes(program)
    kinds = _KINDS.get(family, 1) if layers > 1 else 1
    assert len(set(block_segments(program).values())) == kinds
    assert len(program.segments) == kinds + 2  # prologue and epilogue
    sliding = {"mistral": [WINDOW] * 4, "gemma3": [WINDOW, None] * 2, "gpt_oss": [WINDOW, None] * 2}
    assert windows(model, program) == sliding.get(family, [None] * 4)[:layers]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_more_layers_are_no_more_segments(family: str) -> None:
    deep = build(family, 7)
    program = captured(deep)
    check_blocks(deep, program)
    assert len(program.segments) == _KINDS.get(family, 1) + 2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_router_logits_leave_blocks_whole(family: str) -> None:
    """Hooks record the router's logits inside blocks: they come out as outputs of the call."""
    model = build(family, 4, **_ROUTED)
    program = captured(model, router=True)
    check_blocks(model, program)
    check_sizes(program)
    assert program.outputs == ("loss", "aux_loss")
    (counts,) = [n for n in program.graph.nodes if n.target is torch.ops.turbo_compile.router_counts.default]
    assert len(counts.args[0]) == 4, "the statistics read every layer"
    assert len(set(block_segments(program).values())) == _KINDS.get(family, 1)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [1]}, [1]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"mlp_only_layers": [0, 1, 2]}, [0, 1, 2]),
    ],
    ids=["a lone dense layer", "every other layer", "a lone sparse layer"],
)
def test_dense_layers_among_sparse_ones(changes: dict[str, Any], dense: list[int]) -> None:
    model = build("qwen3_moe", 4, **changes, **_ROUTED)
    program = captured(model, router=True)
    check_blocks(model, program)
    segments = list(block_segments(program).values())
    assert len(set(segments)) == 2
    assert {segments[i] for i in dense}.isdisjoint(segments[i] for i in range(4) if i not in dense)
    (counts,) = [n for n in program.graph.nodes if n.target is torch.ops.turbo_compile.router_counts.default]
    assert len(counts.args[0]) == 4 - len(dense)


def test_attributes_of_weights_stay_in_their_block() -> None:
    """`weight.T` is read where it stands, not traced as an input of the block."""
    model = build("llama", 3)
    for layer in model.model.layers:
        layer.mlp.down_proj = Transposed(layer.mlp.down_proj.weight)
    program = captured(model)
    check_blocks(model, program)
    assert len(program.segments) == 3


class Transposed(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.T.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.T) + self.weight.mT.shape[0]


def test_a_constant_of_each_layer() -> None:
    """12 layers that each scale by their number are 12 segments and still 12 calls."""
    model = build("gpt2", 12, scale_attn_by_inverse_layer_idx=True)
    program = captured(model)
    check_blocks(model, program)
    check_sizes(program)
    names = [argument.name for argument in _ATTENTION._schema.arguments]
    scales = []
    for fqn in program.blocks:
        graph = program.segments[block_segments(program)[fqn]].module.graph
        (node,) = [node for node in graph.nodes if node.target is _ATTENTION]
        scales.append(node.args[names.index("scale")])
    assert scales == pytest.approx([8**-0.5 / (i + 1) for i in range(12)])


def test_static_shapes_are_numbers() -> None:
    program = captured(build("llama", 1), shape=(2, 12))
    assert (int(program.batch_symbol), int(program.sequence_symbol)) == (2, 12)


def test_capture_leaves_the_model_as_it_was() -> None:
    model = build("qwen3_moe", 1, **_ROUTED).eval()
    loss = model.loss_function
    before = (model.config.to_dict(), model.config._attn_implementation, model.config._experts_implementation)
    forward = type(model.model.layers[0]).forward
    weight = model.lm_head.weight
    captured(model, router=True)
    assert before == (model.config.to_dict(), model.config._attn_implementation, model.config._experts_implementation)
    assert type(model.model.layers[0]).forward is forward
    assert model.lm_head.weight is weight and not model.training
    assert model.loss_function is loss


# --- what cannot be captured -----------------------------------------------------------------------------------------


class BranchingLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if hidden_states.sum() > 0:  # the line a reader is told
            hidden_states = hidden_states * 2
        return super().forward(hidden_states, *args, **kwargs)


def _branching() -> LlamaForCausalLM:
    model = build("llama", 2)
    model.model.layers[1] = BranchingLayer(model.config, 1)
    return model


def test_a_branch_on_data_is_named_by_its_line() -> None:
    with pytest.raises(CaptureError) as error:
        captured(_branching())
    lines, start = inspect.getsourcelines(BranchingLayer.forward)
    line = start + next(i for i, text in enumerate(lines) if "the line a reader is told" in text)
    assert re.search(rf"{re.escape(__file__)}:{line}\b", str(error.value)), str(error.value)
    assert "LlamaForCausalLM" in str(error.value)


def test_an_unregistered_tensor_is_named() -> None:
    model = build("llama", 1)
    model.model.norm.secret = torch.ones(32)
    norm = model.model.norm.forward
    model.model.norm.forward = lambda x: norm(x) * model.model.norm.secret
    with pytest.raises(CaptureError, match="register it as a buffer"):
        captured(model)


def test_a_model_without_blocks_is_refused() -> None:
    model = build("llama", 1)
    model.model.layers = nn.ModuleList()
    with pytest.raises(CaptureError, match="no GradientCheckpointingLayer"):
        captured(model)


@pytest.fixture
def chunked() -> Iterator[Any]:
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 2}
    layers = {"interleave_moe_layer_step": 9, "moe_layers": [], "attention_chunk_size": 8}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    yield Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads, **layers, **special)).train()


def test_chunked_attention_is_refused_by_name(chunked: Any) -> None:
    with pytest.raises((UnsupportedOp, CaptureError), match="chunked attention"):
        captured(chunked)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma3", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})],
    ids=["a mask function of the model", "a configuration that is not causal"],
)
def test_bidirectional_attention_is_refused_by_name(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises((UnsupportedOp, CaptureError), match="bidirectional attention"):
        captured(build(family, 1, **changes))


def test_a_call_without_labels_reads_none() -> None:
    """Sizes come from what every call has: GPT-2 looks one up wherever the tracer finds it."""
    program = captured(build("gpt2", 1), loss=False, logits=True)
    fields = {source(node).names[0] for node in program.graph.nodes if node.op == "placeholder"}
    assert not fields & {"targets", "denominator"}
