"""From a step program to code that runs: segments compiled once each, outer graphs as Python that calls them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from turbo_compile import _torch, collectives, exchange
from turbo_compile.errors import TurboCompileError
from turbo_compile.ir.graphs import argument, placeholders
from turbo_compile.ir.mesh import Axes
from turbo_compile.ir.placement import Layout
from turbo_compile.ir.program import Compute, Parameter, StepProgram, source

BACKENDS = ("inductor", "eager")
Compiled = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Executable:
    """A step that runs. `forward` takes the placeholders named in `inputs`; `backward` those in `backward_inputs`."""

    program: StepProgram
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    backward_unreduced: fx.GraphModule | None
    inputs: tuple[fx.Node, ...]
    backward_inputs: tuple[fx.Node, ...]
    bundle_names: tuple[str, ...]


def lower(
    program: StepProgram,
    axes: Axes,
    layouts: dict[str, Layout],
    reduce_dtype: torch.dtype,
    pending: dict[str, torch.Tensor],
    backend: str,
) -> Executable:
    """Compile every segment of `program` with `backend` and bind its collectives to the process groups of `axes`.

    `pending` holds gradients, by FQN, that the next reduction adds.

    Raises:
        TurboCompileError: Inductor rejects a segment; the message names it.
    """
    compiled = {name: _compile(compute, program, backend) for name, compute in program.computes.items()}
    binder = _Binder(program, axes, layouts, reduce_dtype, pending, compiled)
    forward = binder.bind(program.forward)
    backward = unreduced = None
    if program.backward is not None:
        backward = binder.bind(program.backward)
        unreduced = binder.bind(without_reductions(program.backward))
    bundles = tuple(source(node).names[0] for node in _inputs(program.backward) if source(node).kind == "saved")
    return Executable(
        program, forward, backward, unreduced, _inputs(program.forward), _inputs(program.backward), bundles
    )


def without_reductions(graph: fx.Graph) -> fx.Graph:
    """The backward graph that hands out gradients as they are, for calls that defer the reduction."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph, env))
    for old, node in env.items():
        node.meta = dict(old.meta)
    reductions = (collectives.reduce_scatter, collectives.all_reduce)
    for wait in [node for node in new.nodes if node.target is collectives.wait]:
        start = wait.args[0]
        if start.target in reductions:
            wait.replace_all_uses_with(start.args[0])
            new.erase_node(wait)
            new.erase_node(start)
    return new


def _inputs(graph: fx.Graph | None) -> tuple[fx.Node, ...]:
    return tuple(placeholders(graph)) if graph is not None else ()


# --- segments --------------------------------------------------------------------------------------------------------


def _compile(compute: Compute, program: StepProgram, backend: str) -> tuple[Compiled, Compiled | None]:
    build = _inductor if backend == "inductor" else _interpreted
    try:
        forward = build(compute.forward, program, False)
        backward = build(compute.backward, program, True) if compute.backward is not None else None
    except Exception as error:
        raise TurboCompileError(f"{backend} rejects segment {compute.name} of {program.name}: {error}") from error
    return forward, backward


def _inductor(graph: fx.GraphModule, program: StepProgram, backward: bool) -> Compiled:
    values = [node.meta["val"] for node in placeholders(graph.graph)]
    if not any(node.op == "call_function" for node in graph.graph.nodes):
        return _interpreted(graph, program, backward)  # nothing to compile: it hands its inputs on
    return _torch.compile_graph(graph, values, program.fake_mode, backward=backward)


def _interpreted(graph: fx.GraphModule, program: StepProgram, backward: bool) -> Compiled:
    graph.recompile()

    def run(arguments: list[Any]) -> Sequence[Any]:
        taken = list(arguments)
        arguments.clear()
        return graph(*taken)

    return run


class _Forward(nn.Module):
    """One use of a compute in the forward graph: groups and inputs -> outputs, then the bundle of saved values."""

    def __init__(self, compute: Compute, run: Compiled, groups: int) -> None:
        super().__init__()
        self.run = run
        self.groups = groups
        self.outputs = compute.outputs
        self.strides = _orders(compute.forward)
        self.kept = tuple(index for kind, index in compute.saved if kind == "input")
        self.saves = compute.backward is not None

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        inputs = arguments[self.groups :]
        flat = [parameter for group in arguments[: self.groups] for parameter in group]
        flat.extend(inputs)
        results = self.run(flat)
        if not self.saves:
            return tuple(results)
        bundle = [inputs[index] for index in self.kept]
        bundle.extend(results[self.outputs :])
        return (*results[: self.outputs], bundle)


