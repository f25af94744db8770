"""From a forward program to a training step: each segment differentiated once, the outer graph reversed."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from turbo_compile import collectives
from turbo_compile.errors import InvalidProgram
from turbo_compile.ir.graphs import argument, placeholders, results_of
from turbo_compile.ir.joint import Joint, trace_joint
from turbo_compile.ir.program import Program, Segment, Source, StepProgram, source, split_groups
from turbo_compile.ir.segments import writes

# What gives, or may give, another name to the memory of its first argument.
_VIEWS = frozenset(
    [
        "getattr",
        "getitem",
        "view",
        "view_as",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "t",
        "swapaxes",
        "movedim",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "narrow",
        "select",
        "chunk",
        "split",
        "tensor_split",
        "unbind",
        "contiguous",
        "to",
        "float",
        "type_as",
        "diagonal",
    ]
)


def differentiate(program: Program, differentiable: tuple[str, ...]) -> StepProgram:
    """The step that computes `program` and the gradients of its `differentiable` outputs.

    Every call starts in mode `none`; the backward outer graph is the forward one reversed, gradients summed where a
    value or a group was used twice. With nothing differentiable the step has no backward.
    """
    return _Differentiation(program, differentiable).step()


@dataclass(slots=True)
class _Need:
    """Which placeholders of a call's segment get gradients, and from which outputs."""

    requires: tuple[bool, ...]
    outputs: tuple[bool, ...]


