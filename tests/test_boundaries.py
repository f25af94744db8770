"""The loss, router and experts boundaries against plain autograd and transformers' own functions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, load_balancing_loss_func

from turbo_compile.boundaries import experts, loss, router
from turbo_compile.boundaries.experts import combine, dispatch, experts_forward
from turbo_compile.boundaries.loss import causal_lm_loss
from turbo_compile.boundaries.router import router_counts, router_loss
from turbo_compile.errors import InvalidProgram, TurboCompileError, UnsupportedOp
from turbo_compile.kernels import cross_entropy
from turbo_compile.kernels import rows as row_kernels
from turbo_compile.kernels.grouped_mm import grouped_mm

OPS = torch.ops.turbo_compile
FP64 = {"rtol": 1e-10, "atol": 1e-13}
FP32 = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' casts to fp32 leave fp64 alone, so that its functions serve as fp64 references."""
    to_float = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))


def with_grad(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


# --- loss ------------------------------------------------------------------------------------------------------------


def token_batch(dtype: torch.dtype, vocabulary: int = 53) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(3, 7, vocabulary, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocabulary, (3, 7))
    targets[0, 3:6] = targets[1, :] = targets[2, -1] = -100
    return logits, targets


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_is_transformers(
    dtype: torch.dtype, items: int | None, chunk_rows: int, lifted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = token_batch(dtype)
    wide = 8 if dtype == torch.float64 else 4
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_BYTES_PER_THREAD", chunk_rows * logits.shape[-1] * wide)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ours, reference = with_grad(logits, logits)
    count = None if items is None else torch.tensor(items)
    expected = ForCausalLMLoss(reference, None, logits.shape[-1], num_items_in_batch=count, shift_labels=targets)
    actual = causal_lm_loss(ours, targets, torch.tensor(float(items or (targets != -100).sum())))
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (2.5 * actual).backward()
    (2.5 * expected).backward()
    tolerance = FP64 if dtype == torch.float64 else FP32
    torch.testing.assert_close(actual, expected, **tolerance)
    # Both round the same fp32 gradient to bf16 once: one unit in the last place is all they may differ by.
    tolerance = {"rtol": 2**-7, "atol": 1e-7} if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(ours.grad, reference.grad, **tolerance)
    assert torch.equal(ours.grad[targets == -100], torch.zeros_like(ours.grad[targets == -100]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ignored_tokens_give_exactly_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = token_batch(dtype)
    logits[targets == -100] = float("nan")
    (logits,) = with_grad(logits)
    causal_lm_loss(logits, targets, torch.tensor(9.0)).backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[targets != -100].abs().sum() > 0

    logits.grad = None
    nothing = causal_lm_loss(logits, torch.full_like(targets, -100), torch.tensor(1.0))
    nothing.backward()
    assert nothing.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("label", [53, 10_000, -1, -101])
def test_label_outside_the_vocabulary(label: int) -> None:
    logits, targets = token_batch(torch.float32)
    targets[2, 1] = label
    with pytest.raises(TurboCompileError, match=f"label {label} at flat position 15 .* vocabulary of 53"):
        causal_lm_loss(logits, targets, torch.tensor(1.0))


class Allocations(TorchDispatchMode):
    """The largest new tensor of each dtype, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and "out" not in (kwargs or {}):
            self.largest[out.dtype] = max(self.largest.get(out.dtype, 0), out.numel())
        return out


def test_loss_makes_no_full_size_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_BYTES_PER_THREAD", 2 * 4 * 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    logits, targets = torch.randn(64, 1000).bfloat16(), torch.randint(0, 1000, (64,))
    with Allocations() as forward:
        _, lse = cross_entropy.cross_entropy(logits, targets)
    with Allocations() as backward:
        cross_entropy.cross_entropy_backward(torch.tensor(1.0), logits, targets, lse)
    assert forward.largest[torch.float32] == backward.largest[torch.float32] == 2 * 1000
    assert torch.bfloat16 not in forward.largest or forward.largest[torch.bfloat16] <= 2 * 1000
    assert backward.largest[torch.bfloat16] == logits.numel()


# --- router ----------------------------------------------------------------------------------------------------------


def router_batch(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    layers = [torch.randn(2 * 9, 6, dtype=torch.float64).to(dtype) for _ in range(3)]
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 5:] = mask[1, :2] = 0
    return layers, mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_router_loss_is_transformers(dtype: torch.dtype, ranks: int, masked: bool, lifted: None) -> None:
    layers, mask = router_batch(dtype)
    valid = mask.bool().flatten() if masked else torch.ones(18, dtype=torch.bool)
    reference, ours = with_grad(*layers), with_grad(*layers)
    expected = load_balancing_loss_func(tuple(reference), 6, 2, mask if masked else None)
    expected.backward()

    shares = [([layer.chunk(ranks)[r] for layer in ours], valid.chunk(ranks)[r]) for r in range(ranks)]
    counts = sum(router_counts(logits, own, 2) for logits, own in shares)
    assert not counts.requires_grad
    assert counts[-1] == 3 * valid.sum() and counts[:-1].sum() == 2 * counts[-1]
    values = [router_loss(logits, own, counts) for logits, own in shares]
    assert all(value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) for value in values)
    sum(values).backward()

    # In bf16 transformers rounds the probabilities before it sums them, and the gradient before the softmax.
    tolerance = {torch.float64: FP64, torch.float32: FP32, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-4}}[dtype]
    torch.testing.assert_close(sum(values), expected, **tolerance)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)


def test_router_loss_without_tokens_is_zero() -> None:
    layers, mask = router_batch(torch.float32)
    layers = with_grad(*layers)
    valid = torch.zeros(mask.numel(), dtype=torch.bool)
    value = router_loss(layers, valid, router_counts(layers, valid, 2))
    value.backward()
    assert value.item() == 0.0
    assert all(torch.equal(layer.grad, torch.zeros_like(layer)) for layer in layers)


# --- experts ---------------------------------------------------------------------------------------------------------


class ScaledNorm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight)


def qwen3_moe() -> torch.nn.Module:
    return Qwen3MoeExperts(Qwen3MoeConfig(num_experts=6, hidden_size=16, moe_intermediate_size=12))


def gpt_oss() -> torch.nn.Module:
    return GptOssExperts(GptOssConfig(num_local_experts=6, hidden_size=16, intermediate_size=12))


def nemotron_h() -> torch.nn.Module:
    return NemotronHExperts(NemotronHConfig(n_routed_experts=6, hidden_size=16, moe_intermediate_size=12))


def normed() -> torch.nn.Module:
    module = qwen3_moe()
    module.has_post_expert_norm, module.post_expert_norm = True, ScaledNorm(16)
    return module


def initialised(build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    module = build()
    module.config._experts_implementation = "eager"
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module.to(dtype)


def routed(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices and weights; the last expert is never chosen."""
    hidden = torch.randn(tokens, 16, dtype=torch.float64).to(dtype)
    weights, index = torch.randn(tokens, experts - 1, dtype=torch.float64).softmax(-1).topk(top_k)
    return hidden, index, weights.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("build", [qwen3_moe, gpt_oss, nemotron_h, normed])
@pytest.mark.parametrize("tokens", [1, 37])
def test_experts_are_transformers(build: Callable[[], torch.nn.Module], tokens: int, dtype: torch.dtype) -> None:
    module = initialised(build, dtype)
    theirs = copy.deepcopy(module)
    hidden, index, weights = routed(tokens, 3, 6, dtype)
    (x, w), (x_ref, w_ref) = with_grad(hidden, weights), with_grad(hidden, weights)
    actual = experts_forward(module, x, index, w)
    # The class's own forward does not apply the norm that `normed` adds, so that one is held against the batched form.
    reference = batched_mm_experts_forward if build is normed else type(module).forward
    expected = reference(theirs, x_ref, index, w_ref)
    tangent = torch.randn_like(expected)
    actual.backward(tangent)
    expected.backward(tangent)

    tolerance = FP64 if dtype == torch.float64 else {"rtol": 1e-6, "atol": 0.0}
    assert_near(actual, expected, **tolerance)
    assert_near(x.grad, x_ref.grad, **tolerance)
    assert_near(w.grad, w_ref.grad, **tolerance)
    for (name, mine), other in zip(module.named_parameters(), theirs.parameters(), strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        assert_near(mine.grad, wanted, **tolerance, name=name)
        assert mine.grad.is_contiguous(), name


@pytest.mark.parametrize("build", [qwen3_moe, gpt_oss])
def test_no_token_at_all(build: Callable[[], torch.nn.Module]) -> None:
    module = initialised(build, torch.float32)
    hidden, index, weights = routed(0, 3, 6, torch.float32)
    inputs = with_grad(hidden, weights)
    out = experts_forward(module, inputs[0], index, inputs[1])
    out.sum().backward()
    assert out.shape == (0, 16)
    for x in (*inputs, *module.parameters()):
        assert torch.equal(x.grad, torch.zeros_like(x))


def assert_near(actual: Tensor, expected: Tensor, *, rtol: float, atol: float, name: str = "") -> None:
    """Equal in the norm of the whole tensor, as the project's numbers are stated."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual - expected).norm() if actual.numel() else torch.zeros(())
    assert error <= atol + rtol * expected.norm(), f"{name}: {error} of {expected.norm()}"


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_experts_in_bf16_are_at_least_as_near_to_fp32(weight_dtype: torch.dtype) -> None:
    module = initialised(qwen3_moe, torch.bfloat16)
    exact = copy.deepcopy(module).float()
    hidden, index, weights = routed(300, 4, 6, torch.bfloat16)
    weights = weights.to(weight_dtype)
    expected = exact(hidden.float(), index, weights.float())
    actual, eager = experts_forward(module, hidden, index, weights), module(hidden, index, weights)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).norm() <= 1.02 * (eager - expected).norm()


def test_a_module_sharded_by_transformers_is_refused() -> None:
    module = initialised(qwen3_moe, torch.float32)
    module._is_expert_parallel = True
    with pytest.raises(UnsupportedOp, match="already sharded"):
        experts_forward(module, *routed(3, 2, 6, torch.float32))


def test_dispatch_sorts_by_expert_then_token() -> None:
    index = torch.tensor([[2, 0], [0, 3], [2, 3]])
    rows, order, offsets = dispatch(torch.tensor([[10.0], [11.0], [12.0]]), index, 5)
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert rows.flatten().tolist() == [10, 11, 10, 12, 11, 12]
    assert offsets.tolist() == [2, 2, 4, 6, 6] and offsets.dtype == torch.int32


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_dispatch_and_combine_differentiate(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernels, "CPU_CHUNK_BYTES_PER_THREAD", chunk_bytes)
    hidden, index, weights = routed(5, 2, 6, torch.float64)
    hidden, weights = with_grad(hidden[:, :3], weights)
    rows, order, offsets = dispatch(hidden, index, 6)
    assert not order.requires_grad and not offsets.requires_grad
    (rows,) = with_grad(rows)
    assert torch.autograd.gradcheck(lambda x: dispatch(x, index, 6)[0], (hidden,))
    assert torch.autograd.gradcheck(lambda x, w: combine(x, order, w), (rows, weights))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_mm_differentiates(transposed: bool, with_bias: bool) -> None:
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    stored = torch.randn(3, 4, 5, dtype=torch.float64)
    x, w, bias = with_grad(torch.randn(7, 4, dtype=torch.float64), stored.mT if transposed else stored, stored[:, 0])
    x = torch.randn(7, 5 if transposed else 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 4 if transposed else 5, dtype=torch.float64, requires_grad=True)
    if with_bias:
        assert torch.autograd.gradcheck(lambda x, w, b: grouped_mm(x, w, offsets, b), (x, w, bias))
    else:
        assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, offsets, None), (x, w))


def test_grouped_mm_wants_a_group_for_every_row() -> None:
    with pytest.raises(InvalidProgram, match="end at row 3 of 4"):
        grouped_mm(torch.randn(4, 2), torch.randn(2, 2, 2), torch.tensor([1, 3], dtype=torch.int32), None)


# --- as ops ----------------------------------------------------------------------------------------------------------


def samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in (torch.float32, torch.float64):
        logits, targets = token_batch(dtype)
        (logits,) = with_grad(logits)
        denominator = torch.tensor(9.0)
        yield "causal_lm_loss", (logits, targets, denominator)
        lse = OPS.causal_lm_loss(logits, targets, denominator)[1].detach()
        yield "causal_lm_loss_backward", (torch.ones((), dtype=dtype), logits.detach(), targets, lse, denominator)

        layers, mask = router_batch(dtype)
        layers, valid = with_grad(*layers), mask.bool().flatten()
        counts = router_counts(layers, valid, 2)
        yield "router_counts", (layers, valid, 2)
        yield "router_loss", (layers, valid, counts)
        detached = [layer.detach() for layer in layers]
        yield "router_loss_backward", (torch.ones((), dtype=dtype), detached, valid, counts)

        hidden, index, weights = routed(5, 2, 4, dtype)
        rows, order, offsets = dispatch(hidden, index, 4)
        yield "dispatch", (*with_grad(hidden), index, 4)
        yield "dispatch_backward", (rows, order, 2)
        yield "combine", (*with_grad(rows), order, *with_grad(weights))
        yield "combine_backward", (hidden, rows, order, weights.float())
        stored = torch.randn(4, 8, 16, dtype=dtype)
        w, bias = with_grad(stored, stored[:, :, 0])
        yield "grouped_mm", (*with_grad(rows), w.transpose(1, 2), offsets, bias)
        yield "grouped_mm", (*with_grad(rows), stored.transpose(1, 2).contiguous().requires_grad_(), offsets, None)
        yield "grouped_outer", (rows, rows[:, :3], offsets)
        yield "grouped_sum", (rows, offsets)


@pytest.mark.parametrize(("name", "arguments"), list(samples()))
def test_opcheck(name: str, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(OPS, name).default, arguments)


@contextlib.contextmanager
def recorded() -> Iterator[tuple[Any, list[torch.fx.GraphModule]]]:
    """A backend that runs AOTAutograd's graphs as they are, and the graphs it was given."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    yield aot_autograd(fw_compiler=keep, bw_compiler=keep), graphs
    torch._dynamo.reset()


def op_counts(graph: torch.fx.GraphModule) -> dict[str, int]:
    names = [node.target.name() for node in graph.graph.nodes if hasattr(node.target, "namespace")]
    ours = [name.removeprefix("turbo_compile::") for name in names if name.startswith("turbo_compile::")]
    return {name: ours.count(name) for name in ours}


def test_one_trace_serves_every_size() -> None:
    """A small model with all three boundaries: each op is one node, forward and backward, with symbolic sizes."""
    module = initialised(gpt_oss, torch.float64)
    gate, head = torch.randn(6, 16, dtype=torch.float64), torch.randn(16, 29, dtype=torch.float64)
    parameters = [*module.parameters(), *with_grad(gate, head)]
    gate, head = parameters[-2:]

    def step(hidden: Tensor, targets: Tensor, valid: Tensor, denominator: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        scores = flat @ gate.T
        weights, index = scores.topk(2, dim=-1)
        out = experts_forward(module, flat, index, weights.softmax(-1)).view(hidden.shape)
        routing = router_loss([scores], valid, router_counts([scores], valid, 2))
        return causal_lm_loss((hidden + out) @ head, targets, denominator) + 0.1 * routing

    with recorded() as (backend, graphs):
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
        for batch, length in ((2, 7), (3, 11), (5, 4)):
            (hidden,) = with_grad(torch.randn(batch, length, 16, dtype=torch.float64))
            targets = torch.randint(0, 29, (batch, length))
            arguments = (hidden, targets, torch.ones(batch * length, dtype=torch.bool), torch.tensor(9.0))
            expected, actual = step(*arguments), compiled(*arguments)
            torch.testing.assert_close(actual, expected, **FP64)
            wanted = torch.autograd.grad(expected, [hidden, *parameters])
            found = torch.autograd.grad(actual, [hidden, *parameters])
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, **FP64)
    forward, backward = graphs
    assert op_counts(forward) == {
        "dispatch": 1, "grouped_mm": 2, "combine": 1, "router_counts": 1, "router_loss": 1, "causal_lm_loss": 1
    }  # fmt: skip
    assert op_counts(backward) == {
        "causal_lm_loss_backward": 1, "router_loss_backward": 1, "combine_backward": 1, "grouped_mm": 2,
        "grouped_outer": 2, "grouped_sum": 2, "dispatch_backward": 1,
    }  # fmt: skip
    sizes = [node.meta["val"][0].shape[0] for node in forward.graph.nodes if "dispatch" in node.name]
    assert len(sizes) == 1 and isinstance(sizes[0], torch.SymInt)


def test_flops_and_placements_cover_the_ops() -> None:
    assert loss.causal_lm_loss_flops(2, 3) == 24
    assert experts.combine_flops(2, 3, 4) == 48
    declared = {**loss.PLACEMENTS, **router.PLACEMENTS, **experts.PLACEMENTS}
    for op, placement in declared.items():
        assert len(placement.outputs) == len(op._schema.returns), op
        tensors = [argument for argument in op._schema.arguments if "Tensor" in str(argument.type)]
        assert len(placement.inputs) == len(tensors), op
