"""Fuse a mixture's experts: the activation into the products around it, and where they do not travel, the rows too."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx as fx
from torch import Tensor, nn

from turbo_compile.boundaries.experts import combine, dispatch
from turbo_compile.errors import PlanError
from turbo_compile.ir.graphs import argument
from turbo_compile.ir.program import Program, Segment
from turbo_compile.ir.segments import eliminate_dead, value_of
from turbo_compile.kernels.gate import ACTIVATIONS, Gate, activate
from turbo_compile.kernels.grouped_experts import gated_mm, gated_mm_combine, gathered_mm, route
from turbo_compile.kernels.grouped_mm import grouped_mm

NAME = "grouped_experts"
_CASTS = ("float", "half", "bfloat16")
_POINTS = 2048  # at which an activation is compared


@dataclass(frozen=True, slots=True)
class FuseGroupedExperts:
    """Have backward compute an expert's activation again, and read tokens' rows where they lie.

    Before:  rows, order, ends = dispatch(h, index);  pre = grouped_mm(rows, w1, ends)
             out = combine(grouped_mm(silu(pre[:, :I]) * pre[:, I:], w2, ends), order, weights)
    After:   order, ends = route(index);  pre = gathered_mm(h, order, ends, w1)
             out = gated_mm_combine(pre, w2, order, ends, weights, "silu", ...)

    Where something stands between the rows and the products, as an exchange does, only the second product changes: it
    is `gated_mm(pre, w2, ends, "silu", ...)`. What lies between two products is an activation if its values say so, not
    its spelling. `listed`: the plan asks for it by name, and it must fire at all experts.
    """

    listed: bool = False
    exact: ClassVar[bool] = False  # the activation is rounded once, and sums go in another order

    def run(self, program: Program) -> None:
        fired: list[str] = []
        missed: list[str] = []
        for name, segment in program.segments.items():
            found = [node for node in segment.module.graph.nodes if node.target is grouped_mm]
            if found:
                (fired if _fuse(program, segment, found) else missed).append(name)
        if fired:
            program.fused[NAME] = ", ".join(fired)
        if self.listed and (missed or not fired):
            what = f"the experts of {', '.join(missed)} have" if missed else "has no experts, or they have"
            raise PlanError(
                f"fuse lists {NAME}, but in {program.name} {what} no activation it knows ({', '.join(ACTIVATIONS)}, "
                "with or without a gate and a limit) between two products; take it off the list, or leave fuse at auto",
                key="fuse",
            )


def _fuse(program: Program, segment: Segment, products: list[fx.Node]) -> bool:
    pairs = [pair for pair in map(_pair, products) if pair is not None]
    for pair in pairs:
        whole = _whole(pair)
        if whole is None:
            _fuse_activation(program, pair)
        else:
            _fuse_all(program, pair, whole)
    graph = segment.module.graph
    eliminate_dead(graph)
    graph.lint()
    segment.module.recompile()
    return bool(pairs)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two products of the same rows, and the activation between them."""

    first: fx.Node
    second: fx.Node
    gate: Gate


@dataclass(frozen=True, slots=True)
class _Whole:
    """Where the rows of a pair come from and go to, with nothing between."""

    dispatch: fx.Node
    parts: dict[int, fx.Node]
    combine: fx.Node


def _pair(second: fx.Node) -> _Pair | None:
    """The pair that ends in `second`, if it is one."""
    between: dict[fx.Node, None] = {}
    first: fx.Node | None = None
    waiting = [argument(second)]
    while waiting:
        node = waiting.pop()
        if node.target is grouped_mm:
            if first is not None and node is not first:
                return None
            first = node
        elif node.op not in ("call_function", "call_method"):
            return None
        elif node not in between:
            between[node] = None
            waiting += node.all_input_nodes
    if first is None or argument(first, 2) is not argument(second, 2):
        return None
    if any(user not in between and user is not second for node in (first, *between) for user in node.users):
        return None
    gate = _gate(first, sorted(between), argument(second))
    return None if gate is None else _Pair(first, second, gate)


def _whole(pair: _Pair) -> _Whole | None:
    rows = argument(pair.first)
    made = argument(rows) if rows.target is operator.getitem else rows
    last = next(iter(pair.second.users))
    if made.target is not dispatch or last.target is not combine or len(pair.second.users) > 1:
        return None
    parts = {argument(user, 1): user for user in made.users}
    own = parts.get(1) is argument(last, 1) and parts.get(2) is argument(pair.first, 2) and len(rows.users) == 1
    return _Whole(made, parts, last) if own else None


