"""A segment's joint graph, and the partitions of it that may live side by side.

A partition is a forward and a backward graph with everything that passes between them named. What is computed from
parameters alone is never saved: backward takes the parameter again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from turbo_compile import _torch
from turbo_compile.errors import InvalidProgram, UnsupportedOp
from turbo_compile.ir.graphs import output_node, placeholders, results_of, set_results
from turbo_compile.ir.program import Compute, Segment
from turbo_compile.ir.segments import clone_module

MODES = ("none", "selective", "full")
_MATMULS: tuple[str, ...] = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "grouped_mm", "convolution", "linear")
_MATMULS += ("gathered_mm", "gated_mm", "gated_mm_combine")
_KEPT = ("attention", "dispatch", "route")
_OWN_STORAGE = ("non_alias", "unsafe_view_alias")  # AOTAutograd's words for outputs that share no memory


@dataclass(frozen=True, slots=True)
class Joint:
    """Forward and backward of a segment in one ATen graph.

    `tangents` are the outputs that have one; a segment that nothing is differentiated through has none, and `graph`
    is then its forward alone.
    """

    name: str
    graph: fx.GraphModule
    parameters: int
    inputs: int
    outputs: int
    tangents: tuple[int, ...]

    def named(self, mode: str) -> str:
        """What its compute in `mode` is called."""
        return f"{self.name}_{mode}" if self.tangents else self.name

    def partition(self, mode: str) -> Compute:
        """The segment cut for `mode`: none keeps matmul and attention outputs, selective attention outputs and
        dispatched rows, full only the inputs."""
        name = self.named(mode)
        whole = Compute(name, self.graph, None, self.parameters, self.inputs, self.outputs)
        if not self.tangents:
            return whole
        graph = clone_module(self.graph)
        _tag(graph, self.parameters, mode)
        forward, backward = _torch.partition_joint(graph, self.outputs)
        saved, values = self._saved(forward, backward)
        set_results(forward.graph, (*results_of(forward.graph)[: self.outputs], *values))
        forward.graph.eliminate_dead_code()
        forward.recompile()
        gradients = self._gradients(backward)
        return replace(
            whole, forward=forward, backward=backward, saved=saved, tangents=self.tangents, gradients=gradients
        )

    def gradient_positions(self) -> set[int]:
        """The placeholders of the segment that get a gradient, whatever the mode."""
        gradients = results_of(self.graph.graph)[self.outputs :]
        return {i for i, gradient in enumerate(gradients) if gradient is not None}

    def _saved(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[tuple[Any, ...], list[fx.Node]]:
        """Where each saved input of the backward comes from, and the forward nodes that become new outputs."""
        position = {node.name: i for i, node in enumerate(placeholders(forward.graph))}
        available = {node.name: node for node in results_of(forward.graph)[self.outputs :]}
        saved: list[tuple[str, int]] = []
        values: list[fx.Node] = []
        for node in placeholders(backward.graph)[: -len(self.tangents) or None]:
            if node.name in position:
                index = position[node.name]
                parameter = index < self.parameters
                saved.append(("parameter", index) if parameter else ("input", index - self.parameters))
            elif node.name in available:
                saved.append(("value", len(values)))
                values.append(available[node.name])
            else:
                raise InvalidProgram(f"segment {self.name}: backward reads {node.name}, which forward does not save")
        return tuple(saved), values

    def _gradients(self, backward: fx.GraphModule) -> tuple[Any, ...]:
        """Which inputs get a gradient; the backward's output is cut down to those."""
        results = results_of(backward.graph)
        kept = [i for i, result in enumerate(results) if result is not None]
        set_results(backward.graph, tuple(results[i] for i in kept))
        backward.recompile()
        return tuple(("parameter", i) if i < self.parameters else ("input", i - self.parameters) for i in kept)


def trace_joint(name: str, segment: Segment, requires: Sequence[bool], needed: Sequence[bool], mode: Any) -> Joint:
    """The joint graph of `segment`, with gradients of the outputs in `needed` for the placeholders in `requires`."""
    module = clone_module(segment.module)
    _detach_outputs(module, needed)
    joint, facts = _export(module, segment, requires, mode)
    aliased = [i for i, info in enumerate(facts.output_info) if info.output_type.name not in _OWN_STORAGE]
    if aliased:
        _clone_outputs(module, aliased)
        joint, facts = _export(module, segment, requires, mode)
    if facts.num_mutated_inp_runtime_indices:
        raise UnsupportedOp(f"segment {name} writes to one of its inputs in place, which has no rule")
    inputs = len(placeholders(segment.module.graph)) - segment.parameters
    tangents = tuple(i for i, info in enumerate(facts.output_info) if info.requires_grad and any(requires))
    return Joint(name, joint, segment.parameters, inputs, len(facts.output_info), tangents)


def _export(
    module: fx.GraphModule, segment: Segment, requires: Sequence[bool], mode: Any
) -> tuple[fx.GraphModule, Any]:
    fakes = []
    for value, wanted in zip(segment.values(), requires, strict=True):
        if isinstance(value, torch.Tensor):
            with mode, torch.no_grad():
                value = value.detach()
            value.requires_grad_(wanted)
        fakes.append(value)
    with contextlib.ExitStack() as stack:
        return _torch.export_joint(stack, module, tuple(fakes), mode)


def _detach_outputs(module: fx.GraphModule, needed: Sequence[bool]) -> None:
    """Cut the gradient of outputs that nobody differentiates; give a returned input a tensor of its own."""
    results = list(results_of(module.graph))
    with module.graph.inserting_before(output_node(module.graph)):
        for i, wanted in enumerate(needed):
            if isinstance(results[i], fx.Node) and results[i].op == "placeholder":
                results[i] = module.graph.call_method("clone", (results[i],))
            if isinstance(results[i], fx.Node) and not wanted:
                results[i] = module.graph.call_method("detach", (results[i],))
    set_results(module.graph, tuple(results))
    module.recompile()


def _clone_outputs(module: fx.GraphModule, indices: Sequence[int]) -> None:
    results = list(results_of(module.graph))
    with module.graph.inserting_before(output_node(module.graph)):
        for i in indices:
            results[i] = module.graph.call_method("clone", (results[i],))
    set_results(module.graph, tuple(results))
    module.recompile()


def _tag(graph: fx.GraphModule, parameters: int, mode: str) -> None:
    """Tell the partitioner what to save: `mode`'s choice, no view of an input, nothing made of parameters alone."""
    inputs = placeholders(graph.graph)
    derived = set(inputs[:parameters])
    backward = {node for node in inputs if node.name.startswith("tangents")}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if any(argument in backward for argument in node.all_input_nodes):
            backward.add(node)
            continue
        from_parameters = bool(node.all_input_nodes) and all(argument in derived for argument in node.all_input_nodes)
        if from_parameters:
            derived.add(node)
        view = getattr(node.target, "is_view", False) and node.all_input_nodes[0] in inputs
        if from_parameters or view or mode == "full" or (mode == "selective" and _op(node) in _MATMULS):
            _torch.mark_must_recompute(node)
        elif mode == "selective" and _op(node) in _KEPT:
            _torch.mark_must_save(node)


def _op(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
