"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.fx as fx
from torch import Tensor

from turbo_compile import _torch, collectives
from turbo_compile.boundaries.experts import combine, dispatch, owner_first
from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.cuts import cut_at_collectives
from turbo_compile.ir.graphs import argument, placeholders
from turbo_compile.ir.groups import split_groups_apart
from turbo_compile.ir.names import group_names
from turbo_compile.ir.program import Program, Segment
from turbo_compile.ir.segments import value_of
from turbo_compile.kernels.grouped_mm import grouped_mm

_AXIS = "ep"
_HINT = 64  # rows a rank receives in the example: how many they are is known when the program runs


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Exchange rows around each experts' compute: a rank computes, for all ranks' tokens, the experts it holds.

    Before:  %h1 = block(%w0, %h0)
    After:   %rows, %ends = block_a(%w0, %h0);  %route, %ends.own = wait(all_to_all_counts(%ends) @ep);
             %out = experts(%e0, wait(all_to_all_rows(%rows, %route) @ep), %ends.own);
             %h1 = block_b(%w0, %h0, wait(all_to_all_rows(%out, %route) @ep))

    `ranks` share the experts, and `shards` ranks (edp) share what one of them computes with: its experts' parameters
    are gathered over edp. Parameters lie in shards of their first dimension over all these ranks together, so the
    experts a rank computes are those that it and the others of its edp group hold.
    """

    ranks: int
    shards: int
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        received = _torch.fresh_size(program.fake_mode, "received_rows", _HINT)
        for segment in list(program.segments.values()):
            if not _nodes(segment, dispatch):
                continue
            segment = self._hold_own(program, segment)
            for node in _nodes(segment, dispatch):
                _Exchange(program, segment, self.ranks, self.shards, received, node).insert()
        cut_at_collectives(program)

    def _hold_own(self, program: Program, segment: Segment) -> Segment:
        """Have the experts' parameters travel apart, gathered over edp: of each, what one rank computes with."""
        held = _expert_parameters(segment)
        for index in held:
            node = placeholders(segment.module.graph)[index]
            value = value_of(node)
            with program.fake_mode:
                node.meta["val"] = value.new_empty(value.shape[0] // self.ranks, *value.shape[1:])
        for call in program.calls():
            if call.target == segment.name:
                fqns = [fqn for names in group_names(call) for fqn in names]
                for fqn in (fqns[index] for index in held):
                    whole = program.parameters[fqn]
                    shape = torch.Size((whole.shape[0] // self.ranks, *whole.shape[1:]))
                    program.parameters[fqn] = replace(whole, shape=shape, axis="edp")
        return split_groups_apart(program, segment, held)


def _nodes(segment: Segment, target: Any) -> list[fx.Node]:
    return [node for node in segment.module.graph.nodes if node.target is target]


def _expert_parameters(segment: Segment) -> list[int]:
    """The places of the parameters that grouped products take, as matrices or biases."""
    found = set()
    for node in _nodes(segment, grouped_mm):
        for given in (argument(node, 1), argument(node, 3)):
            while isinstance(given, fx.Node) and given.op != "placeholder":
                given = given.all_input_nodes[0]  # transposed, or cast
            found.add(given)
    own = placeholders(segment.module.graph)[: segment.parameters]
    return [index for index, node in enumerate(own) if node in found]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One dispatch of a segment: its rows go out to the experts, and come back before they are combined."""

    program: Program
    segment: Segment
    ranks: int
    shards: int
    received: Any
    node: fx.Node

    @property
    def graph(self) -> fx.Graph:
        return self.segment.module.graph

    def insert(self) -> None:
        hidden, index, experts = self.node.args
        if self.shards > 1:
            self.node.args = (hidden, self._by_owner(index, int(experts)), experts)  # type: ignore[arg-type]
        rows, order, ends = (self._result(number, name) for number, name in enumerate(("rows", "order", "ends")))
        products = [user for user in ends.users if user.target is grouped_mm]
        (last,) = [user for user in order.users if user.target is combine]
        if len(products) != len(ends.users) or not isinstance(last.args[0], fx.Node):
            raise UnsupportedOp(f"experts of {self.program.name} use their routing in a way that has no rule")
        shape = value_of(rows)
        with self.program.fake_mode:
            arrived = shape.new_empty(self.received, shape.shape[1])
            own = value_of(ends).new_empty(int(experts) // self.ranks)  # type: ignore[arg-type]
        with self.graph.inserting_before(ends.next):
            counted = self._exchange(collectives.all_to_all_counts, (ends,), "")
            route, mine = self._part(counted, 0, None, "route"), self._part(counted, 1, own, "ends.own")
            taken = self._exchange(collectives.all_to_all_rows, (rows, route), "experts", arrived, "rows.own")
        rows.replace_all_uses_with(taken, delete_user_cb=lambda user: user.target is not collectives.all_to_all_rows)
        for product in products:
            product.replace_input_with(ends, mine)
            product.meta["piece"] = "experts"
        computed = last.args[0]
        computed.meta["val"] = arrived
        computed.meta["stem"] = "out.own"
        with self.graph.inserting_before(last):
            back = self._exchange(collectives.all_to_all_rows, (computed, route), "tokens", shape, "out")
        last.args = (back, *last.args[1:])

    def _by_owner(self, index: fx.Node, experts: int) -> fx.Node:
        with self.graph.inserting_before(self.node):
            number = self.graph.call_function(owner_first, (index, experts, self.ranks, self.shards))
        number.meta["val"] = value_of(index)
        return number

    def _result(self, index: int, stem: str) -> fx.Node:
        """The node of one result of the dispatch, right behind it and those before."""
        found = next((user for user in self.node.users if argument(user, 1) == index), None)
        if found is None:
            raise UnsupportedOp(f"experts of {self.program.name} leave a part of their routing unused")
        place = self.node
        for _ in range(index):
            place = place.next
        place.append(found)
        found.meta["stem"] = stem
        return found

    def _exchange(
        self, start: Any, values: tuple[fx.Node, ...], to: str, value: Tensor | None = None, stem: str = ""
    ) -> fx.Node:
        started = self.graph.call_function(start, (values, _AXIS, to) if to else (values, _AXIS))
        done = self.graph.call_function(collectives.wait, (started,))
        if stem:
            done.meta.update(val=value, stem=stem)
        return done

    def _part(self, done: fx.Node, index: int, value: Tensor | None, stem: str) -> fx.Node:
        node = self.graph.call_function(operator.getitem, (done, index))
        node.meta.update(val=value, stem=stem)
        return node
