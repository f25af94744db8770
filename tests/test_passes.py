"""Each pass as a picture: the program it leaves, stored under snapshots/. The numbers are tested where programs run."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from tests.families import config_of
from tests.programs import chain, copied_program, copied_step
from turbo_compile.boundaries.sequence import MODEL_ENTRY
from turbo_compile.capture import Signature, capture
from turbo_compile.differentiate import differentiate
from turbo_compile.ir.program import Program, StepProgram
from turbo_compile.ir.runner import run
from turbo_compile.ir.text import show
from turbo_compile.passes.experts import ExpertParallel
from turbo_compile.passes.prefetch import Prefetch
from turbo_compile.passes.recompute import Recompute
from turbo_compile.passes.sequence import SequenceParallel
from turbo_compile.passes.shard import ShardParameters
from turbo_compile.passes.statistics import SumOverRanks

BLOCKS = ("model.layers.0", "model.layers.1")


def picture(program: Program | StepProgram) -> str:
    """The text, without how many bytes calls save: that is torch's partitioner's choice, and moves with its version."""
    return re.sub(r"saves [\d.]+ .*", "saves values", show(program))


def caught(config: PreTrainedConfig) -> Program:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    signature = Signature(loss=True, logits=False, training=True, differentiable=True, trainable=frozenset(names))
    return capture(model, signature, dict.fromkeys(names, torch.bfloat16), torch.device("cpu"))


@pytest.fixture(scope="session")
def captured() -> Program:
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return caught(config)


@pytest.fixture(scope="session")
def differentiated(captured) -> StepProgram:
    program = copied_program(captured)
    run([SumOverRanks()], program)
    return differentiate(program, ("loss",))


@pytest.fixture
def program(captured) -> Program:
    return copied_program(captured)


@pytest.fixture
def step(differentiated) -> StepProgram:
    return copied_step(differentiated)


def test_capture(program, snapshot):
    snapshot(picture(program))


def test_sum_over_ranks(program, snapshot):
    run([SumOverRanks()], program)
    snapshot(picture(program))


def test_sum_over_ranks_of_router_counts(snapshot):
    program = chain(routed=True)
    run([SumOverRanks()], program)
    snapshot(picture(program))


def test_sequence_parallel(program, snapshot):
    run([SequenceParallel(2, MODEL_ENTRY)], program)
    snapshot(picture(program))


def test_sequence_parallel_of_windows_and_whole_rows(snapshot):
    """Gemma 3: a block that sees a window of tokens, and one that sees all."""
    program = caught(
        config_of("gemma3", 2, sliding_window_pattern=2, layer_types=["sliding_attention", "full_attention"])
    )
    before = picture(program)
    run([SequenceParallel(4, MODEL_ENTRY)], program)
    snapshot(before + "\n" + picture(program))


def test_expert_parallel(snapshot):
    program = caught(config_of("qwen3_moe", 2))
    run([ExpertParallel(2, 1)], program)
    snapshot(picture(program))


def test_differentiate(step, snapshot):
    snapshot(picture(step))


def test_recompute(step, snapshot):
    run([Recompute(dict(zip(BLOCKS, ("selective", "full"), strict=True)))], step)
    snapshot(picture(step))


def test_shard_parameters(step, snapshot):
    run([ShardParameters(dict.fromkeys(BLOCKS, True))], step)
    snapshot(picture(step))


def test_shard_parameters_keeps_what_is_not_resharded(step, snapshot):
    run([ShardParameters({BLOCKS[0]: True, BLOCKS[1]: False})], step)
    snapshot(picture(step))


def test_shard_parameters_of_a_replicated_mesh_with_tied_and_frozen_weights(snapshot):
    step = differentiate(chain(tied=True, frozen={"model.norm.weight"}), ("loss",))
    run([ShardParameters(dict.fromkeys(BLOCKS, True), replicated=True)], step)
    snapshot(picture(step))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetch(step, snapshot, depth):
    run([ShardParameters(dict.fromkeys(BLOCKS, True))], step)
    before = show(step)
    run([Prefetch(depth)], step)
    after = show(step)
    snapshot(picture(step))
    assert sorted(after.splitlines()) == sorted(before.splitlines()), "only the order may change"
    assert (after == before) == (depth == 0)
