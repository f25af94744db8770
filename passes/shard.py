"""Hold each parameter in shards: gather it before a call that reads it, and reduce its gradient into shards after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.fx as fx

from turbo_compile import collectives
from turbo_compile.ir.graphs import output_node, placeholders, results_of, set_results
from turbo_compile.ir.program import Source, StepProgram, source, split_groups


@dataclass(frozen=True, slots=True)
class ShardParameters:
    """Gather each call's parameters over `shard` before it, free them after it, and reduce their summed gradients.

    Before:  %h1 = block(%w0, %h0)                                         %dw0, %dh0 = block_backward(%w0, %s0, %dh1)
    After:   %g0 = wait(all_gather(%w0) @shard);  %h1 = block(%g0, %h0)     ...;  wait(reduce_scatter(%dw0) @shard)

    `reshard` says, by block, whether a gathered group is freed between forward and backward. Groups outside blocks are
    gathered once a step and kept to their last use, as the epilogue's forward and backward touch. `replicated` adds the
    sum over `dp` (HSDP).
    """

    reshard: dict[str, bool]
    replicated: bool = False
    exact: ClassVar[bool] = False

    def run(self, program: StepProgram) -> None:
        gathered = self._gather_forward(program)
        if program.backward is not None:
            self._gather_backward(program, gathered)
            self._reduce(program, program.backward)

    def _gather_forward(self, program: StepProgram) -> dict[str, fx.Node]:
        """Gather each group once, before its first reader; returns the gathered groups by placeholder name."""
        gathered = {}
        for group in _groups(program.forward):
            readers = [node for node in program.forward.nodes if node in group.users]
            gathered[group.name] = _gather(program, program.forward, group, readers)
        return gathered

    def _gather_backward(self, program: StepProgram, gathered: dict[str, fx.Node]) -> None:
        assert program.backward is not None
        kept: list[fx.Node] = []
        for group in _groups(program.backward):
            readers = [node for node in program.backward.nodes if node in group.users and _reads(program, node, group)]
            for node in list(group.users):
                if node not in readers:
                    _drop(node, group)
            if not readers:
                program.backward.erase_node(group)
            elif self._frees(group, readers):
                _gather(program, program.backward, group, readers)
            else:
                kept.append(gathered[group.name])
                group.meta["source"] = Source("kept", source(group).names)
        results, bundles, _ = results_of(program.forward)
        set_results(program.forward, (results, bundles, tuple(kept)))

    def _frees(self, group: fx.Node, readers: list[fx.Node]) -> bool:
        return all(self.reshard.get(reader.meta["call"].fqn, False) for reader in readers)

    def _reduce(self, program: StepProgram, graph: fx.Graph) -> None:
        for gradient in list(results_of(graph)):
            axis = _axis(program, gradient.meta["fqns"])
            node = _after(graph, gradient, collectives.reduce_scatter, axis)
            if self.replicated:
                node = _after(graph, node, collectives.all_reduce, "dp")
            output_node(graph).replace_input_with(gradient, node)


def _groups(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in placeholders(graph) if source(node).kind == "group"]


def _axis(program: StepProgram, fqns: tuple[str, ...]) -> str:
    """The axis that the parameters of a group are gathered over, the same for all."""
    (axis,) = {program.parameters[fqn].axis for fqn in fqns}
    return axis


def _gather(program: StepProgram, graph: fx.Graph, group: fx.Node, readers: list[fx.Node]) -> fx.Node:
    """Insert the gather of `group` before the first reader and hand the result to every reader."""
    with graph.inserting_before(readers[0]):
        start = graph.call_function(collectives.all_gather, (group, _axis(program, source(group).names)))
        done = graph.call_function(collectives.wait, (start,))
    for node in (start, done):
        node.meta.update(fqns=source(group).names, val=group.meta["val"])
    for reader in readers:
        reader.replace_input_with(group, done)
    return done


def _after(graph: fx.Graph, node: fx.Node, collective: Callable[..., Any], axis: str) -> fx.Node:
    with graph.inserting_after(node):
        start = graph.call_function(collective, (node, axis))
    with graph.inserting_after(start):
        done = graph.call_function(collectives.wait, (start,))
    start.meta["fqns"] = done.meta["fqns"] = node.meta["fqns"]
    return done


def _reads(program: StepProgram, call: fx.Node, group: fx.Node) -> bool:
    """Whether the backward of `call` takes any parameter of `group`."""
    start = 0
    for argument, names in zip(split_groups(call)[0], call.meta["group_names"], strict=True):
        width = len(names)
        if argument is group:
            wanted = {index for kind, index in program.compute_of(call).saved if kind == "parameter"}
            return bool(wanted & set(range(start, start + width)))
        start += width
    return False


def _drop(call: fx.Node, group: fx.Node) -> None:
    """The backward of `call` takes nothing of `group`: hand it an empty place instead."""
    call.args = tuple(None if argument is group else argument for argument in call.args)
