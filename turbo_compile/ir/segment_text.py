"""The text of a segment, or of the two graphs it is differentiated into: an op a line, its type, the model's line.

For example:  %mm: bf16[B*S, 4096] = mm(%view, %permute)     # modeling_qwen3.py:241
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from turbo_compile.ir.graphs import placeholders, results_of
from turbo_compile.ir.names import calls_of, forward_of, group_names, value_names
from turbo_compile.ir.program import Call, Compute, Program, StepProgram, split_groups
from turbo_compile.ir.segments import is_size, value_of
from turbo_compile.ir.spelling import Spelling, dtype_name, expression_of
from turbo_compile.plans.ranges import compress

_COMMENT_AT = 84
_SAME_EVERYWHERE = frozenset({"layout", "device", "pin_memory"})  # keywords that say where, not what
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def show_segments(program: Program | StepProgram) -> dict[str, str]:
    """The text of every segment by name, or of every compute's `.forward` and `.backward`."""
    names = value_names(program)
    texts = {}
    for target, calls in _calls_by_target(program).items():
        uses = [call.meta["call"] for call in calls]
        parameters, inputs = _argument_names(calls[0], names, program.blocks)
        if isinstance(program, Program):
            body = _Body(program, program.segments[target].module)
            texts[target] = _text(body.forward("segment", target, uses, parameters, inputs))
            continue
        compute = program.computes[target]
        body = _Body(program, compute.forward)
        texts[f"{target}.forward"] = _text(body.forward("forward", target, uses, parameters, inputs, compute))
        if compute.backward is not None:
            saved = _saved_names(compute, body, parameters, inputs)
            back = _Body(program, compute.backward)
            texts[f"{target}.backward"] = _text(back.backward(target, uses, saved, parameters, inputs, compute))
    return texts


def model_line(node: fx.Node) -> str:
    """`modeling_qwen3.py:241`, the innermost line outside torch and this package that made a node; "" if unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_MODEL)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def op_name(node: fx.Node) -> str:
    """`mm` for `torch.ops.aten.mm.default`, `add` for `operator.add`, `to` for a method."""
    target: Any = node.target
    if node.op in ("call_method", "get_attr", "call_module"):
        return str(target).rsplit(".", 1)[-1]
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(target, "__name__", target))


class _Body:
    """One graph's lines. Values are named after what made them and numbered in order, whatever torch numbered them."""

    def __init__(self, program: Program | StepProgram, module: fx.GraphModule) -> None:
        self.spelling = Spelling(program)
        self.graph = module.graph
        self.placeholders = placeholders(self.graph)
        self.results: tuple[Any, ...] = tuple(results_of(self.graph))
        self.names: dict[fx.Node, str] = {}
        self.taken: set[str] = set()
        self.count: Counter[str] = Counter()

    def forward(
        self,
        kind: str,
        name: str,
        uses: list[Call],
        parameters: list[str],
        inputs: list[str],
        compute: Compute | None = None,
    ) -> Iterator[tuple[str, str]]:
        self._name([*parameters, *inputs])
        outputs = compute.outputs if compute else len(self.results)
        counts = (_count(len(parameters), "parameter"), _count(len(inputs), "input"), _count(outputs, "output"))
        yield f"{kind:<9}{name}   {', '.join(counts)}", ""
        yield _called(uses), ""
        yield "", ""
        kinds = ["parameter"] * len(parameters) + ["input"] * len(inputs)
        for node, kind in zip(self.placeholders, kinds, strict=True):
            yield self._typed(node), kind
        yield from self._ops()
        yield f"  return {self._argument(self.results[:outputs])[1:-1]}", ""
        if compute is not None and compute.backward is not None:
            yield from self._saved(compute, parameters, inputs)

    def backward(
        self,
        name: str,
        uses: list[Call],
        saved: list[str],
        parameters: list[str],
        inputs: list[str],
        compute: Compute,
    ) -> Iterator[tuple[str, str]]:
        tangents = ["dout" if compute.outputs == 1 else f"dout{index}" for index in compute.tangents]
        self._name([*saved, *tangents])
        gradients = _count(len(compute.gradients), "gradient")
        yield f"backward {name}   {len(saved)} saved, {_count(len(tangents), 'tangent')}, {gradients}", ""
        yield _called(uses), ""
        yield "", ""
        words = {"parameter": "parameter, gathered again", "input": "saved input", "value": "saved value"}
        kinds = [words[kind] for kind, _ in compute.saved] + ["tangent"] * len(tangents)
        for node, kind in zip(self.placeholders, kinds, strict=True):
            yield self._typed(node), kind
        yield from self._ops()
        for (of_kind, index), result in zip(compute.gradients, self.results, strict=True):
            of = parameters[index] if of_kind == "parameter" else inputs[index]
            yield f"  gradient of %{of}: {self._argument(result)}", of_kind

    def _saved(self, compute: Compute, parameters: list[str], inputs: list[str]) -> Iterator[tuple[str, str]]:
        for kind, names, why in (("parameter", parameters, "gathered again"), ("input", inputs, "")):
            taken = ", ".join(f"%{names[index]}" for found, index in compute.saved if found == kind)
            if taken:
                yield f"  saved {kind}s: {taken}", why
        for node in self.results[compute.outputs :]:
            yield f"  saved value {self._typed(node).strip()}", model_line(node)

    def _name(self, given: Iterable[str]) -> None:
        """Name the placeholders as `given`, then every value."""
        for node, name in zip(self.placeholders, given, strict=True):
            self.names[node] = self._fresh(name)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output") or is_size(node):
                continue
            if node.target is operator.getitem and isinstance(node.args[1], int) and _is_tuple(node.args[0]):
                self.names[node] = f"{self.names[node.args[0]]}.{node.args[1]}"
            else:
                self.names[node] = self._fresh(re.sub(r"(_default)?(_\d+)*$", "", node.name))

    def _fresh(self, name: str) -> str:
        fresh = name
        while fresh in self.taken:
            self.count[name] += 1
            fresh = f"{name}_{self.count[name] + 1}"
        self.taken.add(fresh)
        return fresh

    def _ops(self) -> Iterator[tuple[str, str]]:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output") or is_size(node):
                continue
            if _is_part(node):
                continue
            made = self._typed(node)
            if _is_tuple(node):
                parts = sorted((user for user in node.users if _is_part(user)), key=lambda user: user.args[1])
                made = "  " + ", ".join(self._typed(part).strip() for part in parts) if parts else made
            yield f"{made} = {op_name(node)}({', '.join(self._arguments(node))})", model_line(node)

    def _arguments(self, node: fx.Node) -> Iterator[str]:
        """A node's arguments; those of a boundary op by name, what it was not given left out."""
        boundary = getattr(node.target, "namespace", "") == "turbo_compile"
        names = [argument.name for argument in node.target._schema.arguments] if boundary else []  # type: ignore[union-attr]
        for name, argument in zip_longest(names[: len(node.args)], node.args):
            if not boundary or isinstance(argument, (fx.Node, list, tuple)):
                yield self._argument(argument)
            elif argument is not None:
                yield f"{name}={self._argument(argument)}"
        for name, argument in node.kwargs.items():
            if name not in _SAME_EVERYWHERE:
                yield f"{name}={self._argument(argument)}"

    def _typed(self, node: fx.Node) -> str:
        value = value_of(node)
        name = self.names.get(node, "size")
        return f"  %{name}: {self.spelling.type(value)}" if value is not None else f"  %{name}"

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self._size(value_of(argument)) if is_size(argument) else f"%{self.names[argument]}"
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(self._argument(item) for item in argument)}]"
        if isinstance(argument, slice):
            bounds = [argument.start, argument.stop, *([] if argument.step is None else [argument.step])]
            return ":".join("" if bound is None else self._argument(bound) for bound in bounds)
        if isinstance(argument, torch.dtype):
            return dtype_name(argument)
        if isinstance(argument, torch.device):
            return argument.type
        if argument is Ellipsis:
            return "..."
        if argument == 2**63 - 1:
            return "end"
        return str(argument).removeprefix("torch.")

    def _size(self, value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(self.spelling.size(item) for item in value)}]"
        return self.spelling.size(expression_of(value))


