"""What is token-local and what is not: ops one at a time, then every family, whose only faults are its attentions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.families import build
from turbo_compile.boundaries.attention import attention
from turbo_compile.boundaries.experts import combine, dispatch
from turbo_compile.boundaries.loss import causal_lm_loss
from turbo_compile.boundaries.router import router_counts, router_loss
from turbo_compile.capture import Signature, capture
from turbo_compile.differentiate import differentiate
from turbo_compile.errors import UnsupportedOp
from turbo_compile.huggingface import compute_dtypes
from turbo_compile.ir.locality import mixes_tokens
from turbo_compile.kernels import counter_random
from turbo_compile.kernels.grouped_mm import grouped_mm

HIDDEN, EXPERTS, TOP_K, ROWS, TOKENS = 8, 4, 2, 2, 14


class Values:
    """What the small functions compute with: `x` (B,S,8), `ids` and `mask` (B,S); `w` and the rest have no tokens."""

    def __init__(self) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        seen = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        self.ids = mode.from_tensor(seen, symbolic_context=context, source=ConstantSource("ids"))
        rows, tokens = self.ids.shape
        self.symbol: sympy.Expr = tokens.node.expr
        with mode:
            self.x = torch.zeros(rows, tokens, HIDDEN)
            self.mask = torch.zeros(rows, tokens, dtype=torch.bool)
            self.w = torch.zeros(HIDDEN, HIDDEN)
            self.table = torch.zeros(64, HIDDEN)
            self.one = torch.zeros(())
            self.seed = torch.zeros((), dtype=torch.long)
            self.experts = torch.zeros(EXPERTS, HIDDEN, HIDDEN)


def faults(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """The faults of `function`, which takes fields of `Values` by name: the op's name and the rule's sentence."""
    values = Values()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    arguments = [getattr(values, name) for name in names]
    trace = make_fx(
        functionalize(function, remove="mutations"),
        tracing_mode="symbolic",
        decomposition_table=select_decomp_table(),
    )
    module = trace(*arguments)
    return [(_name(node), rule) for node, rule in mixes_tokens(module.graph, values.symbol)]


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", node.target))


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def choice(x: Tensor) -> Tensor:
    return rows(x)[:, :EXPERTS].topk(TOP_K, dim=-1).indices


# --- token-local -----------------------------------------------------------------------------------------------------


def rms_norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[0]


def layer_norm(x, w):
    return F.layer_norm(x, (HIDDEN,), w[0], w[1])


def linear(x, w):
    return F.linear(x, w, w[0])


def heads_and_back(x, w):
    q = F.linear(x, w).view(*x.shape[:2], 2, 4).transpose(1, 2)
    return q.transpose(1, 2).reshape(*x.shape[:2], HIDDEN)


def repeated_heads(x):
    heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
    return heads[:, :, None].expand(-1, -1, 3, -1, -1).reshape(x.shape[0], 6, x.shape[1], 4)


def rows_and_back(x, w):
    return (x + (rows(x) @ w).view(x.shape)).softmax(-1)


def two_rows_a_token(x):
    return x.view(x.shape[0], 2 * x.shape[1], HIDDEN // 2).view(-1, HIDDEN // 2).view(x.shape)


def tokens_first(x, w):
    return (x.transpose(0, 1).reshape(-1, HIDDEN) @ w).view(x.shape[1], x.shape[0], HIDDEN).transpose(0, 1)


def rotary_from_positions(x, ids, w):
    angle = ids[:, :, None].float() * w[0, :4]
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
    return x * cos + turned * sin


def embedding(ids, table):
    return F.embedding(ids, table) + table[ids] + table.index_select(0, ids.view(-1)).view(*ids.shape, HIDDEN)


def whole_slices(x):
    return x[:, 0:].narrow(1, 0, x.shape[1])


def constants_of_tokens(x):
    filled = torch.zeros(x.shape[0], x.shape[1], HIDDEN) + x.new_full(x.shape, 2.0) + torch.ones_like(x)
    return filled * x + x.new_ones(1, 1, 1).expand(x.shape) + x.new_zeros(HIDDEN)


def chosen_experts(x):
    scores = rows(x)[:, :EXPERTS].sigmoid()
    picked = scores.topk(TOP_K, dim=-1).indices
    mask = torch.zeros_like(scores).scatter(1, picked, 1)
    return scores.gather(1, picked), scores.masked_fill(~mask.bool(), float("-inf"))


def padded_heads(x):
    return F.pad(x, (0, 4)) + torch.stack((x, x), 2).flatten(2)[..., :12]


def written_in_place(x):
    out = torch.empty(x.shape[0], x.shape[1], 12)
    out[..., :HIDDEN] = x
    out[:, :, HIDDEN:] = 0
    return out


def dropped_out(x, seed):
    return counter_random.dropout(x, 0.5, seed, 3)


def experts(x, experts):
    expert_rows, order, offsets = dispatch(rows(x), choice(x), EXPERTS)
    expert_rows = F.silu(grouped_mm(expert_rows, experts, offsets, None)) * 2
    return combine(expert_rows, order, rows(x)[:, :TOP_K]).view(x.shape) + x


def losses(x, ids, mask, one, w):
    logits = rows(x)[:, :EXPERTS]
    aux = router_loss([logits, logits], mask.view(-1), w[0, : EXPERTS + 1])
    return -(causal_lm_loss(x, ids, one) + 0.5 * aux.to(torch.float32) * one / 2)


LOCAL = (
    rms_norm,
    layer_norm,
    linear,
    heads_and_back,
    repeated_heads,
    rows_and_back,
    two_rows_a_token,
    tokens_first,
    rotary_from_positions,
    embedding,
    whole_slices,
    constants_of_tokens,
    chosen_experts,
    padded_heads,
    written_in_place,
    dropped_out,
    experts,
    losses,
)


@pytest.mark.parametrize("function", LOCAL, ids=lambda function: function.__name__)
def test_token_local(function: Callable[..., Any]) -> None:
    assert faults(function) == []


def test_what_has_no_tokens_may_do_anything() -> None:
    assert faults(lambda x, w: x @ (w.sum(0).cumsum(0).flip(0) @ w @ torch.linalg.inv(w)).relu()[:, None] * 3) == []


# --- not -------------------------------------------------------------------------------------------------------------

ALONG = "runs along tokens"
MIXED: dict[str, tuple[Callable[..., Any], str]] = {
    "sum": (lambda x: x.sum(1), ALONG),
    "sum of all": (lambda x: x.sum(), ALONG),
    "mean of all": (lambda x: x - x.mean(), ALONG),
    "mean of rows": (lambda x: rows(x).mean(0), ALONG),
    "longrope": (lambda x, ids: torch.where(ids.max() > 4096, x, -x), ALONG),
    "variance": (lambda x: torch.var_mean(x, 1), ALONG),
    "any": (lambda mask: mask.any(-1), ALONG),
    "argmax": (lambda x: x.argmax(), ALONG),
    "softmax": (lambda x: x.softmax(1), ALONG),
    "cumsum": (lambda mask: mask.long().cumsum(-1), ALONG),
    "sort": (lambda ids: ids.sort(-1), ALONG),
    "topk": (lambda x: x.topk(3, dim=1), ALONG),
    "flip": (lambda x: x.flip(1), ALONG),
    "roll": (lambda x: x.roll(1, 1), "index picks tokens"),
    "shift": (lambda x: x[:, 1:], "slice does not keep all tokens apart"),
    "last token": (lambda x: x[:, -1], "select does not keep"),
    "every other": (lambda x: x[:, ::2], "slice does not keep"),
    "halves": (lambda x: x.unflatten(1, (1, -1)).chunk(1, 2)[0][:, :, :3], "does not keep"),
    "concatenation": (lambda x: torch.cat((x, -x), 1), ALONG),
    "a token in front": (lambda x: torch.cat((x[:, :1] * 0, x), 1), "cat runs along"),
    "padding": (lambda x: F.pad(x, (0, 0, 0, 1)), "pads or shifts tokens"),
    "padding that shifts": (lambda x: F.pad(x, (0, 0, 1, -1)), "pads or shifts"),
    "windows": (lambda x: x.unfold(1, 2, 1), "unfold has no rule"),
    "convolution": (lambda x, w: F.conv1d(x.transpose(1, 2), w[:, :, None], padding=0), "no rule"),
    "scores": (lambda x: x @ x.transpose(1, 2), "tokens x tokens"),
    "all pairs": (lambda ids: ids[:, :, None] == ids[:, None], "tokens x tokens"),
    "product over tokens": (lambda x: x.transpose(1, 2) @ x, "sums over tokens"),
    "product over rows": (lambda x: rows(x).t() @ rows(x), "sums over tokens"),
    "attention of torch": (lambda x: F.scaled_dot_product_attention(x, x, x), "tokens x tokens"),
    "positions": (lambda x: torch.arange(x.shape[1]) + x[..., 0], "numbers tokens by their place"),
    "one word of positions": (
        lambda x: (torch.arange(x.shape[1]) & 0xFFFFFFFF) + x[..., 0],
        "numbers tokens by their place",
    ),
    "row numbers": (lambda x: rows(x)[torch.arange(rows(x).shape[0]), 0], "numbers tokens by their place"),
    "first positions": (
        lambda x, table: table[: x.shape[1]] + x,
        "slice computes with",
    ),
    "a few positions": (lambda x, table: x + table[x.shape[1] - 3 : x.shape[1] - 2], "computes with"),
    "padded to the length": (lambda x, w: x + F.pad(w[:1], (0, 0, 0, x.shape[1] - 1)), "makes tokens of a value"),
    "by length": (lambda x: x / x.shape[1], "computes with"),
    "by root of length": (lambda x: x * torch.sym_sqrt(x.shape[1]), "computes with"),
    "full of length": (lambda x: x + torch.full((), x.shape[1]), "computes with"),
    "rows of two tokens": (lambda x: x.view(x.shape[0], -1, 2 * HIDDEN).sum(-1), "regroups"),
    "heads as tokens": (
        lambda x: x.view(*x.shape[:2], 2, 4).transpose(1, 2).reshape(x.shape),
        "regroups tokens",
    ),
    "rows read in another order": (
        lambda x: x.transpose(0, 1).reshape(-1, HIDDEN).view(x.shape),
        "regroups tokens",
    ),
    "two orders of rows": (lambda x: x.transpose(0, 1).reshape(-1, HIDDEN) + rows(x), "different orders"),
    "tokens looked up": (lambda x, ids: rows(x)[ids], "picks tokens"),
    "tokens embedded": (lambda x, ids: F.embedding(ids.view(-1), rows(x)), "embedding picks tokens"),
    "tokens by index": (lambda x, seed: x.index_select(1, seed.view(1)), "picks tokens"),
    "tokens permuted": (lambda x, ids: x.gather(1, ids[:, :, None].expand(x.shape)), ALONG),
    "tokens by mask": (lambda x, mask: x[mask], "index selects tokens by a mask"),
    "histogram": (
        lambda ids, w: w[0].scatter_add(0, ids.view(-1), torch.ones_like(ids.view(-1), dtype=torch.float32)),
        "from one token to another",
    ),
    "one token overwritten": (lambda x: x.slice_scatter(x[:, :1] * 0, 1, 0, 1), ALONG),
    "one token overwritten by a constant": (lambda x, w: x.select_scatter(w[:2], 1, 0), ALONG),
    "written by place": (lambda x, seed: x.index_put((seed.view(1),), x[:1]), "no rule"),
    "triangle": (lambda x: torch.ones(x.shape[1], x.shape[1]).tril(), "tokens x tokens"),
    "random numbers": (lambda x: torch.rand_like(x), "no rule"),
    "loss squared": (lambda x, ids, one: causal_lm_loss(x, ids, one) ** 2, "part of a sum"),
    "loss plus one": (lambda x, ids, one: causal_lm_loss(x, ids, one) + 1, "part of a sum"),
    "loss plus a norm": (lambda x, ids, one, w: causal_lm_loss(x, ids, one) + w.square().sum(), "part of a sum"),
    "loss by length": (lambda x, ids, one: causal_lm_loss(x, ids, one) * ids.shape[1], "computes with"),
    "share of a loss": (lambda x, ids, one: one / causal_lm_loss(x, ids, one), "part of a sum"),
    "counts not yet summed": (
        lambda x, mask: router_loss([rows(x)], mask.view(-1), router_counts([rows(x)], mask.view(-1), 2)),
        "takes counts as replicate, and gets it as partial",
    ),
    "rows of the experts, counted": (
        lambda x: dispatch(rows(x), choice(x), EXPERTS)[2].float() / 3,
        "a rank's own tokens",
    ),
    "denominator of a rank": (lambda x, ids: causal_lm_loss(x, ids, x[0, 0, 0]), "select does not keep"),
    "loss of what has no tokens": (
        lambda w, seed, one: causal_lm_loss(w[:1], seed.view(1), one),
        "takes logits as tokens",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_mixes_tokens(case: str) -> None:
    function, rule = MIXED[case]
    found = faults(function)
    assert found
    assert any(re.search(rule, sentence) for _, sentence in found), found


def test_attention_needs_whole_sequences() -> None:
    def attend(x: Tensor, ids: Tensor) -> Tensor:
        q = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        out, _ = attention(q, q, q, ids.int(), None, None, 0.5, True, None, None, 0.0)
        return out.reshape(x.shape) + x

    assert faults(attend) == [
        (
            "attention",
            "attention needs whole sequences, and gets q, k, v, layout cut by token: an exchange before it is missing",
        )
    ]


def test_attention_over_whole_sequences() -> None:
    def attend(w: Tensor, seed: Tensor) -> Tensor:
        q = w.view(1, 2, 8, 4)
        out, _ = attention(q, q, q, seed.int().expand(1, 8), None, None, 0.5, True, None, None, 0.0)
        return out

    assert faults(attend) == []


def test_a_fault_is_told_once() -> None:
    """What follows from a mixed value is judged as if it were right."""
    found = faults(lambda x, w: ((x - x.mean(1, keepdim=True)) @ w).relu())
    assert [name for name, _ in found] == ["mean"]


def test_an_input_cut_unevenly() -> None:
    values = Values()
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = values.x[:, 1:]
    graph.placeholder("y").meta["val"] = values.x[:, :, 0].unsqueeze(1) * values.x[:, :, :1]
    graph.output(())
    assert [node.name for node, _ in mixes_tokens(graph, values.symbol)] == ["x", "y"]


def test_a_static_length_cannot_be_judged() -> None:
    with pytest.raises(UnsupportedOp, match="static sequence length, 13"):
        list(mixes_tokens(fx.Graph(), sympy.Integer(13)))


# --- families --------------------------------------------------------------------------------------------------------

_ROUTED = {"output_router_logits": True}
_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
CHANGES = {"qwen3_moe": _ROUTED, "mixtral": _ROUTED, "gpt_oss": _ROUTED, "gpt2": _DROPOUT}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_families_mix_tokens_in_attention_only(family: str) -> None:
    changes = CHANGES.get(family, {})
    model = build(family, 2 if family == "deepseek_v3" else 1, **changes)  # its first block is dense, its second sparse
    trainable = frozenset(name for name, _ in model.named_parameters())
    signature = Signature(True, False, True, True, router=changes is _ROUTED, trainable=trainable)
    program = capture(model, signature, compute_dtypes(model, None), torch.device("cpu"))
    step = differentiate(program, ("loss",))
    attentions = []
    for compute in step.computes.values():
        for node, rule in mixes_tokens(compute.forward.graph, step.sequence_symbol):
            assert node.target is attention, f"{compute.name} {node.format_node()}: {rule}"
            assert rule.startswith("attention needs whole sequences, and gets q, k, v, layout cut by token")
            attentions.append(compute.name)
    blocks = {
        str(call.target) for call in step.forward.nodes if "call" in call.meta and call.meta["call"].fqn in step.blocks
    }
    assert sorted(attentions) == sorted(blocks), "one attention a block"
