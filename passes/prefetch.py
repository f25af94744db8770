"""Overlap communication with compute: start gathers early, finish reductions late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from turbo_compile import collectives
from turbo_compile.ir.graphs import output_node
from turbo_compile.ir.program import StepProgram


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start each group's gather `depth` blocks early, and wait for each reduction `depth` blocks late.

    Before:  %h1 = block(%w0, %h0);  %w1 = wait(all_gather(layers.1));  %h2 = block(%w1, %h1)
    After:   %w1 = all_gather(layers.1);  %h1 = block(%w0, %h0);  %h2 = block(wait(%w1), %h1)
    """

    depth: int = 1
    exact: ClassVar[bool] = True  # same bits as before: only the order of independent nodes changes

    def run(self, program: StepProgram) -> None:
        if self.depth == 0:
            return
        for _, graph in program.graphs():
            for start in [node for node in graph.nodes if node.target is collectives.all_gather]:
                self._earlier(start)
            for start in [node for node in graph.nodes if node.target is collectives.reduce_scatter]:
                self._later(graph, start)

    def _earlier(self, start: fx.Node) -> None:
        """Move a gather's start before the `depth`-th block that precedes it."""
        before = _blocks(start, backwards=True)
        if before:
            before[min(self.depth, len(before)) - 1][-1].prepend(start)

    def _later(self, graph: fx.Graph, start: fx.Node) -> None:
        """Move each wait that hangs on a reduction's start behind the `depth`-th block after that start, or to the end.

        What the wait hands to the next collective (HSDP's sum over `dp`) starts right after it.
        """
        started: fx.Node | None = start
        while started is not None:
            (wait,) = started.users
            after = _blocks(started, backwards=False)
            place = after[self.depth - 1][-1] if len(after) >= self.depth else output_node(graph).prev
            if place is not wait:
                place.append(wait)
            started = next((user for user in wait.users if user.op != "output"), None)
            if started is not None:
                wait.append(started)


def _blocks(node: fx.Node, backwards: bool) -> list[list[fx.Node]]:
    """The calls before `node`, or after it, from the nearest on; the pieces of a block together."""
    found: list[list[fx.Node]] = []
    current = node
    while (current := current.prev if backwards else current.next).op != "root":
        if current.op != "call_module":
            continue
        if found and found[-1][-1].meta["call"].fqn == current.meta["call"].fqn:
            found[-1].append(current)
        else:
            found.append([current])
    return found
