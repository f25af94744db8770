"""Fused experts: numbers as eager's, in every layout, alone and over ranks; what fires, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.families import build
from tests.parity import check_step, compiled, plain, ragged
from tests.simulated import Simulation
from turbo_compile import passes
from turbo_compile.boundaries.experts import combine, dispatch
from turbo_compile.kernels.gate import Gate
from turbo_compile.kernels.grouped_experts import (
    gated_mm,
    gated_mm_combine,
    gathered_mm,
    grouped_experts,
    route,
)
from turbo_compile.kernels.grouped_mm import grouped_mm
from turbo_compile.passes.grouped_experts import FuseGroupedExperts

_FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
GATES = (
    Gate(),
    Gate("silu", True, True, 1.702, 0.7, 1.0),
    Gate("gelu_tanh", gated=False),
    Gate("gelu", limit=0.5),
    Gate("relu2", gated=False, limit=0.9),
    Gate("relu", interleaved=True),
)


def _plainly(gate: Gate, pre: Tensor) -> Tensor:
    """The activation as a model spells it."""
    if not gate.gated:
        x, y = pre, None
    elif gate.interleaved:
        x, y = pre[:, ::2], pre[:, 1::2]
    else:
        x, y = pre.chunk(2, dim=1)
    if gate.limit is not None:
        x, y = x.clamp(max=gate.limit), y if y is None else y.clamp(-gate.limit, gate.limit)
    act = _FUNCTIONS[gate.activation](x) if gate.alpha == 1.0 else x * torch.sigmoid(gate.alpha * x)
    return act if y is None else act * (y + gate.shift)


def _operands(gate: Gate, turned: bool, biased: bool, T: int = 11) -> tuple[Tensor, tuple[Any, ...]]:
    torch.manual_seed(0)
    E, K, H, inner = 5, 2, 6, 4

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    width = inner * (1 + gate.gated)
    up, down = (leaf(E, o, i).mT if turned else leaf(E, i, o) for i, o in ((H, width), (inner, H)))
    biases = (leaf(E, width), leaf(E, H)) if biased else (None, None)
    index = torch.randint(0, E - 1, (T, K))  # the last expert gets nothing
    return index, (leaf(T, H), leaf(T, K), up, down, *biases)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.activation)
@pytest.mark.parametrize(("turned", "biased"), [(True, False), (False, True)])
def test_the_whole_is_what_its_parts_give(gate: Gate, turned: bool, biased: bool) -> None:
    index, (hidden, weights, up, down, up_bias, down_bias) = _operands(gate, turned, biased)
    fused = grouped_experts(hidden, index, weights, up, down, up_bias, down_bias, gate)
    rows, order, ends = dispatch(hidden, index, up.shape[0])
    rows = grouped_mm(_plainly(gate, grouped_mm(rows, up, ends, up_bias)), down, ends, down_bias)
    parts = combine(rows, order, weights)
    torch.testing.assert_close(fused, parts, rtol=1e-12, atol=1e-12)
    leaves = [each for each in (hidden, weights, up, down, up_bias, down_bias) if each is not None]
    tangent = torch.randn_like(fused)
    ours, theirs = (torch.autograd.grad(out, leaves, tangent) for out in (fused, parts))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_what_needs_no_gradient_gets_none() -> None:
    index, (hidden, weights, up, down, *_) = _operands(Gate(), False, False)
    up, down = up.detach(), down.detach()
    grouped_experts(hidden, index, weights, up, down).sum().backward()
    assert hidden.grad is not None and weights.grad is not None and up.grad is None and down.grad is None


def test_no_token_at_all() -> None:
    index, leaves = _operands(Gate(), True, True, T=0)
    hidden, weights, up, down, up_bias, down_bias = leaves
    out = grouped_experts(hidden, index, weights, up, down, up_bias, down_bias)
    for gradient in torch.autograd.grad(out, leaves, torch.zeros_like(out)):
        assert not gradient.count_nonzero()


@pytest.mark.parametrize("turned", [True, False])
def test_ops_say_what_they_do(turned: bool) -> None:
    """Schemas, fakes with true strides, and backwards: under symbolic sizes as in eager."""
    index, (hidden, weights, up, down, up_bias, down_bias) = _operands(Gate(), turned, True)
    order, ends = route(index, up.shape[0])
    pre = gathered_mm(hidden, order, ends, up, up_bias, 2)
    gate = GATES[0].spelled()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in (
        (gathered_mm, (hidden, order, ends, up, up_bias, 2)),
        (gated_mm, (pre.detach(), down, ends, down_bias, *gate)),
        (gated_mm_combine, (pre.detach(), down, down_bias, order, ends, weights, *gate)),
    ):
        torch.library.opcheck(op._opoverload, arguments, test_utils=tests)


# --- in a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def must_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "FuseGroupedExperts", lambda *_: FuseGroupedExperts(listed=True))


@pytest.mark.usefixtures("must_fire")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_parity(family: str) -> None:
    reference = build(family)
    model = compiled(reference)
    for batch in (plain(16), ragged(19)):
        check_step(reference, model, batch)


@pytest.mark.usefixtures("must_fire")
def test_where_rows_travel_to_other_ranks() -> None:
    Simulation(build("gpt_oss"), {"mesh": {"fsdp": 2, "ep": 2}, "recompute": "selective"}).check_step(plain(16))
