"""Cut segments at the collectives a pass put inside them: the pieces are segments, the collectives stand outside.

before   %h1 = block(%w0, %h0)               block: q = f(h);  x = wait(all_to_all(q));  return g(h, x)
after    %q = block_a(%w0, %h0);  %x = wait(all_to_all(%q));  %h1 = block_b(%w0, %h0, %x)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from turbo_compile.ir.graphs import argument, placeholders, results_of
from turbo_compile.ir.names import collective, group_names
from turbo_compile.ir.program import Call, Program, Segment, split_groups
from turbo_compile.ir.segments import extract, fingerprint, is_size, value_of

_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class _Piece:
    """What lies between collectives, as nodes of the segment it was cut from; `name` is that of the segment it is now.

    `groups` says which of a call's groups it reads. `exchanges` are the collectives that start where it ends. A piece
    without a name computes nothing: one collective follows another.
    """

    name: str
    part: str
    groups: tuple[int, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    exchanges: tuple[fx.Node, ...]


def cut_at_collectives(program: Program) -> None:
    """Replace each call of a segment that holds collectives by calls of its pieces.

    A piece is called by the tag `meta["piece"]` of any of its nodes, else a, b, c; equal pieces are one segment.
    """
    cutting = _Cutting(program)
    for call in list(program.calls()):
        cutting.replace(call)
    for name, pieces in cutting.pieces.items():
        if pieces:
            del program.segments[name]


@dataclass(slots=True)
class _Cutting:
    program: Program
    pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)

    def replace(self, call: fx.Node) -> None:
        name = str(call.target)
        segment = self.program.segments[name]
        if name not in self.pieces:
            self.pieces[name] = list(self._cut(segment, call))
        if self.pieces[name]:
            _call_pieces(self.program.graph, call, segment, self.pieces[name])

    def _cut(self, segment: Segment, call: fx.Node) -> Iterator[_Piece]:
        """The pieces of a segment in the order they run; none if it holds no collective."""
        graph = segment.module.graph
        level = _levels(graph)
        last = max(level.values(), default=0)
        members = iter(placeholders(graph))
        groups = [[next(members) for _ in names] for names in group_names(call)]
        results = set(results_of(graph))
        letters = iter(_LETTERS)
        made = _of_parameters(graph, segment.parameters)
        for index in range(last + 1) if last else ():
            own = {node for node in graph.nodes if level.get(node) == index} - made
            own = {node for node in own if not _is_exchange(node)}
            exchanges = tuple(_exchanges_after(graph, level, index))
            if not own:
                yield _Piece("", "", (), (), (), exchanges)
                continue
            for nodes, part, last_part in _apart(own, graph):
                inside = nodes | _read_of(made, nodes)
                ordered = [node for node in graph.nodes if node in inside]
                left = {node for node in nodes if node in results or any(user not in inside for user in node.users)}
                outputs = tuple(node for node in ordered if node in left and not is_size(node))
                read = {value for node in ordered for value in node.all_input_nodes}
                kept = tuple(index for index, group in enumerate(groups) if read.intersection(group))
                parameters = [member for group in kept for member in groups[group]]
                module, inputs = extract(ordered, parameters, outputs)
                tagged = next((node.meta["piece"] for node in ordered if "piece" in node.meta), None)
                part = part or tagged or next(letters)
                name = self._named(segment.name, part, module, tuple(len(groups[group]) for group in kept))
                yield _Piece(name, part, kept, tuple(inputs), outputs, exchanges if last_part else ())

    def _named(self, cut: str, part: str, module: fx.GraphModule, widths: tuple[int, ...]) -> str:
        """The segment that computes what `module` does: one there is, or a new one."""
        key = f"{fingerprint(module)} {widths}"
        if key not in self.named:
            again = "" if re.search(r"_[a-z]$", cut) else "_"  # a piece cut once more: decoder_layer_ba
            wanted, count = f"{cut}{again}{part}" if part in _LETTERS else part, 1
            while (name := wanted if count == 1 else f"{wanted}_{count}") in self.program.segments:
                count += 1
            module.recompile()
            self.named[key] = name
            self.program.segments[name] = Segment(name, module, sum(widths))
        return self.named[key]


def _apart(own: set[fx.Node], graph: fx.Graph) -> list[tuple[set[fx.Node], str, bool]]:
    """The parts of one level, in order, with a name if they have one, and whether exchanges follow.

    Where rows leave for experts, products that no exchange waits for (a shared expert) are a part of their own, that a
    schedule may run meanwhile.
    """
    waited = own & _waited_for(graph)
    products = {node for node in own - waited if getattr(node.target, "__name__", "") in _PRODUCTS}
    if not waited or not products:
        return [(own, "", True)]
    beside = set(products)
    for node in graph.nodes:  # what is computed from the products
        if node in own and beside.intersection(node.all_input_nodes):
            beside.add(node)
    for node in reversed(graph.nodes):  # and what they are computed from, if nothing else is
        if node in own - waited and node.users and beside.issuperset(node.users):
            beside.add(node)
    return [(own - beside, "", False), (beside, "shared", True)]


def _waited_for(graph: fx.Graph) -> set[fx.Node]:
    """What rows that leave for experts are computed from."""
    found: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if collective(node) in ("all_to_all_counts", "all_to_all_rows")]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node, how many collectives must be over before it can run."""
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            level[node] = max((level.get(value, 0) for value in node.all_input_nodes), default=0)
            level[node] += collective(node) == "wait"
    return level


