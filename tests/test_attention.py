"""The attention op against its definition, written out densely in float64: values, gradients, memory, tracing."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from turbo_compile.boundaries.attention import FLOPS, PLACEMENT, attention, attention_backward
from turbo_compile.errors import UnsupportedOp
from turbo_compile.kernels import attention_cpu, attention_cuda, attention_layout
from turbo_compile.kernels.attention_layout import Options
from turbo_compile.kernels.counter_random import dropout, fork, uniform


@dataclass(frozen=True)
class Case:
    """One call: sizes, layout and rule."""

    layout: tuple[tuple[int, ...], ...]
    G: int = 2
    R: int = 2
    D: int = 8
    V: int = 8
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: bool = False

    def inputs(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
        """q, k, v (views of [B,S,heads,width]), the sinks if any; the layout; the gradient of the output."""
        B, S = len(self.layout), len(self.layout[0])
        generator = torch.Generator().manual_seed(S)
        widths = (self.G * self.R, self.D), (self.G, self.D), (self.G, self.V)
        qkv = [
            torch.randn(B, S, *w, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for w in widths
        ]
        sinks = [torch.randn(self.G * self.R, generator=generator, dtype=torch.float64).to(dtype)] if self.sinks else []
        grad_out = torch.randn(B, S, self.G * self.R, self.V, generator=generator, dtype=torch.float64).to(dtype)
        leaves = [x.requires_grad_() for x in (*qkv, *sinks)]
        return leaves, torch.tensor(self.layout, dtype=torch.int32), grad_out

    @property
    def options(self) -> tuple[float, bool, int | None, float | None, float]:
        return self.D**-0.5 * 1.5, self.causal, self.window, self.softcap, self.dropout


SEED = torch.tensor(20240613)


def run(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and the sinks, by the op."""
    leaves, layout, grad_out = case.inputs(dtype)
    out, lse = attention(*leaves[:3], layout, leaves[3] if case.sinks else None, SEED, *case.options)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad_out)]


def reference(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The same in float64 from the definition, on the values `dtype` holds."""
    leaves, layout, grad_out = case.inputs(dtype)
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    scale, causal, window, softcap, p = case.options
    q, k, v = leaves[0], *(x.repeat_interleave(case.R, 1) for x in leaves[1:3])
    logits = scale * (q @ k.mT)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen(layout, causal, window).unsqueeze(1), -math.inf)
    entries = torch.logsumexp(logits, -1)
    if case.sinks:
        entries = torch.logaddexp(entries, leaves[3].view(1, -1, 1))
    weights = torch.exp(logits - entries.masked_fill(entries == -math.inf, 0.0).unsqueeze(-1))
    if p:
        index = torch.arange(weights.numel()).view(weights.shape)
        weights = weights * (uniform(SEED, index) >= p) / (1 - p)
    out = (weights @ v).transpose(1, 2)
    return [out.detach(), entries.detach(), *torch.autograd.grad(out, leaves, grad_out.double())]


def seen(layout: Tensor, causal: bool, window: int | None) -> Tensor:
    """[B,S,S]: does query s see key t?"""
    S = layout.shape[1]
    is_key = (layout >= 0).unsqueeze(1)
    start = torch.where(layout < 0, -1 - layout, layout)
    s, t = torch.arange(S).unsqueeze(1), torch.arange(S)
    answer = (start.unsqueeze(2) <= t) & (t <= s) if causal else start.unsqueeze(2) == start.unsqueeze(1)
    return is_key & answer & ((s - t).abs() < (S if window is None else window))


def distance(got: Tensor, want: Tensor) -> float:
    """Norm-wise relative error; infinities must agree and count nothing.

    Inputs are of size 1, and true gradients can be 0 (a query with one key): below 1 an element, it is absolute.
    """
    assert got.shape == want.shape
    infinite = want == -math.inf
    assert torch.equal(got == -math.inf, infinite)
    got, want = got.double().masked_fill(infinite, 0.0), want.masked_fill(infinite, 0.0)
    return ((got - want).norm() / want.norm().clamp_min(math.sqrt(want.numel()))).item()


def assert_agrees(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    names = "out", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks"
    errors = {n: distance(a, b) for n, a, b in zip(names, run(case, dtype), reference(case, dtype), strict=False)}
    assert all(error < tolerance for error in errors.values()), f"{case}: {errors}"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Rows of equal length: plain, packed, padded left, right, anywhere; pads may look back beyond their document."""
    S = draw(st.integers(1, 40))
    return tuple(draw(rows(S)) for _ in range(draw(st.integers(1, 3))))


@st.composite
def rows(draw: st.DrawFn, S: int) -> tuple[int, ...]:
    kind = draw(st.sampled_from(["plain", "packed", "left", "right", "holes", "look back"]))
    if kind == "plain":
        return (0,) * S
    if kind == "left":
        pads = draw(st.integers(0, S))
        return (*(-1 - s for s in range(pads)), *[pads] * (S - pads))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, max(S - 1, 1)), max_size=4)))]
    row = [max(c for c in cuts if c <= s) for s in range(S)]
    if kind == "right":
        pads = draw(st.integers(0, S))
        row[S - pads :] = [-1 - start for start in row[S - pads :]]
    if kind in ("holes", "look back"):
        for s in draw(st.sets(st.integers(0, S - 1), max_size=6)):
            row[s] = -1 - (row[s] if kind == "holes" else draw(st.integers(0, s)))
    return tuple(row)


