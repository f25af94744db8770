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
    """Start each group's gather `depth` calls early, and wait for each reduction `depth` calls late.

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
        """Move a gather's start before the `depth`-th call that precedes it."""
        before = _calls_before(start)
        if before:
            target = before[min(self.depth, len(before)) - 1]
            target.prepend(start)

    def _later(self, graph: fx.Graph, start: fx.Node) -> None:
        """Move each wait that hangs on a reduction's start behind the `depth`-th call after that start, or to the end.

        What the wait hands to the next collective (HSDP's sum over `dp`) starts right after it.
        """
        started: fx.Node | None = start
        while started is not None:
            (wait,) = started.users
            after = _calls_after(started)
            place = after[self.depth - 1] if len(after) >= self.depth else output_node(graph).prev
            if place is not wait:
                place.append(wait)
            started = next((user for user in wait.users if user.op != "output"), None)
            if started is not None:
                wait.append(started)


def _calls_before(node: fx.Node) -> list[fx.Node]:
    """Calls that run before `node`, nearest first."""
    found = []
    current = node.prev
    while current.op != "root":
        if current.op == "call_module":
            found.append(current)
        current = current.prev
    return found


def _calls_after(node: fx.Node) -> list[fx.Node]:
    found = []
    current = node.next
    while current.op != "root":
        if current.op == "call_module":
            found.append(current)
        current = current.next
    return found
