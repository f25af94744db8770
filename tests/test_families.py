"""Twelve families train like eager: loss and every gradient, one process and two, whatever the batch and the plan.

On two ranks each family runs once, some here and the others in test_sequence.py, where parameters are cut the same way;
every family under every mesh is `python bench/families.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.families import FAMILIES, MIXTURES, WITH_ROUTER_LOSS, build
from tests.parity import (
    check_documents,
    check_step,
    compiled,
    packed,
    padded,
    plain,
    ragged,
    relative,
    run_eager,
    whole,
)
from tests.world import World
from turbo_compile.runtime import runtime_of

# Whether head and embedding are one weight: each family both ways, once in one process and once in two.
_TIED_ALONE = ("llama", "qwen3", "gemma3", "olmo2", "qwen3_moe", "deepseek_v3")


def check_family(family: str, backend: str = "eager", plan: Any = "auto", **changes: Any) -> None:
    reference = build(family, **changes)
    model = compiled(reference, plan, backend)
    batches = [plain(16), ragged(23), padded("right", 18), padded("left", 19)]
    losses = [check_step(reference, model, batch) for batch in batches]
    if "output_router_logits" not in changes:  # that loss mixes the documents of a batch, as it should
        losses.append(check_documents(reference, model, packed(20)))
    assert len({round(loss, 4) for loss in losses}) == len(losses)
    assert len(runtime_of(model).executables) == 1, "one compile serves every batch"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process(family: str) -> None:
    check_family(family, tie_word_embeddings=family in _TIED_ALONE)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral", "gpt_oss"])
def test_two_ranks(world: World, family: str) -> None:
    # A share of the loss large enough to see.
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if family in WITH_ROUTER_LOSS else {}
    world.run(_two_ranks, family, family not in _TIED_ALONE, router)


def _two_ranks(family: str, tied: bool, changes: dict[str, Any]) -> None:
    check_family(family, tie_word_embeddings=tied, **changes)


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_double_precision(family: str) -> None:
    """To 1e-6, and no closer: eager casts the loss and its norms to single precision on the way."""
    reference = build(family, dtype=torch.float64)
    model = compiled(reference)
    if family in MIXTURES:
        reference.set_experts_implementation("batched_mm")  # grouped_mm has no double precision
    for batch in (plain(16), padded("right", 19)):
        check_step(reference, model, batch, tolerance=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_half_precision_is_as_near_as_eager(family: str) -> None:
    """Gradients in bf16 are at most 1.25 times as far from single precision as eager's: geometric mean, five seeds."""
    reference = build(family)
    eager = type(reference)._from_config(reference.config, dtype=torch.bfloat16).train()
    model = compiled(reference, {"dtype": {"compute": "bf16", "reduce": "fp32", "master": "fp32"}})
    logs = []
    for seed in range(5):
        weights = build(family, seed=seed).state_dict()
        batch = plain(24 + seed)
        for other in (reference, eager, model):
            other.load_state_dict(weights)
            other.zero_grad()
            (other(**batch) if other is model else run_eager(other, batch)).loss.backward()
        ours = {fqn: whole(p.grad) for fqn, p in model.named_parameters()}
        theirs = {fqn: p.grad.float() for fqn, p in eager.named_parameters()}
        for fqn, p in reference.named_parameters():
            assert ours[fqn].dtype == torch.float32
            logs.append(math.log(relative(ours[fqn], p.grad) / relative(theirs[fqn], p.grad)))
    assert math.exp(sum(logs) / len(logs)) <= 1.25


# --- plans -----------------------------------------------------------------------------------------------------------

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "recompute all, keep weights, no prefetch": (
        "llama",
        {"mesh": {"fsdp": 2}, "recompute": "full", "schedule": {"reshard": False, "prefetch": 0}},
    ),
    "recompute some, prefetch far, small weights whole": (
        "qwen3_moe",
        {"mesh": {"fsdp": 2}, "recompute": "selective", "schedule": {"prefetch": 2}, "replicate_below": 1000},
    ),
    "each block its own way": (
        "gpt_oss",
        {
            "mesh": {"fsdp": 2},
            "recompute": {"model.layers.0": "none", "model.layers.1-2": "full", "model.layers.3": "selective"},
            "schedule": {"reshard": {"model.layers.0-1": True, "model.layers.2-3": False}},
        },
    ),
    "a whole module replicated": (
        "gemma3",
        {
            "mesh": {"fsdp": 2},
            "parameters": {
                "model.layers.*.self_attn": {"placement": "Replicate"},
                "model.embed_tokens": {"placement": "Replicate"},
            },
        },
    ),
    "replicas": ("mixtral", {"mesh": {"dp": 2}, "recompute": "full"}),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans(world: World, case: str) -> None:
    family, plan = PLANS[case]
    world.run(_planned, family, plan)


def _planned(family: str, plan: dict[str, Any]) -> None:
    layers = 4 if isinstance(plan.get("recompute"), dict) else 2
    reference = build(family, layers)
    model = compiled(reference, plan)
    for batch in (plain(16), padded("left", 19)):
        check_step(reference, model, batch)


def test_replicas_of_shards(four: World) -> None:
    """dp = 2 around fsdp = 2: parameters are cut in two and every half is held twice."""
    four.run(_replicas_of_shards)


def _replicas_of_shards() -> None:
    reference = build("llama", 1, tie_word_embeddings=True)
    model = compiled(reference, {"mesh": {"dp": 2, "fsdp": 2}})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    for batch in (plain(16), ragged(17)):
        check_step(reference, model, batch)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert model.clip_grad_norm_(0.5).item() == pytest.approx(norm.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    for fqn, p in model.named_parameters():
        torch.testing.assert_close(whole(p.detach()), reference.get_parameter(fqn).detach(), rtol=0, atol=1e-4)


def test_static_shapes_are_compiled_one_by_one() -> None:
    reference = build("qwen3", 1)
    model = compiled(reference, {"batch": {"shapes": "static"}})
    for batch in (plain(16), ragged(16), plain(9)):
        check_step(reference, model, batch)
    assert {signature.shape for signature, _ in runtime_of(model).executables} == {(4, 16), (4, 9)}


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3_moe", "gpt_oss"])
def test_evaluation_gives_eagers_logits(family: str) -> None:
    reference = build(family).eval()
    model = compiled(reference)
    with torch.no_grad():
        for batch in (plain(16), padded("left", 19)):
            ours, expected = model(**batch), run_eager(reference, batch)
            real = batch.get("attention_mask", torch.ones(1)).bool().expand(batch["input_ids"].shape)
            torch.testing.assert_close(ours.logits[real], expected.logits[real], rtol=0, atol=1e-4)
            assert ours.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)


# --- Inductor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"tie_word_embeddings": True}), ("gpt_oss", {"output_router_logits": True})],
)
def test_inductor(family: str, changes: dict[str, Any]) -> None:
    check_family(family, "inductor", **changes)