CASES = st.builds(
    Case,
    layout=layouts(),
    G=st.integers(1, 3),
    R=st.integers(1, 3),
    D=st.sampled_from([1, 6, 8]),
    V=st.sampled_from([4, 8, 12]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 41),
    softcap=st.sampled_from([None, None, 1.5]),
    dropout=st.sampled_from([0.0, 0.0, 0.3]),
    sinks=st.booleans(),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=CASES, block=st.sampled_from([4, 16, 256]))
def test_definition(case: Case, block: int) -> None:
    """A small query block brings the edges of blocks into reach of small sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_layout, "QUERY_BLOCK", block)
        patch.setattr(attention_cpu, "QUERY_BLOCK", block)
        assert_agrees(case, torch.float64, 1e-9)
        assert_agrees(case, torch.float32, 1e-5)


S = 1100  # longer than the flash kernel's tiles of 256 queries and 512 keys
LONG_ROWS = {
    "plain": [0] * S,
    "packed": [0] * 300 + [300] * 700 + [1000] * 100,
    "left": [-1 - s for s in range(90)] + [90] * (S - 90),
    "right": [0] * 700 + [-1] * (S - 700),
    "holes": [-1 if s % 300 == 7 else 0 for s in range(S)],
    "look back": [0] * 300 + [300] * 300 + [-1] * (S - 600),
}


@pytest.mark.parametrize("row", LONG_ROWS)
@pytest.mark.parametrize("rule", [{}, {"window": 130}, {"causal": False, "R": 1, "window": 600}], ids=str)
def test_definition_beyond_one_tile(row: str, rule: dict[str, Any]) -> None:
    assert_agrees(Case((tuple(LONG_ROWS[row]),), G=1, sinks=True, **rule), torch.float64, 1e-9)


def test_many_rows_of_grouped_heads() -> None:
    """From _ROW_CALL tokens on, plain rows go one a call."""
    assert_agrees(Case(((0,) * 300,) * 2), torch.float64, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [{}, {"window": 40}, {"softcap": 2.0}, {"sinks": True}, {"V": 4}], ids=str)
def test_half_precision(dtype: torch.dtype, rule: dict[str, Any]) -> None:
    case = Case((tuple(s // 50 * 50 for s in range(200)), (0,) * 200), **rule)
    assert_agrees(case, dtype, 1e-2)
    got = run(case, dtype)
    assert [x.dtype for x in got[:5]] == [dtype, torch.float32, dtype, dtype, dtype]


def test_queries_without_keys() -> None:
    """Zeros, minus infinity and no gradient; and nothing they were given spreads."""
    (q, k, v), layout, grad_out = Case(((-1, -2, -3, 3, 3, 3),)).inputs(torch.float32)
    with torch.no_grad():
        k[:, :, :3] = v[:, :, :3] = math.nan  # pads' keys and values are never read
    out, lse = attention(q, k, v, layout, None, None, 1.0, True, None, None, 0.0)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    assert out[:, :3].eq(0).all() and lse[:, :, :3].eq(-math.inf).all()
    assert all(grad[:, :, :3].eq(0).all() and grad.isfinite().all() for grad in grads)


def test_hugging_face_padding_mask() -> None:
    """Left and right padding through transformers' own mask and sdpa: every query's output agrees, pads' too."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    case = Case(((-1, -2, -3, 3, 3, 3, 3), (0, 0, 0, 0, 0, -1, -1)))
    for window in (None, 3):
        (q, k, v), layout, _ = case.inputs(torch.float64)
        seen_4d = sdpa_mask(
            2, 7, 7, mask_function=sliding_window_causal_mask_function(window) if window else causal_mask_function,
            attention_mask=mask.bool(), allow_is_causal_skip=False,
        )  # fmt: skip
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen_4d, enable_gqa=True, scale=0.3)
        out, _ = attention(q, k, v, layout, None, None, 0.3, True, window, None, 0.0)
        torch.testing.assert_close(out, want.transpose(1, 2))


