"""Compute a shared expert while rows travel to the other experts."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from turbo_compile import collectives
from turbo_compile.ir.graphs import argument
from turbo_compile.ir.program import StepProgram


@dataclass(frozen=True, slots=True)
class OverlapShared:
    """Run what a dispatch does not wait for, and does not need, between its start and its wait.

    Before:  %y = shared(%w, %h);  %x = all_to_all_rows(%rows);  %x.own = wait(%x)
    After:   %x = all_to_all_rows(%rows);  %y = shared(%w, %h);  %x.own = wait(%x)

    Backward does the same beside the exchange that takes the gradients of rows to their experts.
    """

    exact: ClassVar[bool] = True  # same bits as before: only the order of independent nodes changes

    def run(self, program: StepProgram) -> None:
        for _, graph in program.graphs():
            for call in [node for node in graph.nodes if _is_shared(node)]:
                _move(graph, call)


def _move(graph: fx.Graph, call: fx.Node) -> None:
    """Put a call, and what it gives, behind the first exchange of its block that starts once its inputs are there."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    gathers = [node for node in call.all_input_nodes if _is_gather(node)]
    ready = max(place[node] for node in call.all_input_nodes if node not in gathers)
    parts = [call, *(user for user in call.users if user.target is operator.getitem)]
    first = min(place[user] for part in parts for user in part.users if user not in parts)
    starts = [node for node in _block(call) if node.target is collectives.all_to_all_rows]
    start = next((node for node in starts if ready < place[node] < first), None)
    if start is None:
        return
    for gather in gathers:  # which waited right before the call
        if place[gather] > place[start]:
            start.prepend(argument(gather))
            start.prepend(gather)
    for part in reversed(parts):
        start.append(part)


def _block(call: fx.Node) -> list[fx.Node]:
    """The nodes around a call up to the calls of other blocks, in order."""
    found = [call]
    for backwards in (True, False):
        node = call
        while (node := node.prev if backwards else node.next).op != "root":
            if node.op == "call_module" and node.meta["call"].fqn != call.meta["call"].fqn:
                break
            found.insert(0, node) if backwards else found.append(node)
    return found


def _is_shared(node: fx.Node) -> bool:
    return node.op == "call_module" and node.meta["call"].part == "shared"


def _is_gather(node: fx.Node) -> bool:
    return node.target is collectives.wait and argument(node).target is collectives.all_gather
