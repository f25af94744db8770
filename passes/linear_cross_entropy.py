"""Fuse the head with the loss, so that the logits of all tokens never exist."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx as fx
from torch import Tensor

from turbo_compile.boundaries.linear_cross_entropy import linear_cross_entropy, linear_logprobs
from turbo_compile.boundaries.loss import causal_lm_loss_op, token_logprobs
from turbo_compile.errors import PlanError
from turbo_compile.ir.graphs import argument, placeholders
from turbo_compile.ir.names import group_names
from turbo_compile.ir.program import Program, Segment
from turbo_compile.ir.segments import eliminate_dead, value_of

NAME = "linear_cross_entropy"
_READERS = (causal_lm_loss_op, token_logprobs)
_LINEARS = (torch.nn.functional.linear, torch.ops.aten.linear.default)
_CASTS = ("float", "double", "to", "contiguous", "clone", "type")
_PRODUCTS = (operator.mul, torch.mul, "mul", "multiply")
_QUOTIENTS = (operator.truediv, torch.div, "div", "true_divide")
_TANHS = (torch.tanh, "tanh")


@dataclass(frozen=True, slots=True)
class FuseLinearCrossEntropy:
    """Replace the head's product, what is done to its logits, and the loss by one op that holds a few tokens' logits.

    Before:  logits = cap * tanh(linear(hidden, weight) / cap);  loss = causal_lm_loss(logits, targets, denominator)
    After:   loss = linear_cross_entropy(hidden, weight, bias, targets, denominator, scale, cap)

    Between the two there may be factors, a soft cap and casts to a wider dtype, and nothing else may read the logits:
    a program that returns them is left as it is. `listed`: the plan asks for it by name, and it must fire.
    """

    listed: bool = False
    exact: ClassVar[bool] = False  # products of fewer tokens at a time add up in another order

    def run(self, program: Program) -> None:
        fired = [name for name, segment in program.segments.items() if self._fuse(program, segment)]
        if fired:
            program.fused[NAME] = ", ".join(fired)
        elif self.listed and "loss" in program.outputs and "logits" not in program.outputs:
            raise PlanError(
                f"fuse lists {NAME}, but the loss of {program.name} does not follow from a linear head by factors and "
                "a soft cap alone; take it off the list, or leave fuse at auto",
                key="fuse",
            )

    def _fuse(self, program: Program, segment: Segment) -> bool:
        graph = segment.module.graph
        losses = [node for node in graph.nodes if node.target is causal_lm_loss_op]
        head = _head(losses[0]) if len(losses) == 1 else None
        if head is None:
            return False
        wanted = _depends(program, segment, (head.hidden, head.weight, head.bias))
        given = (head.hidden, head.weight, head.bias, *losses[0].args[1:], head.scale, head.softcap)
        fused, arguments = (
            (linear_logprobs, given) if len(head.readers) > 1 else (linear_cross_entropy, (*given, wanted))
        )
        with graph.inserting_before(head.readers[0]):
            made = _call(program, graph, fused, arguments)
            parts = [_part(graph, made, index) for index in range(3)]
        for reader in head.readers:
            shift = int(reader.target is token_logprobs)  # logprobs and entropy come behind the loss
            for user in list(reader.users):
                user.replace_all_uses_with(parts[argument(user, 1) + shift])
        eliminate_dead(graph)
        graph.lint()
        segment.module.recompile()
        return True


@dataclass(frozen=True, slots=True)
class _Head:
    """A linear head that only `readers` read, by way of z(x) = scale * x, or softcap * tanh(scale * x / softcap)."""

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    scale: float
    softcap: float
    readers: tuple[fx.Node, ...]


def _head(loss: fx.Node) -> _Head | None:
    """The head behind a loss, if nothing lies between the two but what a fused op computes."""
    logits: fx.Node = argument(loss)
    readers = tuple(sorted(logits.users))
    if any(reader.target not in _READERS or _reads_lse(reader) for reader in readers):
        return None
    steps: list[float | str] = []
    node = logits
    while node.target not in _LINEARS:
        step = _step(node)
        if step is None or (node is not logits and len(node.users) > 1):
            return None
        before, factor = step
        steps.append(factor)
        node = before
    if node is not logits and len(node.users) > 1:
        return None
    hidden, weight, bias = _linear_arguments(node)
    function = _composed(reversed(steps))
    return _Head(hidden, weight, bias, *function, readers) if function is not None else None


def _reads_lse(reader: fx.Node) -> bool:
    """Whether the last result of a loss boundary, its log-sum-exp, is read: a fused op does not give it."""
    last = 1 if reader.target is causal_lm_loss_op else 2
    return any(argument(user, 1) == last and user.users for user in reader.users)


def _step(node: fx.Node) -> tuple[fx.Node, float | str] | None:
    """What a node is made of and how: times a factor, or "tanh"; None for anything else."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    first, *rest = node.args
    if node.target in _TANHS and isinstance(first, fx.Node):
        return first, "tanh"
    if node.op == "call_method" and node.target in _CASTS and isinstance(first, fx.Node):
        before, after = value_of(first), value_of(node)
        kept = after.shape == before.shape and after.device == before.device
        return (first, 1.0) if kept and torch.promote_types(before.dtype, after.dtype) == after.dtype else None
    if node.target in (*_PRODUCTS, *_QUOTIENTS) and len(rest) == 1 and not node.kwargs:
        if isinstance(first, fx.Node) and isinstance(rest[0], int | float):
            return first, float(rest[0]) if node.target in _PRODUCTS else 1.0 / float(rest[0])
        if isinstance(rest[0], fx.Node) and isinstance(first, int | float) and node.target in _PRODUCTS:
            return rest[0], float(first)
    return None


def _composed(steps: Iterable[float | str]) -> tuple[float, float] | None:
    """(scale, softcap) of factors and at most one tanh, in the order they are applied; softcap 0 for none."""
    inner, outer = 1.0, 0.0
    for step in steps:
        if isinstance(step, float):
            inner, outer = (inner, outer * step) if outer else (inner * step, outer)
        elif outer:
            return None
        else:
            outer = 1.0
    return (inner * outer, outer) if outer > 0 else (inner, 0.0) if not outer else None


def _linear_arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "bias")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given.get("bias")


def _depends(program: Program, segment: Segment, nodes: tuple[fx.Node | None, ...]) -> list[bool]:
    """Whether each of `nodes` depends on something trained: what comes from other segments is taken to, if any is."""
    trained = any(parameter.trainable for parameter in program.parameters.values())
    (call,) = (call for call in program.calls() if call.target == segment.name)
    own = [program.parameters[fqn].trainable for names in group_names(call) for fqn in names]
    inputs = placeholders(segment.module.graph)
    depends = dict(zip(inputs, [*own, *[trained] * (len(inputs) - len(own))], strict=True))
    for node in segment.module.graph.nodes:
        if node not in depends:
            depends[node] = any(depends[each] for each in node.all_input_nodes)
        value = value_of(node)
        depends[node] &= not isinstance(value, Tensor) or value.is_floating_point()
    return [node is not None and depends[node] for node in nodes]


def _call(program: Program, graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, arguments)
    with program.fake_mode:
        node.meta["val"] = target(*fx.map_arg(arguments, value_of))
    return node


def _part(graph: fx.Graph, made: fx.Node, index: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (made, index))
    part.meta["val"] = made.meta["val"][index]
    return part