def test_hugging_face_sinks() -> None:
    case = Case(((0,) * 30,) * 2, sinks=True)
    (q, k, v, sinks), layout, grad_out = case.inputs(torch.float64)
    module = SimpleNamespace(num_key_value_groups=case.R, sinks=sinks, training=True)
    mask = torch.full((30, 30), -math.inf, dtype=torch.float64).triu(1)
    want = eager_attention_forward(module, q, k, v, mask, scaling=0.3)[0]
    out, _ = attention(q, k, v, layout, sinks, None, 0.3, True, None, None, 0.0)
    torch.testing.assert_close(out, want)
    want_grads = torch.autograd.grad(want, (q, k, v, sinks), grad_out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v, sinks), grad_out), want_grads)


TRACED = {
    "plain": Case(((0,) * 6,) * 2),
    "plain, narrow values": Case(((0,) * 6,) * 2, R=1, V=4),
    "packed, wide values": Case(((0, 0, 0, 3, 3, -4),) * 2, V=12, sinks=True),
    "window": Case(((0,) * 6,) * 2, R=1, window=2),
    "dropout, soft cap": Case(((0, 0, 2, 2, 2, 2),) * 2, softcap=2.0, dropout=0.2),
}


@pytest.mark.parametrize("name", TRACED)
def test_operator_contract(name: str) -> None:
    """Schema, autograd registration, tracing with dynamic sizes; true strides of the fakes, for odd inputs too."""
    case = TRACED[name]
    leaves, layout, grad_out = case.inputs(torch.float32)
    sinks = leaves[3].detach() if case.sinks else None
    got = run(case, torch.float32)
    want = [got[0], *got[2:5]]
    torch.library.opcheck(attention, (*leaves[:3], layout, leaves[3] if case.sinks else None, SEED, *case.options))
    for change in (torch.Tensor.clone, torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT):
        qkv = [change(x.detach()) for x in leaves[:3]]
        facts = (layout, sinks, SEED, *case.options)
        out, lse = attention(*qkv, *facts)
        torch.library.opcheck(attention, (*qkv, *facts), test_utils="test_faketensor")
        torch.library.opcheck(
            attention_backward,
            (change(grad_out), *qkv, out, lse, *facts),
            test_utils=("test_schema", "test_faketensor"),
        )
        torch.testing.assert_close([out, *attention_backward(change(grad_out), *qkv, out, lse, *facts)][:4], want)


