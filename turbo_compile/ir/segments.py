"""Cut a flat torch-level graph into segments, and find the ones that are the same."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from turbo_compile._torch import OpOverload
from turbo_compile.ir.graphs import placeholders, results_of, set_results


def value_of(node: fx.Node) -> Any:
    """The fake value a captured node carries."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def is_size(node: fx.Node) -> bool:
    """Whether a node is an integer or a tuple of them: recomputed where it is used, never passed between segments."""
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, torch.SymInt)) for item in value)
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


_WRITES = (
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.iand,
    operator.ior,
)


def writes(node: fx.Node) -> bool:
    """Whether a torch-level node changes its first argument in place: `x[i] = v`, `x += v`, `x.scatter_(...)`."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", "")
    inplace = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    return node.target in _WRITES or inplace or (name.endswith("_") and not name.endswith("__"))


def eliminate_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, but never a write: its effect is on a value somebody may read.

    torch.fx's own takes writes for dead code, and so do the subgraphs it visits.
    """
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not writes(node):
            graph.erase_node(node)


def extract(
    nodes: Sequence[fx.Node], parameters: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """`nodes` as a graph of their own: `parameters` first, then every other tensor they read, in order of use.

    Returns the graph module and the outer nodes that feed its inputs. Sizes computed outside are recomputed inside,
    from an input that has them.
    """
    inside = set(nodes)
    inputs: list[fx.Node] = []
    sizes: list[fx.Node] = []
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument in inside or argument in parameters:
                continue
            bucket = sizes if is_size(argument) else inputs
            if argument not in bucket:
                bucket.append(argument)
    for output in outputs:
        if output not in inside and output not in parameters and output not in inputs:
            inputs.append(output)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (*parameters, *inputs):
        env[node] = graph.placeholder(node.name)
        env[node].meta["val"] = value_of(node)
    for node in sizes:
        env[node] = _size(graph, node, env, inputs)
    for node in nodes:
        env[node] = graph.node_copy(node, lambda argument: env[argument])
    graph.output(tuple(env[node] for node in outputs))
    eliminate_dead(graph)
    graph.lint()
    return fx.GraphModule(nn.Module(), graph), inputs


def _size(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], inputs: Iterable[fx.Node]) -> fx.Node:
    """The size `node` computed again inside a segment."""
    if node in env:
        return env[node]
    value = value_of(node)
    home = home_of(list(inputs), value.node.expr) if isinstance(value, torch.SymInt) else None
    if home is not None:
        env[node] = graph.call_function(torch.ops.aten.sym_size.int, (env[home[0]], home[1]))
        env[node].meta["val"] = value
    else:
        env[node] = graph.node_copy(node, lambda argument: _size(graph, argument, env, inputs))
    return env[node]


def reorder(module: fx.GraphModule, order: Sequence[int]) -> fx.GraphModule:
    """The same graph with its placeholders in `order`."""
    old = placeholders(module.graph)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for index in order:
        env[old[index]] = graph.node_copy(old[index])
        env[old[index]].meta["val"] = value_of(old[index])
    for node in module.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda argument: env[argument])
    return fx.GraphModule(module, graph)


def read_sizes_once(module: fx.GraphModule) -> None:
    """Read each symbol once, at the top, from the first input that has it: equal blocks then are equal texts."""
    graph = module.graph
    sizes = [node for node in graph.nodes if node.target is torch.ops.aten.sym_size.int]
    reads = [node for node in sizes if isinstance(value_of(node), torch.SymInt)]
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    made: dict[Any, fx.Node] = {}
    for symbol in sorted({value_of(node).node.expr for node in reads}, key=str):
        home = home_of(placeholders(graph), symbol)
        if home is None or first is None:
            continue
        with graph.inserting_before(first):
            made[symbol] = graph.call_function(torch.ops.aten.sym_size.int, home)
        made[symbol].meta["val"] = next(value_of(node) for node in reads if value_of(node).node.expr == symbol)
    for node in reads:
        if value_of(node).node.expr in made:
            node.replace_all_uses_with(made[value_of(node).node.expr])
            graph.erase_node(node)
    module.recompile()


def home_of(inputs: Sequence[fx.Node], symbol: Any) -> tuple[fx.Node, int] | None:
    """The first input, and its dim, whose size is exactly `symbol`."""
    for node in inputs:
        value = value_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                return node, dim
    return None


def keep_outputs(module: fx.GraphModule, indices: Sequence[int]) -> None:
    """Return only the outputs at `indices`, and compute no others."""
    results = results_of(module.graph)
    set_results(module.graph, tuple(results[index] for index in indices))
    eliminate_dead(module.graph)
    module.recompile()


def fingerprint(module: fx.GraphModule) -> str:
    """Equal for graphs that compute the same from inputs of the same shape, dtype and device."""
    index: dict[fx.Node, str] = {}
    lines = []
    for node in module.graph.nodes:
        index[node] = f"%{len(index)}"
        if node.op == "placeholder":
            lines.append(f"in {_type(value_of(node))}")
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: _Name(index[argument]))
        lines.append(f"{node.op} {_target(node)} {args} {kwargs}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Name(str):
    """A node's place in order, printed bare."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _target(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else f"{getattr(node.target, '__module__', '')}.{node.target}"


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device}"
    return str(value)


def clone_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be rewritten, sharing fake values with the original."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, lambda argument: env[argument])
        env[node].meta = copy.copy(node.meta)
    return fx.GraphModule(module, graph)
