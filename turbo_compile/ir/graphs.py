"""Read torch.fx graphs: what one takes, what it returns, and what its nodes read, which fx types as nearly anything."""

from __future__ import annotations

from typing import Any

import torch.fx as fx


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """What a graph takes, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    """The node whose argument a graph returns."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def results_of(graph: fx.Graph) -> Any:
    """What a graph returns."""
    return output_node(graph).args[0]


def set_results(graph: fx.Graph, results: tuple[Any, ...]) -> None:
    """Make a graph return `results`."""
    output_node(graph).args = (results,)


def argument(node: fx.Node, index: int = 0) -> Any:
    """One argument of a node, for a reader who knows what kind it is."""
    return node.args[index]