def test_one_node_each_way() -> None:
    case = TRACED["plain"]
    leaves, layout, grad_out = case.inputs(torch.float32)

    def step(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        out, _ = attention(q, k, v, layout, None, None, *case.options)
        return torch.autograd.grad(out, (q, k, v), grad_out)

    graph = make_fx(step, tracing_mode="symbolic")(*leaves, layout, grad_out)
    calls = [node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "turbo_compile"]
    assert calls == [attention, attention_backward]
    longer = replace(case, layout=((0,) * 9,) * 3)
    leaves, layout, grad_out = longer.inputs(torch.float32)
    for got, want in zip(graph(*leaves, layout, grad_out), run(longer, torch.float32)[2:], strict=True):
        torch.testing.assert_close(got, want)


def test_errors() -> None:
    (q, k, v), layout, _ = Case(((0,) * 4,), G=2, R=1).inputs(torch.float32)
    rule = (1.0, True, None, None, 0.0)
    with pytest.raises(ValueError, match="2 query heads"):
        attention(q, k.repeat(1, 2, 1, 1), v, layout, None, None, *rule)
    with pytest.raises(ValueError, match="int32"):
        attention(q, k, v, layout.long(), None, None, *rule)
    with pytest.raises(ValueError, match="needs a seed"):
        attention(q, k, v, layout, None, None, *rule[:-1], 0.1)
    with pytest.raises(UnsupportedOp, match="create_graph"):
        torch.autograd.grad(attention(q, k, v, layout, None, None, *rule)[0].sum(), q, create_graph=True)


MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {},
    "right": {},
    "holes": {},
    "plain, window": {"window": 200},
    "packed, window": {"window": 200},
    "holes, window": {"window": 200},
    "plain, soft cap": {"softcap": 2.0},
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory(name: str) -> None:
    """What forward and backward allocate together is far below one S x S tensor of one head (64 MiB here)."""
    n = 4096
    rows = {
        "plain": [0] * n,
        "packed": [s // 1500 * 1500 for s in range(n)],
        "right": [0 if s < 3000 else -1 for s in range(n)],
        "holes": [-1 if s % 1000 == 7 else 0 for s in range(n)],
    }
    case = Case((tuple(rows[name.split(",")[0]]),), G=1, R=1, D=16, V=16, **MEMORY[name])
    leaves, layout, grad_out = case.inputs(torch.float32)

    def step() -> None:
        out, _ = attention(*leaves, layout, None, None, *case.options)
        torch.autograd.grad(out, leaves, grad_out)

    assert peak_bytes(step) < n * n * 4 // 4


def peak_bytes(function: Callable[[], None]) -> int:
    """The most bytes alive at once of what `function` allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    assert events
    changes = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])]
    return max(itertools.accumulate(changes))


FLEX = torch.compile(attention_cuda.flex, backend="aot_eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", TRACED)
def test_flex_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention, which CUDA uses where flash cannot, traced and run without its kernel: the same definition."""
    monkeypatch.setattr(attention_cuda, "_flex_compiled", lambda: FLEX)
    case = TRACED[name]
    leaves, layout, _ = case.inputs(torch.float32)
    q, k, v, *sinks = (x.detach() for x in leaves)
    out, lse = attention_cuda.flex_forward(Options(*case.options), q, k, v, layout, sinks[0] if sinks else None, SEED)
    want_out, want_lse = reference(case, torch.float32)[:2]
    assert distance(out, want_out) < 1e-5
    assert distance(lse, want_lse) < 1e-5


def test_documents_on_the_host() -> None:
    """The flash path of CUDA takes layouts without padding, and their offsets."""
    plain = attention_cuda.read_documents(torch.zeros(2, 4, dtype=torch.int32))
    assert (plain.plain, plain.packed, plain.longest) == (True, True, 4)
    packed = attention_cuda.read_documents(torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]], dtype=torch.int32))
    assert (packed.plain, packed.packed, packed.longest, packed.offsets.tolist()) == (False, True, 4, [0, 2, 5, 6, 10])
    for row in ([0, 0, -1], [-1, 1, 1], [0, 1, 0]):
        assert not attention_cuda.read_documents(torch.tensor([row], dtype=torch.int32)).packed


