"""Simulated ranks: worlds of 8 and 16 equal eager, and chunks of a sequence in bf16 are as near to fp32 as eager is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.families import build
from tests.parity import Batch, packed, padded, plain, ragged, relative, run_eager
from tests.simulated import Simulation

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
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if "ep" in mesh else {}
    ranks = Simulation(build(family, 2, **sizes, **router), {"mesh": mesh})
    ranks.check_documents(batch) if "position_ids" in batch else ranks.check_step(batch)


def test_half_precision_is_as_near_as_eager() -> None:
    """Gradients in bf16 are at most 1.25 times as far from single precision as eager's: geometric mean, five seeds."""
    reference = build("qwen3")
    eager = type(reference)._from_config(reference.config, dtype=torch.bfloat16).train()
    ranks = Simulation(reference, {"mesh": {"fsdp": 2, "sp": 2}, "dtype": {"compute": "bf16"}})
    logs = []
    for seed in range(5):
        weights, batch = build("qwen3", seed=seed).state_dict(), plain(24 + seed)
        for model in (reference, eager):
            model.load_state_dict(weights)
            model.zero_grad()
            run_eager(model, batch).loss.backward()
        _, ours = ranks.step(batch)
        for (fqn, p), q in zip(reference.named_parameters(), eager.parameters(), strict=True):
            logs.append(math.log(relative(ours[fqn], p.grad) / relative(q.grad.float(), p.grad)))
    assert math.exp(sum(logs) / len(logs)) <= 1.25