@dataclass(slots=True)
class _Differentiation:
    program: Program
    differentiable: tuple[str, ...]
    joints: dict[tuple[Any, ...], Joint] = field(default_factory=dict)
    needs: dict[fx.Node, _Need] = field(default_factory=dict)
    routes: set[fx.Node] = field(default_factory=set)  # what backward sends rows back along

    def step(self) -> StepProgram:
        self._find_needs()
        forward, bundles = self._forward()
        step = StepProgram(
            name=self.program.name,
            forward=forward,
            backward=None,
            computes={},
            joints={},
            parameters=self.program.parameters,
            blocks=self.program.blocks,
            outputs=self.program.outputs,
            fake_mode=self.program.fake_mode,
            batch_symbol=self.program.batch_symbol,
            sequence_symbol=self.program.sequence_symbol,
            guards=self.program.guards,
            sliced=self.program.sliced,
            fused=dict(self.program.fused),
            differentiable=self.differentiable,
        )
        for joint in self.joints.values():
            step.joints[joint.name] = joint
            step.compute(joint.name, "none")
        if bundles:
            step.backward, step.gradient_groups = self._backward(bundles)
        return step

    # --- who needs a gradient ---------------------------------------------------------------------------------------

    def _find_needs(self) -> None:
        depends = {name: _dependencies(segment) for name, segment in self.program.segments.items()}
        requires: dict[fx.Node, tuple[bool, ...]] = {}
        for node in self.program.graph.nodes:
            requires[node] = self._requires(node, requires, depends)
        wanted: set[fx.Node] = set()
        for name, result in zip(self.program.outputs, results_of(self.program.graph), strict=True):
            if name in self.differentiable:
                wanted.add(result)
        for node in reversed(self.program.graph.nodes):
            if node.op == "call_module":
                self._need(node, requires, wanted, depends[str(node.target)])
            elif node.op == "call_function" and node in wanted and collectives.passes_gradient(node):
                wanted.add(argument(node))
            elif node.op == "call_function" and node in wanted and (moved := collectives.routed(node)):
                wanted.add(moved[0])
                if any(requires[moved[0]]):
                    self.routes.add(moved[1])
            elif node.target is collectives.wait:
                values = collectives.exchanged(node)
                wanted.update(values[argument(part, 1)] for part in node.users if values and part in wanted)

    def _requires(
        self, node: fx.Node, requires: dict[fx.Node, tuple[bool, ...]], depends: dict[str, list[set[int]]]
    ) -> tuple[bool, ...]:
        """Whether a gradient could flow into each part of an outer value."""
        if node.op == "placeholder":
            found = source(node)
            return tuple(found.kind == "group" and self.program.parameters[fqn].trainable for fqn in found.names)
        if node.op == "call_module":
            flags = _flags(node, requires)
            return tuple(any(flags[i] for i in inputs) for inputs in depends[str(node.target)])
        if node.target is operator.getitem:
            return (requires[argument(node)][argument(node, 1)],)
        if collectives.passes_gradient(node):
            return requires[argument(node)]
        if node.op == "call_function" and (moved := collectives.routed(node)):
            return requires[moved[0]]
        if node.op == "call_function" and (values := collectives.exchanged(node)):
            return tuple(any(requires[value]) for value in values)
        return (False, False)

    def _need(
        self, call: fx.Node, requires: dict[fx.Node, tuple[bool, ...]], wanted: set[fx.Node], depends: list[set[int]]
    ) -> None:
        parts = {argument(user, 1): user for user in call.users}
        outputs = tuple(
            bool(requires[call][i]) and i in parts and parts[i] in wanted for i in range(len(requires[call]))
        )
        reached = set().union(*(depends[i] for i, needed in enumerate(outputs) if needed))
        flags = tuple(flag and i in reached for i, flag in enumerate(_flags(call, requires)))
        self.needs[call] = _Need(flags, outputs)
        position = 0
        groups, inputs = split_groups(call)
        for group in groups:
            position += len(source(group).names)
        for value in inputs:
            if flags[position]:
                wanted.add(value)
            position += 1

    # --- the two outer graphs -----------------------------------------------------------------------------------------

    def _forward(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        bundles: dict[fx.Node, fx.Node] = {}
        for node in self.program.graph.nodes:
            if node.op == "output":
                graph.output((fx.map_arg(node.args[0], lambda n: env[n]), tuple(bundles.values()), ()))
                continue
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node in self.routes:
                bundles[node] = env[node]
                bundles[node].meta["bundle"] = f"{node.meta['call'].fqn}.route"
            if node.op != "call_module":
                continue
            joint = self._joint(node)
            env[node].target = joint.named("none")
            env[node].meta["joint"] = joint.name
            if joint.tangents:
                bundles[node] = graph.call_function(operator.getitem, (env[node], joint.outputs))
                bundles[node].meta["bundle"] = node.meta["call"].label
        return graph, bundles

    def _joint(self, call: fx.Node) -> Joint:
        """The joint graph of a call's segment for its pattern of gradients, traced once."""
        need = self.needs[call]
        segment = self.program.segments[str(call.target)]
        key = (segment.name, need.requires if any(need.outputs) else (), need.outputs)
        if key not in self.joints:
            same = sum(name == segment.name for name, *_ in self.joints)
            name = segment.name if not same else f"{segment.name}_v{same + 1}"
            requires = need.requires if any(need.outputs) else (False,) * len(need.requires)
            self.joints[key] = trace_joint(name, segment, requires, need.outputs, self.program.fake_mode)
        return self.joints[key]

    def _backward(self, bundles: dict[fx.Node, fx.Node]) -> tuple[fx.Graph, tuple[tuple[str, ...], ...]]:
        graph = fx.Graph()
        gradients: dict[fx.Node, fx.Node] = {}
        for name, result in zip(self.program.outputs, results_of(self.program.graph), strict=True):
            if name in self.differentiable:
                tangent = graph.placeholder(f"d_{name}")
                tangent.meta.update(source=Source("tangent", (name,)), val=result.meta["val"])
                gradients[result] = tangent
        saved: dict[fx.Node, fx.Node] = {}
        for call, bundle in bundles.items():
            saved[call] = graph.placeholder(f"s_{bundle.meta['bundle'].replace('.', '_')}")
            saved[call].meta["source"] = Source("saved", (bundle.meta["bundle"],))
        groups: dict[fx.Node, fx.Node] = {}
        for group in placeholders(self.program.graph):
            if source(group).kind == "group" and any(user in bundles for user in group.users):
                groups[group] = graph.node_copy(group)
        for node in reversed(self.program.graph.nodes):
            if node in bundles and node.op == "call_module":
                self._reverse(graph, node, saved[node], groups, gradients)
            elif node.op == "call_function" and node in gradients and collectives.passes_gradient(node):
                _accumulate(graph, gradients, argument(node), gradients[node])
            elif node.target is collectives.wait and collectives.exchanged(node):
                _exchange_back(graph, node, gradients)
            elif node.target is collectives.wait and node in gradients and (moved := collectives.routed(node)):
                back = collectives.send_back(graph, node, gradients[node], saved[moved[1]])
                back.meta["val"] = moved[0].meta["val"]
                _accumulate(graph, gradients, moved[0], back)
        found = [(group, gradients[group]) for group in groups if group in gradients]
        graph.output(tuple(gradient for _, gradient in found))
        return graph, tuple(tuple(gradient.meta["fqns"]) for _, gradient in found)

    def _reverse(
        self,
        graph: fx.Graph,
        call: fx.Node,
        bundle: fx.Node,
        groups: dict[fx.Node, fx.Node],
        gradients: dict[fx.Node, fx.Node],
    ) -> None:
        """The backward of one call: groups, its bundle, the tangents of its outputs -> gradients of what it read."""
        joint = self._joint(call)
        parts = {argument(user, 1): user for user in call.users}
        tangents = [gradients.get(parts[i]) for i in joint.tangents]
        if any(tangent is None for tangent in tangents):
            raise InvalidProgram(f"{call.meta['call'].label}: an output that is differentiated got no gradient")
        call_groups, inputs = split_groups(call)
        arguments = (*(groups[group] for group in call_groups), bundle, *tangents)
        back = graph.call_module(f"{joint.named('none')}_backward", arguments)
        back.meta.update(
            groups=len(call_groups),
            group_names=call.meta["group_names"],
            call=call.meta["call"],
            joint=joint.name,
            backward=True,
        )
        taken = joint.gradient_positions()
        result = 0
        start = 0
        for group in call_groups:
            names = source(group).names
            got = [fqn for offset, fqn in enumerate(names) if start + offset in taken]
            start += len(names)
            if got:
                part = graph.call_function(operator.getitem, (back, result))
                part.meta["fqns"] = tuple(got)
                _accumulate(graph, gradients, group, part)
                result += 1
        for offset, value in enumerate(inputs):
            if start + offset in taken:
                part = graph.call_function(operator.getitem, (back, result))
                part.meta["val"] = value.meta["val"]
                _accumulate(graph, gradients, value, part)
                result += 1


def _exchange_back(graph: fx.Graph, done: fx.Node, gradients: dict[fx.Node, fx.Node]) -> None:
    """Send the gradients of what an all_to_all gave back to where the values came from."""
    values = collectives.exchanged(done)
    found = [(values[argument(part, 1)], gradients[part]) for part in done.users if part in gradients]
    if not found:
        return
    back = collectives.exchange_back(graph, done, tuple(gradient for _, gradient in found))
    for index, (value, _) in enumerate(found):
        part = graph.call_function(operator.getitem, (back, index))
        part.meta["val"] = value.meta["val"]
        _accumulate(graph, gradients, value, part)


def _accumulate(graph: fx.Graph, gradients: dict[fx.Node, fx.Node], value: fx.Node, part: fx.Node) -> None:
    before = gradients.get(value)
    if before is None:
        gradients[value] = part
    elif "fqns" in part.meta:
        gradients[value] = _add_groups(graph, before, part)
    else:
        gradients[value] = graph.call_function(operator.add, (before, part))
        gradients[value].meta["val"] = part.meta["val"]


def _add_groups(graph: fx.Graph, before: fx.Node, part: fx.Node) -> fx.Node:
    """The sum of a group's gradients from two uses, which may train different parameters of it."""
    first, second = before.meta["fqns"], part.meta["fqns"]
    names = tuple(dict.fromkeys((*first, *second)))
    if first == second:
        total = graph.call_function(collectives.add_gradients, (before, part))
    else:
        places = tuple(
            (first.index(fqn) if fqn in first else None, second.index(fqn) if fqn in second else None) for fqn in names
        )
        total = graph.call_function(collectives.add_gradients, (before, part), {"places": places})
    total.meta["fqns"] = names
    return total


def _dependencies(segment: Segment) -> list[set[int]]:
    """For each output, the placeholders that a gradient could reach from it: also through a write to a value."""
    reached: dict[fx.Node, set[int]] = {}
    base: dict[fx.Node, fx.Node] = {}  # whose memory a value may be
    graph = segment.module.graph
    for index, node in enumerate(placeholders(graph)):
        reached[node] = {index} if _floating(node) else set()
    for node in graph.nodes:
        base[node] = node
        if node.op in ("placeholder", "output"):
            continue
        sets = [reached[n] for n in node.all_input_nodes]
        reached[node] = set().union(*sets) if _floating(node) else set()
        if node.all_input_nodes and (writes(node) or _may_be_view(node)):
            base[node] = base[node.all_input_nodes[0]]
        if writes(node):
            for other in [other for other in reached if base[other] is base[node]]:
                reached[other] = reached[other] | reached[node]
    return [reached[n] if isinstance(n, fx.Node) and _floating(n) else set() for n in results_of(graph)]


def _may_be_view(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", str(node.target)) in _VIEWS


def _floating(node: fx.Node) -> bool:
    """False only for a node known to be an integer or boolean: no gradient flows through it."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return not isinstance(value, (int, torch.SymInt)) and not (
        isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    )


def _flags(call: fx.Node, requires: dict[fx.Node, tuple[bool, ...]]) -> list[bool]:
    """Whether each placeholder of a call's segment could need a gradient."""
    groups, inputs = split_groups(call)
    flags = [flag for group in groups for flag in requires[group]]
    return flags + [isinstance(value, fx.Node) and any(requires[value]) for value in inputs]
