"""Make each rank's part of a loss, or of a count, the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from turbo_compile import collectives
from turbo_compile.boundaries.router import router_counts
from turbo_compile.ir.graphs import output_node, results_of
from turbo_compile.ir.program import Program


@dataclass(frozen=True, slots=True)
class SumOverRanks:
    """Sum router counts over ranks before they are used, and losses over ranks before they are returned.

    Before:  %c = router_counts(%logits);  %loss = epilogue(%h, %c);  return %loss
    After:   %c = router_counts(%logits);  %g = wait(all_reduce(%c) @world);  %loss = epilogue(%h, %g);
             return wait(all_reduce(%loss) @world)
    """

    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        graph = program.graph
        for node in list(graph.nodes):
            if node.target is router_counts:
                _sum_after(graph, node)
        for name, result in zip(program.outputs, results_of(graph), strict=True):
            if name in ("loss", "aux_loss"):
                _sum_after(graph, result, only=output_node(graph))


def _sum_after(graph: fx.Graph, node: fx.Node, only: fx.Node | None = None) -> None:
    """Replace `node`, for every later reader or for `only` one, by its sum over the world."""
    with graph.inserting_after(node):
        start = graph.call_function(collectives.all_reduce, (node, "world"))
    with graph.inserting_after(start):
        done = graph.call_function(collectives.wait, (start,))
    start.meta["val"] = done.meta["val"] = node.meta["val"]
    readers = {only} if only is not None else set(node.users) - {start}
    node.replace_all_uses_with(done, delete_user_cb=readers.__contains__)
