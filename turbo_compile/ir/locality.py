"""Token-local between boundaries: what makes it safe to give each rank a chunk of the sequence.

Every value of a segment is cut by token, where its shape carries the sequence symbol S, or the same on every rank.
An op is token-local if a rank that holds some tokens computes for them what a rank that holds all would. Boundary ops
are not, and declare instead how what they take and give lies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
import torch.fx as fx

from turbo_compile._torch import OpOverload
from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.graphs import argument
from turbo_compile.ir.spelling import expression_of
from turbo_compile.ir.token_rules import (
    Cut,
    Op,
    Rule,
    State,
    aten,
    before_view,
    counts,
    dims_of,
    makes,
    packet_of,
    rule_of,
    slices,
    spreads,
    uneven,
    views,
)

Role = Literal["tokens", "replicate", "partial", "whole"]


@dataclass(frozen=True, slots=True)
class Placement:
    """How the tensors of an op lie when each rank holds some of the tokens, in the order of its schema.

    "tokens": cut by token; "replicate": the same on every rank; "partial": the ranks' values add up to the whole;
    "whole": every token of the sequence, perhaps of some heads only.
    """

    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]


_PLACEMENTS: dict[Any, Placement] = {}


def declare(placements: Mapping[OpOverload, Placement]) -> None:
    """Have ops judged by their placements instead of by a rule."""
    _PLACEMENTS.update(placements)


def mixes_tokens(graph: fx.Graph, symbol: sympy.Expr) -> Iterator[tuple[fx.Node, str]]:
    """The nodes of a segment's ATen forward graph that are not token-local, each with the rule it breaks.

    `symbol` is the length of the sequence in the shapes of the nodes' `val`. A placeholder whose shape lacks it is
    taken to be the same on every rank, or, where it is added to a rank's part of a sum, such a part.

    Raises:
        UnsupportedOp: `symbol` is a number, so shapes do not say what is cut.
    """
    if not symbol.is_Symbol:
        raise UnsupportedOp(
            f"a static sequence length, {symbol}, does not say which dimensions are cut by token; use shapes: dynamic"
        )
    states: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        fault = _visit(node, symbol, states)
        if fault:
            yield node, fault


def _visit(node: fx.Node, symbol: sympy.Expr, states: dict[fx.Node, Any]) -> str:
    """The rule that `node` breaks, if any; notes how its value lies."""
    results = _tensors(node)
    if node.op in ("placeholder", "get_attr"):
        states[node] = _by_shape(node.meta.get("val"), symbol)
        return uneven(results, symbol)
    read = [each for each in node.all_input_nodes if _tensors(each)]
    if node.op == "output" or packet_of(node) in _READ_SIZES or not (read or results):
        return ""
    if node.target is operator.getitem:
        states[node] = states[read[0]][argument(node, 1)]
        return ""
    op = Op(node, symbol, {each: states[each] for each in read}, results, _arguments(node))
    cut = any(state != "replicate" for state in op.states.values()) or any(dims_of(each, symbol) for each in results)
    fault = _judge(op) if cut or node.target in _PLACEMENTS or op.number() else ""
    value: Any = node.meta.get("val")
    several = isinstance(value, (tuple, list))
    found = [_lies(op, index, each, fault) for index, each in enumerate(value if several else [value])]
    states[node] = found if several else found[0]
    return fault


def _judge(op: Op) -> str:
    if op.node.target in _PLACEMENTS:
        return _declared(op, _PLACEMENTS[op.node.target])
    rule = rule_of(op.node)
    if rule is None:
        return f"{op.name} has no rule for values cut by token"
    if _of_this_rank(op):
        return _keeps_its_part(op)
    number = "" if rule in (slices, counts) else op.number()
    return number or rule(op) or _rows(op, rule) or uneven(op.results, op.symbol)


def _rows(op: Op, rule: Rule) -> str:
    """A result has a row for each row it was made from, in one order."""
    if rule in (views, makes):
        return ""
    if not op.cuts and rule not in (spreads, counts) and any(dims_of(result, op.symbol) for result in op.results):
        return f"{op.name} makes tokens of a value that has none, by their place; a rank's first is not token 0"
    for cut in op.cuts.values():
        for result in op.results:
            if cut.size not in [expression_of(result.shape[dim]) for dim in dims_of(result, op.symbol)]:
                return f"{op.name} does not keep all tokens apart (dim {cut.dim}), of which a rank holds only some"
    if len(_orders(op)) > 1:
        return f"{op.name} joins values whose tokens lie in different orders"
    return ""


def _declared(op: Op, placement: Placement) -> str:
    """A boundary gets what its placement says."""
    target: Any = op.node.target
    names = [each.name for each in target._schema.arguments if "Tensor" in str(each.type)]
    wrong = []
    for name, role in zip(names, placement.inputs, strict=True):
        given = op.arguments[name]
        for node in given if isinstance(given, (tuple, list)) else [given]:
            state = op.states.get(node, role)
            found = "tokens" if isinstance(state, Cut) or state == "own" else state
            if found != role and (found, role) != ("replicate", "whole"):
                wrong.append((name, role, found))
    if any(role == "whole" for _, role, _ in wrong):
        cut = ", ".join(name for name, *_ in wrong)
        return f"{op.name} needs whole sequences, and gets {cut} cut by token: an exchange before it is missing"
    return "".join(f"{op.name} takes {name} as {role}, and gets it as {found}" for name, role, found in wrong[:1])


def _keeps_its_part(op: Op) -> str:
    """Parts of a sum over ranks may be added and scaled; what only a rank's own tokens say is handed on, no more."""
    operands = [each for each in op.node.args[:2] if isinstance(each, (fx.Node, int, float))]
    states = [op.states.get(each, "replicate") for each in operands]
    given = [isinstance(each, fx.Node) and each.op == "placeholder" for each in operands]
    allowed = {
        aten.add: all(state == "partial" or part for state, part in zip(states, given, strict=True)),
        aten.mul: states in (["partial", "replicate"], ["replicate", "partial"]),
        aten.div: states == ["partial", "replicate"],
    }
    if packet_of(op.node) in _HANDED_ON or allowed.get(packet_of(op.node), False):
        return op.number()
    node, state = _of_this_rank(op)[0]
    what = "is a rank's part of a sum" if state == "partial" else "says something of a rank's own tokens only"
    return f"{op.name} reads %{node.name}, which {what}"