def _fuse_activation(program: Program, pair: _Pair) -> None:
    _, w, offsets, bias = pair.second.args
    made = _put(program, pair.second, gated_mm, (pair.first, w, offsets, bias, *pair.gate.spelled()))
    pair.second.replace_all_uses_with(made)


def _fuse_all(program: Program, pair: _Pair, whole: _Whole) -> None:
    hidden, index, experts = whole.dispatch.args
    _, up, _, up_bias = pair.first.args
    _, down, _, down_bias = pair.second.args
    top_k = int(value_of(index).shape[1])  # type: ignore[arg-type]
    routed = _put(program, whole.dispatch, route, (index, experts))
    order, offsets = (_put(program, whole.dispatch, operator.getitem, (routed, i)) for i in range(2))
    for place, (name, node) in enumerate((("order", order), ("ends", offsets)), 1):
        node.meta["stem"] = name
        whole.parts[place].replace_all_uses_with(node)
    pre = _put(program, pair.first, gathered_mm, (hidden, order, offsets, up, up_bias, top_k))
    pair.first.replace_all_uses_with(pre)
    weights = argument(whole.combine, 2)
    given = (pre, down, down_bias, order, offsets, weights, *pair.gate.spelled())
    whole.combine.replace_all_uses_with(_put(program, whole.combine, gated_mm_combine, given))


def _put(program: Program, before: fx.Node, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    with before.graph.inserting_before(before):
        node = before.graph.call_function(getattr(target, "_opoverload", target), arguments)
    with program.fake_mode:
        node.meta["val"] = target(*fx.map_arg(arguments, value_of))
    return node


# --- which activation ------------------------------------------------------------------------------------------------


def _gate(first: fx.Node, between: list[fx.Node], last: fx.Node) -> Gate | None:
    """The activation that gives the values of `between`, if one of ours does: compared in fp64, past every limit."""
    width, out = value_of(first).shape[1], value_of(last)
    numbers = sorted({abs(float(n)) for node in between for n in _numbers(node)})
    generator = torch.Generator().manual_seed(0)
    bound = 2.0 * max([4.0, *numbers])
    points = torch.rand(max(4, _POINTS // int(width)), int(width), generator=generator, dtype=torch.float64)
    points = (2.0 * points - 1.0) * bound
    try:
        wanted = _in_double(first, between, last)(points)
    except Exception:  # whatever an op says that does not take fp64, or another number of rows
        return None
    if not isinstance(out, Tensor) or not isinstance(wanted, Tensor) or wanted.dim() != 2:
        return None
    for gate in _candidates(int(width), wanted.shape[1], numbers):
        if torch.allclose(activate(gate, points), wanted, rtol=1e-6, atol=1e-6 * bound):
            return gate
    return None


def _candidates(width: int, out: int, numbers: list[float]) -> Iterator[Gate]:
    limits = (None, *[number for number in numbers if number > 0])
    alphas = {1.0: None} | {number: None for number in numbers if number > 0}
    shifts = {0.0: None} | {number: None for number in numbers}
    for activation, limit in itertools.product(ACTIVATIONS, limits):
        for alpha in alphas if activation == "silu" else (1.0,):
            if out == width:
                yield Gate(activation, gated=False, alpha=alpha, limit=limit)
            elif 2 * out == width:
                for interleaved, shift in itertools.product((False, True), shifts):
                    yield Gate(activation, True, interleaved, alpha, limit, shift)


def _numbers(node: fx.Node) -> Iterator[float]:
    def flat(value: Any) -> Iterator[float]:
        if isinstance(value, (tuple, list)):
            yield from itertools.chain.from_iterable(map(flat, value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)

    yield from flat((*node.args, *node.kwargs.values()))


def _in_double(first: fx.Node, between: Iterable[fx.Node], last: fx.Node) -> fx.GraphModule:
    """What `between` computes, as a function of the first product, with every cast to a floating dtype one to fp64."""
    graph = fx.Graph()
    env = {first: graph.placeholder("pre")}
    for node in between:
        copy = env[node] = graph.node_copy(node, lambda each: env[each])
        copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), _widened)
        if copy.op == "call_method" and copy.target in _CASTS:
            copy.target = "double"
    graph.output(env[last])
    return fx.GraphModule(nn.Module(), graph)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
