"""Sequence parallelism (Ulysses): each rank holds a chunk of the tokens, and at attention all tokens of some heads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from turbo_compile import _torch, collectives
from turbo_compile.boundaries.attention import attention
from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.cuts import cut_at_collectives
from turbo_compile.ir.graphs import argument, placeholders
from turbo_compile.ir.program import Program, Segment, SequenceSlicing, Sliced, Source, source, split_groups
from turbo_compile.ir.segments import home_of, value_of
from turbo_compile.ir.spelling import expression_of
from turbo_compile.kernels.heads import Heads, split_heads

_AXIS = "sp"
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int)
_ARGUMENTS = [each.name for each in attention._schema.arguments]


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Cut each block at its attention, and exchange there: tokens of all heads for all tokens of some heads.

    Before:  %h1 = block(%w0, %h0, %layout)
    After:   %q, %k, %v = block_a(%w0, %h0);  %o = attention(wait(all_to_all(%q, %k, %v) @sp), %layout);
             %h1 = block_b(%w0, %h0, wait(all_to_all(%o) @sp))

    Everywhere else the sequence is this rank's chunk of it, as `contract` cuts it.
    """

    ranks: int
    contract: SequenceSlicing = field(repr=False)
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        whole = _whole_length(program, self.ranks)
        program.sliced = Sliced(self.contract, self.ranks, sympy.sympify(expression_of(whole)))
        _widen_layout(program, whole)
        for segment in program.segments.values():
            for node in [node for node in segment.module.graph.nodes if node.target is attention]:
                _Exchange(program, segment, self.ranks, whole, node).insert()
        cut_at_collectives(program)


def _whole_length(program: Program, ranks: int) -> Any:
    """The length of all ranks' chunks together: a symbol of its own, as the program's is that of one chunk."""
    local = _field(program, "ids").meta["val"].shape[1]
    if isinstance(local, int):
        return local * ranks
    return _torch.fresh_size(program.fake_mode, "whole_sequence", local.node.hint * ranks)


def _widen_layout(program: Program, whole: Any) -> None:
    """The layout has all tokens, also where a segment takes it; a segment's own length is read elsewhere."""
    layout = _field(program, "layout")
    rows = layout.meta["val"].shape[0]
    with program.fake_mode:
        layout.meta["val"] = layout.meta["val"].new_empty(rows, whole)
    for call in program.calls():
        segment = program.segments[str(call.target)]
        inputs = placeholders(segment.module.graph)[segment.parameters :]
        for given, node in zip(split_groups(call)[1], inputs, strict=True):
            if given is layout and node.meta["val"] is not layout.meta["val"]:
                _read_length_elsewhere(program, node, inputs)
                node.meta["val"] = layout.meta["val"]


def _read_length_elsewhere(program: Program, layout: fx.Node, inputs: list[fx.Node]) -> None:
    """Have what reads the length from a segment's `layout` read it from another input."""
    value = value_of(layout)
    for read in [user for user in layout.users if user.target in _SIZES]:
        sizes = value.shape if read.target is torch.ops.aten.sym_size.int else value.stride()
        wanted = sizes[argument(read, 1)]
        if isinstance(wanted, int):
            continue
        home = home_of([node for node in inputs if node is not layout], expression_of(wanted))
        if home is None:
            raise UnsupportedOp(f"{program.name} reads the length of the sequence from an attention mask alone")
        read.target, read.args = torch.ops.aten.sym_size.int, home
        read.meta["val"] = wanted


