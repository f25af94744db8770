"""What every program must satisfy, whatever pass made it. Nothing is traced again: checking 94 layers takes a moment.

A rule is a small function that yields the nodes that break it. They read top down: each graph by itself, then the
segments, then what must hold between the graphs of a step.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from turbo_compile.errors import InvalidProgram
from turbo_compile.ir.graphs import output_node, placeholders, results_of
from turbo_compile.ir.locality import mixes_tokens
from turbo_compile.ir.names import (
    adds_gradients,
    before_exchange,
    calls_of,
    collective,
    exchanged_part,
    forward_of,
    group_names,
)
from turbo_compile.ir.program import Call, Program, StepProgram, source, split_groups
from turbo_compile.ir.spelling import dtype_name, expression_of

AXES = ("world", "dp", "shard", "fsdp", "sp", "ep", "edp", "tp", "cp", "pp")
_KINDS = {"fwd": ("batch", "buffer", "group"), "bwd": ("group", "kept", "saved", "tangent")}
_PLAIN = (operator.getitem, operator.add, torch.ops.aten.sym_size.int)
_BY_NAME = ("turbo_compile.collectives", "turbo_compile.kernels.counter_random")

Fault = tuple[fx.Node, str]
Type = tuple[torch.dtype, tuple[Any, ...]]


def verify(program: Program | StepProgram) -> None:
    """Check every rule.

    Raises:
        InvalidProgram: names the node and the rule it breaks; the runner adds which pass left it so.
    """
    view = _View(program)
    for node, rule in _faults(view):
        graph = next((f"{name} " for name, graph in view.graphs if graph is node.graph), "")
        where = f" ({node.meta['call'].fqn})" if "call" in node.meta else ""
        raise InvalidProgram(f"node {graph}%{node.name}{where}: {rule}")


def _faults(view: _View) -> Iterator[Fault]:
    """What breaks a rule. Lazy: a rule may rely on those before it."""
    for rule in _GRAPH_RULES:
        for name, graph in view.graphs:
            yield from rule(view, name, graph)
    for whole in _PROGRAM_RULES:
        yield from whole(view)
    if isinstance(view.program, StepProgram) and view.program.backward is not None:
        for between in _STEP_RULES:
            yield from between(view.program, view.program.backward)


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a call takes and gives: types of parameters and other arguments (None: any), and how many results."""

    parameters: tuple[Type | None, ...]
    inputs: tuple[Type | None, ...]
    results: int


@dataclass(frozen=True, slots=True)
class _View:
    program: Program | StepProgram
    signatures: dict[str, _Signature | None] = field(default_factory=dict)

    @property
    def graphs(self) -> tuple[tuple[str, fx.Graph], ...]:
        return (("fwd", self.program.graph),) if isinstance(self.program, Program) else self.program.graphs()

    def signature(self, call: fx.Node) -> _Signature | None:
        """The signature of what a call names; None if the program has no such segment."""
        target = str(call.target)
        if target not in self.signatures:
            self.signatures[target] = self._read(call, target)
        return self.signatures[target]

    def _read(self, call: fx.Node, target: str) -> _Signature | None:
        if isinstance(self.program, Program):
            segment = self.program.segments.get(target)
            if segment is None:
                return None
            return _signature(segment.module, segment.parameters, len(results_of(segment.module.graph)))
        compute = self.program.computes.get(target.removesuffix("_backward"))
        if compute is None:
            return None
        if not call.meta.get("backward"):
            return _signature(compute.forward, compute.parameters, compute.outputs + (compute.backward is not None))
        if compute.backward is None:
            return None
        tangents = _types(compute.backward)[len(compute.saved) :]
        taken = {index for kind, index in compute.gradients if kind == "parameter"}
        inputs = sum(kind == "input" for kind, _ in compute.gradients)
        grouped = sum(bool(taken & set(places)) for places in _places(call))
        parameters = _types(compute.forward)[: compute.parameters]
        return _Signature(parameters, (None, *tangents), grouped + inputs)


def _signature(module: fx.GraphModule, parameters: int, results: int) -> _Signature:
    types = _types(module)
    return _Signature(types[:parameters], types[parameters:], results)


def _types(module: fx.GraphModule) -> tuple[Type | None, ...]:
    return tuple(_type(node.meta.get("val")) for node in placeholders(module.graph))


