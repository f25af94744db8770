"""Change which parameters travel together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from turbo_compile.ir.graphs import placeholders
from turbo_compile.ir.names import group_names
from turbo_compile.ir.program import Program, Segment, Source, source, split_groups
from turbo_compile.ir.segments import reorder


def split_groups_apart(program: Program, segment: Segment, apart: Sequence[int]) -> Segment:
    """Have some parameters of a segment, by their places, travel apart from the others of their groups.

    The segment takes each group's other parameters before those set apart; returns it as it is now.
    """
    calls = [call for call in program.calls() if call.target == segment.name]
    widths = [len(names) for names in group_names(calls[0])]
    parts: list[list[int]] = []  # the new groups: places among the segment's parameters
    owners: list[int] = []  # and the old group each was part of
    start = 0
    for group, width in enumerate(widths):
        places = range(start, start + width)
        start += width
        for part in ([p for p in places if p not in apart], [p for p in places if p in apart]):
            if part:
                parts.append(part)
                owners.append(group)
    taken = len(placeholders(segment.module.graph))
    order = [place for part in parts for place in part] + list(range(segment.parameters, taken))
    new = replace(segment, module=reorder(segment.module, order))
    new.module.recompile()
    program.segments[segment.name] = new
    values = segment.values()
    for call in calls:
        old, inputs = split_groups(call)
        fqns = [fqn for names in group_names(call) for fqn in names]
        names = tuple(tuple(fqns[place] for place in part) for part in parts)
        made = tuple(
            _placeholder(program.graph, old[owner], name, tuple(values[place] for place in part))
            for owner, name, part in zip(owners, names, parts, strict=True)
        )
        call.args = (*made, *inputs)
        call.meta.update(groups=len(made), group_names=names)
    for node in placeholders(program.graph):
        if source(node).kind == "group" and not node.users:
            program.graph.erase_node(node)
    return new


def _placeholder(graph: fx.Graph, beside: fx.Node, names: tuple[str, ...], value: tuple[object, ...]) -> fx.Node:
    """The placeholder of a group: the one there is, or a new one beside `beside`."""
    wanted = Source("group", names)
    for node in placeholders(graph):
        if source(node) == wanted:
            return node
    with graph.inserting_after(beside):
        node = graph.placeholder(re.sub(r"\W", "_", f"w_{names[0]}"))
    node.meta.update(source=wanted, val=value)
    return node
