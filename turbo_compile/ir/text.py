"""The one printer: a program as text that a person reads, the same on every rank and in every run.

    fwd  %g1.start = all_gather.start(%w1: 9 params, bf16 137.0 MiB) @shard      # layers.1
    fwd  %h1, %s0 = decoder_layer.none(%g0, %h0, %cos, %sin, %layout)            # layers.0: bf16[B, S, 4096], saves ...

Calls that repeat are shown once, then counted: a model of 94 layers takes no more text than one of 4.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.fx as fx

from turbo_compile.ir.elide import Line, elide_repeats
from turbo_compile.ir.graphs import argument, placeholders, results_of
from turbo_compile.ir.names import (
    calls_of,
    collective,
    exchanged_part,
    forward_of,
    joined,
    short_names,
    value_names,
)
from turbo_compile.ir.program import Program, StepProgram, source
from turbo_compile.ir.spelling import Spelling, expression_of, gradient_size, group_size, symbolic_bytes

_CAME_FROM = {"heads": "sequence", "sequence": "heads", "experts": "tokens", "tokens": "experts"}
_COMMENT_AT = 84  # a fixed column: a comment never moves because another line changed


def show(program: Program | StepProgram, *, after: str = "", elide: bool = True) -> str:
    """The outer graphs, one node a line; `after` names the stage. `elide=False` shows every repeated call."""
    printer = _Printer(program)
    text = [*printer.header(after)]
    for prefix, graph in graphs_of(program):
        lines = list(printer.lines(prefix, graph))
        text += ["", *(_rendered(line) for line in (elide_repeats(lines) if elide else lines))]
    return "\n".join(text) + "\n"


def graphs_of(program: Program | StepProgram) -> tuple[tuple[str, fx.Graph], ...]:
    """The outer graphs, with the prefix their lines carry."""
    return (("fwd", program.graph),) if isinstance(program, Program) else program.graphs()


def collective_counts(program: Program | StepProgram) -> Counter[str]:
    """How many exchanges of each kind a step starts: `all_gather@shard` -> 189."""
    starts = (node for _, graph in graphs_of(program) for node in graph.nodes if collective(node) not in ("", "wait"))
    return Counter(f"{collective(node)}@{node.args[1]}" for node in starts)


class _Printer:
    def __init__(self, program: Program | StepProgram) -> None:
        self.program = program
        self.spelling = Spelling(program)
        self.names = value_names(program)
        self.short = short_names(program)

    def header(self, after: str) -> Iterator[str]:
        kind = "program" if isinstance(self.program, Program) else "step"
        yield f"{kind:<8} {self.program.name}   {self._sizes()}; {group_size(self.program.parameters.values())}"
        calls = Counter(_callee(call) for call in calls_of(forward_of(self.program)))
        yield f"calls    {', '.join(f'{name} x {count}' if count > 1 else name for name, count in calls.items())}"
        if after:
            yield f"after    {after}"
        if self.program.fused:
            yield f"fuses    {'; '.join(f'{name} in {where}' for name, where in self.program.fused.items())}"
        if (sliced := self.program.sliced) is not None:
            cut, whole = ", ".join(sliced.contract.sliced), ", ".join(sliced.contract.global_)
            yield f"slices   at {sliced.contract.boundary}: {cut} in {sliced.ranks} chunks of S; {whole} whole"
        if counts := collective_counts(self.program):
            yield f"moves    {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}"

    def _sizes(self) -> str:
        sizes = ((self.program.batch_symbol, "B"), (self.program.sequence_symbol, "S"))
        if all(symbol.is_Symbol for symbol, _ in sizes):
            return "B x S symbolic"
        return " ".join(letter if symbol.is_Symbol else f"{letter}={symbol}" for symbol, letter in sizes)

    def lines(self, prefix: str, graph: fx.Graph) -> Iterator[Line]:
        if prefix == "bwd":
            taken = joined(self.names[node] for node in placeholders(graph))
            yield Line(f"bwd  take {taken}")
        for node in graph.nodes:
            if node.op == "placeholder":
                if prefix == "fwd":
                    yield self._placeholder(node)
            elif node.op == "call_module":
                yield self._call(prefix, node)
            elif node.op == "output":
                yield Line(f"{prefix}  return {self._returned(node.args[0])}")
            elif node.target is not operator.getitem:
                yield self._function(prefix, node)

    def _placeholder(self, node: fx.Node) -> Line:
        found = source(node)
        if found.kind == "group":
            members = [self.program.parameters[fqn] for fqn in found.names]
            frozen = sum(not parameter.trainable for parameter in members)
            size = group_size(members) + (f", {frozen} frozen" if frozen else "")
            return Line(f"fwd  %{self.names[node]}: {size}", self._group_label(found.names))
        name = f" {found.names[0]}" if found.kind == "buffer" else ""
        return Line(f"fwd  %{self.names[node]}: {self.spelling.type(node.meta['val'])}", f"{found.kind}{name}")

    def _call(self, prefix: str, call: fx.Node) -> Line:
        parts: dict[Any, fx.Node] = {user.args[1]: user for user in call.users}
        results = self._arguments([parts.get(index) for index in range(max(parts, default=-1) + 1)])
        code = f"{prefix}  {results} = {_callee(call)}({self._arguments(call.args)})"
        label = self._label(call.meta["call"].fqn)
        return Line(code, label + (self._made(call, parts) if prefix == "fwd" else ""), label)

    def _made(self, call: fx.Node, parts: dict[Any, fx.Node]) -> str:
        """The types of a forward call's results, and what it saves."""
        types = [self.spelling.type(parts[i].meta["val"]) for i in sorted(parts) if "val" in parts[i].meta]
        runs = [(kind, len(list(run))) for kind, run in groupby(types)]
        made = [f"{kind} x {count}" if count > 1 else kind for kind, count in runs]
        if isinstance(self.program, StepProgram) and (compute := self.program.compute_of(call)).backward is not None:
            values = [value.meta["val"] for value in results_of(compute.forward.graph)[compute.outputs :]]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            made.append(f"saves {symbolic_bytes(self.spelling.bytes(tensors))}" if tensors else "saves only inputs")
        return f": {', '.join(made)}" if made else ""

    def _function(self, prefix: str, node: fx.Node) -> Line:
        name = self.names[node]
        kind = collective(node)
        fqns = node.meta.get("fqns", ())
        if kind.startswith("all_to_all"):
            values, axis, *to = node.args
            way = f": {_CAME_FROM[to[0]]} -> {to[0]}" if to else ""  # type: ignore[index]
            return Line(f"{prefix}  %{name} = {kind}.start({self._arguments(values)}{way}) @{axis}")
        if kind == "wait" and any(exchanged_part(user) for user in node.users):
            parts = sorted(node.users, key=lambda user: argument(user, 1))
            return Line(f"{prefix}  {self._arguments(parts)} = wait({self._argument(node.args[0])})")
        if kind in ("", "wait"):
            callee = kind or getattr(node.target, "__name__", str(node.target)).split(".")[0]
            return Line(f"{prefix}  %{name} = {callee}({self._arguments(node.args)})")
        spell = group_size if kind == "all_gather" else gradient_size
        size = spell(self.program.parameters[fqn] for fqn in fqns) if fqns else self._value_type(node)
        code = f"{prefix}  %{name} = {kind}.start({self._argument(node.args[0])}: {size}) @{node.args[1]}"
        return Line(code, self._group_label(fqns) if fqns else "")

    def _value_type(self, node: fx.Node) -> str:
        return self.spelling.type(node.meta["val"]) if "val" in node.meta else "?"

    def _label(self, fqn: str) -> str:
        return self.short.get(fqn, fqn)

    def _group_label(self, fqns: tuple[str, ...]) -> str:
        """The block that owns a group, or its parameters."""
        blocks = {block for block in self.program.blocks if all(fqn.startswith(f"{block}.") for fqn in fqns)}
        if len(fqns) > 1 and blocks:
            return self._label(max(blocks, key=len))
        return ", ".join(fqns) if len(fqns) < 4 else f"{fqns[0]} and {len(fqns) - 1} more"

    def _returned(self, results: Any) -> str:
        if isinstance(self.program, Program) or not (results and isinstance(results[0], tuple)):
            return self._arguments(results) or "nothing"
        parts = zip(("", "; saved ", "; kept "), results, strict=True)
        return "".join(f"{word}{self._arguments(values)}" for word, values in parts if values)

    def _arguments(self, arguments: Any) -> str:
        """Arguments with long runs of neighbours cut short."""
        parts: list[str] = []
        run: list[str] = []
        for each in (*arguments, None):
            if isinstance(each, fx.Node):
                run.append(self.names[each])
                continue
            parts += [joined(run)] if run else []
            run = []
            parts.append(self._argument(each))
        return ", ".join(parts[:-1])

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{self.names[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{self._arguments(value)}]"
        return "-" if value is None else str(expression_of(value))


def _callee(call: fx.Node) -> str:
    """`decoder_layer.none.backward` for a call of `decoder_layer_none_backward`."""
    target, joint = str(call.target), call.meta.get("joint")
    if joint is None:
        return target
    backward = ".backward" if call.meta.get("backward") else ""
    mode = target.removesuffix("_backward").removeprefix(joint).strip("_")
    return f"{joint}{'.' if mode else ''}{mode}{backward}"


def _rendered(line: Line) -> str:
    return f"{line.code:<{_COMMENT_AT}}  # {line.comment}" if line.comment else line.code