def _type(value: Any) -> Type | None:
    """The dtype and shape of a tensor, symbols as expressions: comparing adds no guard. None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, tuple(expression_of(size) for size in value.shape)


def _spelled(kind: Type) -> str:
    return f"{dtype_name(kind[0])}[{', '.join(str(size) for size in kind[1])}]"


def _places(call: fx.Node) -> Iterator[range]:
    """Where each group's parameters lie among all parameters of a call."""
    start = 0
    for names in group_names(call):
        yield range(start, start + len(names))
        start += len(names)


# --- each outer graph by itself --------------------------------------------------------------------------------------


def _in_order(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                yield node, f"reads %{argument.name} before it is made"
        seen.add(node)
    try:
        graph.lint()
    except RuntimeError as error:
        yield output_node(graph), str(error)


def _known_nodes(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    """Placeholders with a source, calls of known segments, boundary ops, collectives and little else."""
    for node in graph.nodes:
        if node.op == "placeholder":
            if "source" not in node.meta or source(node).kind not in _KINDS[name]:
                yield node, f"a placeholder stands for one of {', '.join(_KINDS[name])}"
        elif node.op == "call_module":
            if view.signature(node) is None:
                yield node, f"calls {node.target}, a segment this program does not have"
        elif node.op == "call_function":
            boundary = getattr(node.target, "namespace", "") == "turbo_compile"
            if not boundary and node.target not in _PLAIN and getattr(node.target, "__module__", "") not in _BY_NAME:
                yield node, f"{node.target} is compute, and belongs in a segment"
        elif node.op != "output":
            yield node, f"an outer graph has no {node.op}"


def _sizes_free(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    """B and S stay free: a rewrite whose fake values fixed one would serve a single shape."""
    for node in placeholders(graph):
        if source(node).names == ("ids",):
            wanted = (view.program.batch_symbol, view.program.sequence_symbol)
            for size, symbol in zip(node.meta["val"].shape, wanted, strict=True):
                if symbol.is_Symbol and expression_of(size) != symbol:
                    yield node, f"has size {expression_of(size)} where it was {symbol}: the rewrite holds for one shape"


def _calls_fit(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    """Each call hands over as many groups, parameters and inputs as its segment takes, and takes results it has."""
    for call in calls_of(graph):
        signature = view.signature(call)
        assert signature is not None
        groups, inputs = split_groups(call)
        names = group_names(call)
        if len(groups) != len(names) or sum(map(len, names)) != len(signature.parameters):
            yield call, f"takes {len(signature.parameters)} parameters, and gets groups of {[len(n) for n in names]}"
        if len(inputs) != len(signature.inputs):
            yield call, f"takes {len(signature.inputs)} inputs besides its parameters, and gets {len(inputs)}"
        for group, members in zip(groups, names, strict=False):
            if group is not None and _members(group) != members:
                yield call, f"%{group.name} does not hold the parameters the call reads there: {', '.join(members)}"
        for user in call.users:
            index = user.args[1] if user.target is operator.getitem else None
            if not isinstance(index, int) or not 0 <= index < signature.results:
                yield user, f"a call has {signature.results} results, and each is taken by its number"


def _members(group: fx.Node) -> tuple[str, ...]:
    held = before_exchange(group)
    return source(held).names if held.op == "placeholder" else ()


def _types_agree(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    for call in calls_of(graph):
        signature = view.signature(call)
        assert signature is not None
        for argument, wanted in zip(split_groups(call)[1], signature.inputs, strict=True):
            given = _type(argument.meta.get("val")) if isinstance(argument, fx.Node) else None
            if given is not None and wanted is not None and given != wanted:
                yield call, f"%{argument.name} is {_spelled(given)} where the segment takes {_spelled(wanted)}"
        fqns = [fqn for names in group_names(call) for fqn in names]
        for fqn, wanted in zip(fqns, signature.parameters, strict=True):
            parameter = view.program.parameters[fqn]
            given = (parameter.dtype, tuple(parameter.shape))
            if wanted is not None and given != wanted:
                yield call, f"{fqn} is {_spelled(given)} where the segment takes {_spelled(wanted)}"


def _collectives_pair(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    """Each start has one wait, each wait one start, over an axis there is."""
    for node in graph.nodes:
        kind = collective(node)
        if kind == "wait":
            started = node.args[0]
            if not isinstance(started, fx.Node) or collective(started) in ("", "wait"):
                yield node, "waits for something that no collective started"
        elif kind:
            waits = [user for user in node.users if collective(user) == "wait"]
            if len(waits) != 1 or len(node.users) != 1:
                yield node, f"a started {kind} is waited for once and read by nothing else, not {len(node.users)} times"
            if node.args[1] not in AXES:
                yield node, f"{node.args[1]!r} is no mesh axis; there are {', '.join(AXES)}"


def _gathered_first(view: _View, name: str, graph: fx.Graph) -> Iterator[Fault]:
    """Once parameters are sharded, a call reads none of them ungathered."""
    sharded = any(collective(node) == "all_gather" for _, each in view.graphs for node in each.nodes)
    for call in calls_of(graph) if sharded else ():
        for group in split_groups(call)[0]:
            if group is not None and group.op == "placeholder" and source(group).kind == "group":
                yield call, f"reads %{group.name}, which is sharded, without gathering it"


# --- segments, and the calls of a whole program ----------------------------------------------------------------------


def _plain_segments(view: _View) -> Iterator[Fault]:
    """A segment holds no collective and calls no other: those stand in the outer graph, where passes see them."""
    for name, module in _modules(view.program):
        for node in module.graph.nodes:
            foreign = "c10d" in getattr(node.target, "namespace", "") or collective(node)
            if foreign or node.op == "call_module":
                yield node, f"segment {name} holds {node.target}, which belongs in the outer graph"


def _modules(program: Program | StepProgram) -> Iterator[tuple[str, fx.GraphModule]]:
    if isinstance(program, Program):
        yield from ((segment.name, segment.module) for segment in program.segments.values())
        return
    for compute in program.computes.values():
        yield f"{compute.name} (forward)", compute.forward
        if compute.backward is not None:
            yield f"{compute.name} (backward)", compute.backward


def _blocks_called_once(view: _View) -> Iterator[Fault]:
    """Each block is one call, or one call of each of its pieces."""
    graph = forward_of(view.program)
    called = Counter((call.meta["call"].fqn, call.meta["call"].part) for call in calls_of(graph))
    for block in view.program.blocks:
        parts = [part for fqn, part in called if fqn == block] or [""]
        for part in parts:
            count = called[block, part] if len(parts) == 1 or part else 2  # a block is whole, or in pieces
            if count != 1:
                same = [call for call in calls_of(graph) if call.meta["call"].fqn == block]
                yield (same or [output_node(graph)])[-1], f"block {block} is called {count} times instead of once"


def _token_local(view: _View) -> Iterator[Fault]:
    """Where a rank holds a chunk of the sequence, a segment computes for each token from that token alone."""
    program = view.program
    if isinstance(program, Program) or program.sliced is None or not program.sequence_symbol.is_Symbol:
        return
    for compute in program.computes.values():
        if not any(
            _carries(node.meta.get("val"), program.sequence_symbol) for node in placeholders(compute.forward.graph)
        ):
            continue  # all tokens of some heads, or rows that came from other ranks
        for node, rule in mixes_tokens(compute.forward.graph, program.sequence_symbol):
            yield node, f"segment {compute.name} mixes tokens, of which a rank holds a chunk: {rule}"


def _carries(value: Any, symbol: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return any(symbol in sympy.sympify(expression_of(size)).free_symbols for size in sizes)


# --- forward and backward of a step ----------------------------------------------------------------------------------


def _bundles_read_once(step: StepProgram, backward: fx.Graph) -> Iterator[Fault]:
    """Each saved bundle is read once, by the backward of the call that saved it, in the partition that saved it."""
    _, bundles, _ = results_of(step.forward)
    taken = [node for node in placeholders(backward) if source(node).kind == "saved"]
    saving = [call for call in calls_of(step.forward) if step.compute_of(call).backward is not None]
    returned = [bundle for bundle in bundles if not exchanged_part(bundle)]
    for call in saving[len(returned) :]:
        yield call, f"forward returns {len(returned)} bundles of the {len(saving)} that calls save"
    for node in taken[len(bundles) :]:
        yield node, "takes a bundle that forward does not return"
    for bundle, node in zip(bundles, taken, strict=False):
        call = bundle.args[0]
        readers = list(node.users)
        if exchanged_part(bundle):
            if any(collective(reader) != "all_to_all_rows" for reader in readers):
                yield node, "a route is read by the exchanges that send rows along it, and nothing else"
        elif len(readers) != 1 or readers[0].op != "call_module":
            yield node, f"a bundle is read by one backward call, not by {len(readers)}"
        elif readers[0].meta["call"] != call.meta["call"]:
            yield readers[0], f"reads the bundle of {call.meta['call'].label}"
        elif step.compute_of(readers[0]) is not step.compute_of(call):
            yield readers[0], f"reads what {call.target} saved, but runs {readers[0].target}"
    if len(taken) < len(bundles):
        yield bundles[len(taken)], "is saved, and backward does not take it"


def _parameters_at_hand(step: StepProgram, backward: fx.Graph) -> Iterator[Fault]:
    """A backward call gets each group that it takes parameters of again, and the kept ones are those forward keeps."""
    for call in calls_of(backward):
        wanted = {index for kind, index in step.compute_of(call).saved if kind == "parameter"}
        for group, places, names in zip(split_groups(call)[0], _places(call), group_names(call), strict=True):
            again = [name for place, name in zip(places, names, strict=True) if place in wanted]
            if group is None and again:
                yield call, f"takes {', '.join(again)} again, and gets nothing"
    kept = [_members(node) for node in results_of(step.forward)[2]]
    taken = [node for node in placeholders(backward) if source(node).kind == "kept"]
    for node, names in zip(taken, [*kept, *[()] * len(taken)], strict=False):
        if source(node).names != names:
            yield node, f"takes {', '.join(source(node).names)}, where forward keeps {', '.join(names) or 'nothing'}"
    if len(kept) > len(taken):
        yield results_of(step.forward)[2][len(taken)], "is kept for backward, which does not take it"


def _gradients_complete(step: StepProgram, backward: fx.Graph) -> Iterator[Fault]:
    """Each trained group has one gradient, the sum over all its uses."""
    results = results_of(backward)
    last = output_node(backward)
    if len(results) != len(step.gradient_groups):
        yield last, f"returns {len(results)} gradients for {len(step.gradient_groups)} groups"
    twice = [fqn for fqn, count in Counter(fqn for names in step.gradient_groups for fqn in names).items() if count > 1]
    for fqn in twice:
        yield last, f"{fqn} has more than one gradient"
    uses: dict[str, Counter[Call]] = {}
    for call in calls_of(step.forward):
        fqns = [fqn for names in group_names(call) for fqn in names]
        for kind, index in step.compute_of(call).gradients:
            if kind == "parameter":
                uses.setdefault(fqns[index], Counter())[call.meta["call"]] += 1
    for fqn in sorted(set(uses) - {fqn for names in step.gradient_groups for fqn in names}):
        yield last, f"{fqn} is trained and has no gradient"
    for result, names in zip(results, step.gradient_groups, strict=False):
        if result.meta.get("fqns") != names:
            yield result, f"is returned as the gradient of {', '.join(names)}"
        for fqn in names:
            summed = _summed(result, fqn)
            if fqn not in step.parameters or not step.parameters[fqn].trainable:
                yield result, f"{fqn} is frozen, and gets a gradient"
            for use in uses.get(fqn, Counter()) - summed:
                yield result, f"the gradient of {fqn} leaves out its use in {use.label}"
            for use in summed - uses.get(fqn, Counter()):
                yield result, f"the gradient of {fqn} counts {use.label} twice, or takes what is not its own"


def _summed(result: fx.Node, fqn: str) -> Counter[Call]:
    """The backward calls whose gradients of `fqn` a value is the sum of."""
    value = before_exchange(result)
    if fqn not in value.meta.get("fqns", (fqn,)):
        return Counter()
    if adds_gradients(value):
        return sum((_summed(argument, fqn) for argument in value.args), Counter())  # type: ignore[arg-type]
    made = value.args[0] if value.args else None
    return Counter([made.meta["call"]] if isinstance(made, fx.Node) and made.op == "call_module" else [])


def _gradients_reduced(step: StepProgram, backward: fx.Graph) -> Iterator[Fault]:
    """If any gradient is reduced, each is, once, after it is summed."""
    if not any(collective(node) == "reduce_scatter" for node in backward.nodes):
        return
    for result in results_of(backward):
        kinds = []
        value = result
        while collective(value):
            kinds.append(collective(value))
            value = value.args[0]
        if kinds.count("reduce_scatter") != 1:
            yield result, f"a gradient is reduced once over shard, not {kinds.count('reduce_scatter')} times"
        if adds_gradients(value) and any(collective(argument) for argument in value.all_input_nodes):
            yield value, "adds gradients after their reduction; sum them first, then reduce once"


_GRAPH_RULES: tuple[Callable[[_View, str, fx.Graph], Iterator[Fault]], ...] = (
    _in_order,
    _known_nodes,
    _sizes_free,
    _calls_fit,
    _types_agree,
    _collectives_pair,
    _gathered_first,
)
_PROGRAM_RULES: tuple[Callable[[_View], Iterator[Fault]], ...] = (
    _plain_segments,
    _blocks_called_once,
    _token_local,
)
_STEP_RULES: tuple[Callable[[StepProgram, fx.Graph], Iterator[Fault]], ...] = (
    _bundles_read_once,
    _parameters_at_hand,
    _gradients_complete,
    _gradients_reduced,
)
