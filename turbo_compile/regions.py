"""Find the regions of a captured graph: the calls that stand alone in the outer graph, and the glue between them."""

from __future__ import annotations

import operator

import torch.fx as fx

from turbo_compile import _torch
from turbo_compile.boundaries.router import router_counts
from turbo_compile.ir.graphs import argument

_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def is_anchor(node: fx.Node) -> bool:
    """Whether a node stands in the outer graph by itself: a block call or an outer boundary."""
    return node.target in (_torch.invoke_subgraph, router_counts)


def levels(graph: fx.Graph, calls: list[fx.Node]) -> dict[fx.Node, int]:
    """For each node, how many calls must have run before it can: the region of glue it belongs to."""
    position = {call: index + 1 for index, call in enumerate(calls)}
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node in position:
            level[node] = position[node]
            continue
        if (
            node.target is operator.getitem
            and node.args[0] in position
            and node.args[0].target is _torch.invoke_subgraph
        ):
            continue  # the output of a call is the call itself
        level[node] = max((_level_of(value, level, position) for value in node.all_input_nodes), default=0)
    return {node: value for node, value in level.items() if node not in position}


def write_out_of_place(graph: fx.Graph, level: dict[fx.Node, int]) -> None:
    """`loss += aux` across segments makes a new value: a segment never writes to what another one made."""
    for node in graph.nodes:
        if node.target in _IN_PLACE and level.get(node) != level.get(node.args[0]):
            node.target = _IN_PLACE[node.target]


def _level_of(node: fx.Node, level: dict[fx.Node, int], position: dict[fx.Node, int]) -> int:
    if node in level:
        return level[node]
    if node.target is operator.getitem and node.args[0] in position:
        return position[argument(node)]
    return 0