def _field(program: Program, name: str) -> fx.Node:
    return next(node for node in placeholders(program.graph) if source(node) == Source("batch", (name,)))


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One attention of a segment, and the exchanges around it."""

    program: Program
    segment: Segment
    ranks: int
    whole: Any
    node: fx.Node

    def insert(self) -> None:
        given: dict[str, Any] = dict(zip(_ARGUMENTS, self.node.args, strict=True))
        q, k, v = (value_of(given[name]) for name in "qkv")
        heads = Heads.over(self.ranks, q.shape[1], k.shape[1])
        with self.graph.inserting_before(self.node):
            given.update(self._to_heads(given, heads))
            if given["sinks"] is not None:
                given["sinks"] = self._own_sinks(given["sinks"], heads)
        self.node.args = tuple(given[name] for name in _ARGUMENTS)
        self.node.meta["piece"] = "attention"
        self._to_sequence(heads, q.shape[1], v)

    @property
    def graph(self) -> fx.Graph:
        return self.segment.module.graph

    def _to_heads(self, given: dict[str, Any], heads: Heads) -> dict[str, fx.Node]:
        """q, k and v in one message: [B, H, S, D] of this rank's tokens -> [B, heads, S, D] of this rank's heads."""
        sent = []
        shapes = []
        for name in "qkv":
            count, repeats = (heads.query, 1) if name == "q" else (heads.key, heads.repeats)
            node = self._put("transpose", given[name], 1, 2)
            node = self._repeated(node, repeats)
            node = self._filled(node, 2, count * self.ranks)
            sent.append(self._put("contiguous", node))
            sent[-1].meta["stem"] = name
            shapes.append((count, value_of(node).shape[3]))
        if len({value_of(node).dtype for node in sent}) > 1:
            raise UnsupportedOp(f"an attention of {self.program.name} has q, k and v of different dtypes")
        first = value_of(sent[0])
        with self.program.fake_mode:
            tokens = first.new_empty(first.shape[0], self.whole, sum(count * width for count, width in shapes))
            received = split_heads(tokens, shapes)
        done = collectives.exchange(self.graph, tuple(sent), _AXIS, "heads")
        return {
            name: self._put("transpose", self._part(done, index, value, f"{name}.heads"), 1, 2)
            for index, (name, value) in enumerate(zip("qkv", received, strict=True))
        }

    def _to_sequence(self, heads: Heads, total: int, v: Tensor) -> None:
        """The output back: [B, S, heads, V] of this rank's heads -> [B, S, H, V] of this rank's tokens."""
        lse = [user for user in self.node.users if argument(user, 1) == 1]
        if any(user.users for user in lse):
            raise UnsupportedOp(f"{self.program.name} reads the log-sum-exp of an attention, which has no rule")
        rows, _, chunk, width = v.shape
        with self.program.fake_mode:
            out = v.new_empty(rows, self.whole, heads.query, width)
            back = v.new_empty(rows, chunk, heads.query * self.ranks, width)
        for user in [user for user in self.node.users if argument(user, 1) == 0]:
            user.meta.update(val=out, stem="o.heads")
            with self.graph.inserting_after(user):
                start = self.graph.call_function(collectives.all_to_all, ((user,), _AXIS, "sequence"))
            with self.graph.inserting_after(start):
                done = self.graph.call_function(collectives.wait, (start,))
            with self.graph.inserting_after(done):
                part = self._part(done, 0, back, "o")
            result = part
            if total != heads.query * self.ranks:
                with self.graph.inserting_after(part):
                    result = self._put("narrow", part, 2, 0, total)
            user.replace_all_uses_with(result, delete_user_cb=partial(operator.is_not, start))

    def _own_sinks(self, sinks: fx.Node, heads: Heads) -> fx.Node:
        """The sinks [H] of this rank's heads: which they are is known when the program runs."""
        rank = self._rank()
        every = self._filled(sinks, 0, heads.query * self.ranks)
        device = value_of(sinks).device
        first = self._put(operator.mul, rank, heads.query)
        index = self._put(operator.add, self._put(torch.arange, heads.query, device=device), first)
        own = self._put("index_select", every, 0, index)
        own.meta["stem"] = "sinks"
        return own

    def _rank(self) -> fx.Node:
        """This rank's place on the axis, as a segment input."""
        name = f"{_AXIS}_rank"
        taken = placeholders(self.graph)
        made = next((node for node in taken if node.name == name), None)
        if made is not None:
            return made
        outer = self._outer_rank(name)
        with self.graph.inserting_after(taken[-1]):
            made = self.graph.placeholder(name)
        made.meta["val"] = outer.meta["val"]
        for call in self.program.calls():
            if call.target == self.segment.name:
                call.args = (*call.args, outer)
        return made

    def _outer_rank(self, name: str) -> fx.Node:
        taken = placeholders(self.program.graph)
        made = next((node for node in taken if source(node) == Source("batch", (name,))), None)
        if made is None:
            with self.program.graph.inserting_after(taken[-1]):
                made = self.program.graph.placeholder(name)
            with self.program.fake_mode:
                made.meta["val"] = torch.zeros((), dtype=torch.long, device=taken[0].meta["val"].device)
            made.meta["source"] = Source("batch", (name,))
        return made

    def _repeated(self, node: fx.Node, repeats: int) -> fx.Node:
        """[B, S, H, D] with each head `repeats` times in a row. (repeat_interleave would fix the sizes in a trace.)"""
        if repeats == 1:
            return node
        copies = self._put("expand", self._put("unsqueeze", node, 3), -1, -1, -1, repeats, -1)
        return self._put("flatten", copies, 2, 3)

    def _filled(self, node: fx.Node, dim: int, size: int) -> fx.Node:
        """`node` with zeros added at the end of `dim` up to `size`."""
        value = value_of(node)
        missing = size - value.shape[dim]
        if missing == 0:
            return node
        zero = self._put(torch.zeros_like, self._put("narrow", node, dim, 0, 1))  # pad would fix the sizes in a trace
        return self._put(torch.cat, (node, *[zero] * missing), dim)

    def _part(self, done: fx.Node, index: int, value: Tensor, stem: str) -> fx.Node:
        node = self.graph.call_function(operator.getitem, (done, index))
        node.meta.update(val=value, stem=stem)
        return node

    def _put(self, what: str | Callable[..., Any], *arguments: Any, **keywords: Any) -> fx.Node:
        """A node that calls a function, or a method of its first argument, with the fake value it makes."""
        values = fx.map_arg(arguments, value_of)
        with self.program.fake_mode:
            if isinstance(what, str):
                node = self.graph.call_method(what, arguments, keywords)
                node.meta["val"] = getattr(values[0], what)(*values[1:], **keywords)
            else:
                node = self.graph.call_function(what, arguments, keywords)
                node.meta["val"] = what(*values, **keywords)
        return node