def _text(lines: Iterable[tuple[str, str]]) -> str:
    return "".join(f"{code:<{_COMMENT_AT}}  # {comment}\n" if comment else f"{code}\n" for code, comment in lines)


def _called(uses: list[Call]) -> str:
    where = ", ".join(compress(call.fqn for call in uses))
    return f"called   {_count(len(uses), 'time')}: {where}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _calls_by_target(program: Program | StepProgram) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for call in calls_of(forward_of(program)):
        found.setdefault(str(call.target), []).append(call)
    return found


def _argument_names(call: fx.Node, names: dict[fx.Node, str], blocks: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """What a segment's parameters and inputs are called: FQNs cut to their end, outer names less a block's number."""
    fqns = [fqn for group in group_names(call) for fqn in group]
    inputs = [names[argument] for argument in split_groups(call)[1]]
    if call.meta["call"].fqn in blocks:
        inputs = [re.sub(r"\d+$", "", name) if re.fullmatch(r"[a-z]+\d+", name) else name for name in inputs]
    return _shortened(fqns), inputs


def _shortened(fqns: list[str]) -> list[str]:
    """The last two parts of each FQN, or as many as tell them apart."""
    parts = 2
    while len({_last(fqn, parts) for fqn in fqns}) < len(fqns):
        parts += 1
    return [_last(fqn, parts) for fqn in fqns]


def _last(fqn: str, parts: int) -> str:
    return ".".join(fqn.split(".")[-parts:])


def _saved_names(compute: Compute, forward: _Body, parameters: list[str], inputs: list[str]) -> list[str]:
    values = forward.results[compute.outputs :]
    named = {"parameter": parameters, "input": inputs, "value": [forward.names.get(node, "size") for node in values]}
    return [named[kind][index] for kind, index in compute.saved]


def _is_tuple(node: Any) -> bool:
    return isinstance(value_of(node), (tuple, list))


def _is_part(node: fx.Node) -> bool:
    """Whether a node takes one result of an op that has several."""
    return node.target is operator.getitem and isinstance(node.args[1], int) and _is_tuple(node.args[0])