def test_counter_random() -> None:
    """Rates within five deviations; seeds, sites, neighbours and high counters uncorrelated."""
    n = 1 << 18
    counter = torch.arange(n)
    seeds = [torch.tensor(s) for s in (0, 1, 2**31, 2**32, -5)]
    draws = [uniform(s, counter) for s in seeds]
    draws += [uniform(fork(seeds[0], site), counter) for site in (0, 1, 2)]
    draws += [uniform(seeds[0], counter << 32), uniform(seeds[0], counter + (1 << 32)), draws[0].roll(1)]
    stacked = torch.stack(draws)
    assert stacked.min() >= 0 and stacked.max() < 1
    assert (stacked.mean(1) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / n)
    assert (torch.corrcoef(stacked) - torch.eye(len(draws))).abs().max() < 5 / math.sqrt(n)
    bits = [((draws[0] * 2**24).long() ^ (uniform(seeds[0], counter ^ (1 << b)) * 2**24).long()) for b in (0, 17, 40)]
    flips = torch.stack([(word.unsqueeze(1) >> torch.arange(24) & 1).float().mean(0) for word in bits])
    assert (flips - 0.5).abs().max() < 0.02
    calls = [fork(seeds[0], call) for call in range(3)]
    masks = torch.stack([dropout(torch.ones(n), 0.5, call, site) for call in calls for site in range(3)])
    assert (masks.mean(1) - 1).abs().max() < 5 / math.sqrt(n)
    assert (torch.corrcoef(masks) - torch.eye(len(masks))).abs().max() < 5 / math.sqrt(n)


def test_dropout_in_a_traced_graph() -> None:
    """The same bits eager, traced with symbolic sizes, and in the gradient."""
    x = torch.randn(5, 7, 11, requires_grad=True)

    def step(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        y = dropout(x, 0.25, seed, 3)
        return y, torch.autograd.grad(y.sum(), x)[0]

    graph = make_fx(step, tracing_mode="symbolic")(x, SEED)
    longer = torch.randn(6, 70, 110, requires_grad=True)
    y, grad = graph(longer, SEED)
    want_y, want_grad = step(longer, SEED)
    assert torch.equal(y, want_y) and torch.equal(grad, want_grad)
    assert torch.equal(y, longer * grad) and abs((grad == 0).float().mean() - 0.25) < 0.01
    torch.testing.assert_close(grad[grad != 0].unique(), torch.tensor([1 / 0.75]))


def test_price_and_placement() -> None:
    B, S, window = sympy.symbols("B S window", positive=True)
    assert FLOPS(2, 128, 4, 8, 8) == 2 * 2 * 4 * 128 * 128 / 2 * 16
    assert FLOPS(B, S, 4, 8, 8) == 64 * B * S**2
    assert float(FLOPS(1, 128, 1, 1, 1, 128)) == FLOPS(1, 128, 1, 1, 1) == float(FLOPS(1, 128, 1, 1, 1, 500))
    assert FLOPS(1, S, 1, 1, 1, window).subs({S: 1000, window: 10}) == 4 * (10 * 1000 - 50)
    assert float(FLOPS(1, 128, 1, 1, 1, 128, causal=False)) == FLOPS(1, 128, 1, 1, 1, causal=False)
    assert (PLACEMENT.axis, PLACEMENT.heads_out, PLACEMENT.sequence_out) == ("sp", 2, 1)
