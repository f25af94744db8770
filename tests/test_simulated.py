"""Worlds of 8 and 16 ranks, simulated: loss and every gradient equal eager's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families import build
from tests.parity import Batch, packed, padded, ragged, relative, run_eager
from tests.simulated import simulate
from turbo_compile.plans.plan import Plan

CASES = [
    ("qwen3", {"sp": 8}, {"num_attention_heads": 8, "num_key_value_heads": 2}, ragged(19)),
    ("gemma3", {"fsdp": 2, "sp": 8}, {"num_attention_heads": 8, "num_key_value_heads": 4}, packed(22)),
    ("gpt_oss", {"fsdp": 4, "sp": 4, "ep": 8}, {"num_local_experts": 16}, padded("right", 18)),
    ("qwen3_moe", {"dp": 2, "fsdp": 2, "sp": 4, "ep": 4}, {"num_experts": 8}, ragged(17)),
]


@pytest.mark.parametrize(
    ("family", "mesh", "sizes", "batch"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_many_ranks(family: str, mesh: dict[str, int], sizes: dict[str, Any], batch: Batch) -> None:
    plan = Plan.of({"mesh": mesh})
    model = build(family, 2, **sizes)
    expected = run_eager(model, batch)
    expected.loss.backward()
    losses, gradients = simulate(model, plan, batch)
    assert max(abs(loss - expected.loss.item()) for loss in losses) < 1e-5 * expected.loss.item()
    errors = {fqn: relative(gradients[fqn], p.grad) for fqn, p in model.named_parameters() if p.grad is not None}
    assert max(errors.values()) < 1e-5, errors