# --- how values lie --------------------------------------------------------------------------------------------------

_READ_SIZES = (aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset)
_HANDED_ON = (aten.alias, aten.clone, aten.detach, aten.view, aten.neg, torch.ops.prims.convert_element_type)


def _lies(op: Op, index: int, value: Any, fault: str) -> State:
    """How a result lies. What follows a fault is judged as if it were right."""
    if fault:
        return _by_shape(value, op.symbol)
    if op.node.target in _PLACEMENTS:
        role = _PLACEMENTS[op.node.target].outputs[index]
        state = _by_shape(value, op.symbol)
        return "partial" if role == "partial" else "own" if (role, state) == ("tokens", "replicate") else state
    for _, state in _of_this_rank(op):
        return state
    before = before_view(op, value) if rule_of(op.node) is views else next(iter(_orders(op)), None)
    return _by_shape(value, op.symbol, before)


def _by_shape(value: Any, symbol: sympy.Expr, before: Any = ...) -> State:
    """How a value lies by its shape. Unless told, what a product has besides S comes before it."""
    dims = dims_of(value, symbol)
    if not dims:
        return "replicate"
    size = expression_of(value.shape[dims[0]])
    return Cut(dims[0], size, size / symbol if before is ... else before)


def _orders(op: Op) -> set[sympy.Expr]:
    """What comes before S in the dimensions of tokens that an op reads: one thing, if it is token-local."""
    return {cut.before for cut in op.cuts.values() if cut.before is not None}


def _of_this_rank(op: Op) -> list[tuple[fx.Node, State]]:
    """What an op reads that is neither cut by token nor the same on every rank."""
    return [(node, state) for node, state in op.states.items() if state in ("partial", "own")]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included; none for what has no schema."""
    if not isinstance(node.target, OpOverload):
        return {}
    schema = node.target._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return defaults | {each.name: value for each, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)


def _tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(each for each in values if isinstance(each, torch.Tensor))