def _of_parameters(graph: fx.Graph, parameters: int) -> set[fx.Node]:
    """What is computed from parameters alone: each piece that reads it computes it, and none hands it on."""
    made = set(placeholders(graph)[:parameters])
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return {node for node in made if node.op != "placeholder"}


def _read_of(made: set[fx.Node], readers: set[fx.Node]) -> set[fx.Node]:
    """Those of `made` that `readers` read, and what these are made from."""
    found: set[fx.Node] = set()
    waiting = list(readers)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in made and node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _is_exchange(node: fx.Node) -> bool:
    """A start, a wait, or one of the values a wait gives."""
    return bool(collective(node)) or (node.target is operator.getitem and bool(collective(argument(node))))


def _exchanges_after(graph: fx.Graph, level: dict[fx.Node, int], index: int) -> Iterator[fx.Node]:
    """The nodes of the collectives that start at level `index`, in order."""
    for node in graph.nodes:
        if _is_exchange(node):
            starts = collective(node) not in ("", "wait")
            if level[node] == index + (not starts):
                yield node


def _call_pieces(graph: fx.Graph, call: fx.Node, segment: Segment, pieces: list[_Piece]) -> None:
    groups, inputs = split_groups(call)
    names = group_names(call)
    whole: Call = call.meta["call"]
    env: dict[fx.Node, Any] = dict(zip(placeholders(segment.module.graph)[segment.parameters :], inputs, strict=True))
    with graph.inserting_before(call):
        for piece in pieces:
            if piece.name:
                taken = (*(groups[index] for index in piece.groups), *(env[node] for node in piece.inputs))
                new = graph.call_module(piece.name, taken)
                new.meta.update(
                    groups=len(piece.groups),
                    group_names=tuple(names[index] for index in piece.groups),
                    call=Call(whole.fqn, whole.index, _part_of(whole.part, piece.part)),
                    val=tuple(value_of(node) for node in piece.outputs),
                )
                for index, node in enumerate(piece.outputs):
                    env[node] = graph.call_function(operator.getitem, (new, index))
                    env[node].meta.update(val=value_of(node), **_stem(node))
            for node in piece.exchanges:
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = {"val": value_of(node), "call": whole, **_stem(node)}
    results = results_of(segment.module.graph)
    for user in list(call.users):
        user.replace_all_uses_with(env[results[argument(user, 1)]])
        graph.erase_node(user)
    graph.erase_node(call)


def _part_of(whole: str, part: str) -> str:
    """The part of a part: `a` of `b` is `ba`; a name stays."""
    return f"{whole}{part}" if part in _LETTERS else part


def _stem(node: fx.Node) -> dict[str, str]:
    """What a pass called a value that has a name of its own now."""
    return {"stem": node.meta["stem"]} if "stem" in node.meta else {}