class _Backward(nn.Module):
    """The backward of one use: groups, bundle, tangents -> a tuple of gradients a group, then those of the inputs."""

    def __init__(self, compute: Compute, run: Compiled, widths: Sequence[int]) -> None:
        super().__init__()
        self.run = run
        self.groups = len(widths)
        owner = [(g, i) for g, width in enumerate(widths) for i in range(width)]
        kept = [index for kind, index in compute.saved if kind == "input"]
        self.sources = tuple(
            owner[index] if kind == "parameter" else (-1, kept.index(index) if kind == "input" else len(kept) + index)
            for kind, index in compute.saved
        )
        taken = [owner[index][0] for kind, index in compute.gradients if kind == "parameter"]
        self.splits = tuple(taken.count(group) for group in range(self.groups) if group in taken)
        assert compute.backward is not None
        self.orders = _orders(compute.backward)[len(compute.saved) :]

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        bundle = arguments[self.groups]
        flat = [bundle[i] if g < 0 else arguments[g][i] for g, i in self.sources]
        bundle.clear()
        for tangent, order in zip(arguments[self.groups + 1 :], self.orders, strict=True):
            flat.append(_in_order(tangent, order))
        results = self.run(flat)
        grouped = []
        start = 0
        for width in self.splits:
            grouped.append(tuple(results[start : start + width]))
            start += width
        return (*grouped, *results[start:])


def _orders(graph: fx.GraphModule) -> tuple[tuple[int, ...] | None, ...]:
    """For each placeholder, the dims from slowest to fastest in memory as it was traced; None for the usual order."""
    orders: list[tuple[int, ...] | None] = []
    for node in placeholders(graph.graph):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.is_contiguous():
            orders.append(None)
            continue
        hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.stride()]
        orders.append(tuple(sorted(range(value.dim()), key=lambda dim: -hints[dim])))
    return tuple(orders)


def _in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor laid out as its segment was compiled for; a copy only if it is not."""
    if order is None:
        return tensor.contiguous()
    return tensor.permute(order).contiguous().permute(tuple(order.index(dim) for dim in range(len(order))))


def take(holder: list[Any]) -> Any:
    """The one value of a list, and the list left empty: whoever passed it no longer keeps it alive."""
    return holder.pop()


# --- outer graphs ----------------------------------------------------------------------------------------------------


class _Binder:
    """Turns an outer graph into Python: calls to compiled segments, collectives on real process groups."""

    def __init__(
        self,
        program: StepProgram,
        axes: Axes,
        layouts: dict[str, Layout],
        reduce_dtype: torch.dtype,
        pending: dict[str, torch.Tensor],
        compiled: dict[str, tuple[Compiled, Compiled | None]],
    ) -> None:
        self.program = program
        self.axes = axes
        self.layouts = layouts
        self.reduce_dtype = reduce_dtype
        self.pending = pending
        self.compiled = compiled

    def bind(self, graph: fx.Graph) -> fx.GraphModule:
        root = nn.Module()
        new = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        taken = []
        for node in graph.nodes:
            if node.op == "call_module":
                name = f"{node.target}_{'_'.join(map(str, self._widths(node)))}"
                if not hasattr(root, name):
                    root.add_module(name, self._segment(node))
                env[node] = new.call_module(name, fx.map_arg(_arguments(node), lambda n: env[n]))
            elif node.target in collectives.STARTS or node.target is collectives.wait:
                root.add_module(node.name, self._collective(node))
                env[node] = new.call_module(node.name, fx.map_arg(node.args[:1], lambda n: env[n]))
            else:
                env[node] = new.node_copy(node, lambda n: env[n])
                if node.op == "placeholder" and source(node).kind in ("kept", "tangent"):
                    taken.append(node)
        self._take(new, env, taken)
        new.lint()
        return fx.GraphModule(root, new)

    def _take(self, graph: fx.Graph, env: dict[fx.Node, fx.Node], nodes: list[fx.Node]) -> None:
        """What backward alone still needs arrives in a list of one, so that it is freed after its last use."""
        for node in nodes:
            with graph.inserting_after(placeholders(graph)[-1]):
                value = graph.call_function(take, (env[node],))
            env[node].replace_all_uses_with(value, delete_user_cb=partial(operator.is_not, value))

    def _widths(self, call: fx.Node) -> list[int]:
        """Parameters in each group of a call."""
        return [len(names) for names in call.meta["group_names"]]

    def _segment(self, call: fx.Node) -> nn.Module:
        compute = self.program.compute_of(call)
        forward, backward = self.compiled[compute.name]
        if call.meta.get("backward"):
            assert backward is not None
            return _Backward(compute, backward, self._widths(call))
        return _Forward(compute, forward, call.meta["groups"])

    def _collective(self, node: fx.Node) -> nn.Module:
        if node.target is collectives.wait:
            start: fx.Node = argument(node)
            return exchange.WAITS[start.target](**self._facts(start))
        return exchange.STARTS[node.target](**self._facts(node))

    def _facts(self, node: fx.Node) -> dict[str, Any]:
        parameters = [self.program.parameters[fqn] for fqn in node.meta.get("fqns", ())]
        return {
            "axes": self.axes,
            "axis": node.args[1],
            "to": node.args[2] if len(node.args) > 2 else "",
            "layouts": [self._layout(parameter) for parameter in parameters],
            "parameters": parameters,
            "reduce_dtype": self.reduce_dtype,
            "pending": self.pending,
        }

    def _layout(self, parameter: Parameter) -> Layout:
        """How a parameter lies on the axis it is gathered over."""
        if parameter.axis == "shard":
            return self.layouts[parameter.fqn]
        ranks = self.axes.sizes[parameter.axis]
        return Layout(parameter.shape, ranks, ranks > 1)


def _arguments(call: fx.Node) -> tuple[Any, ...]:
    return tuple(() if value is None else value for value in call.args)
