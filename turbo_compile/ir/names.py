"""Names for the values of the outer graphs, by the part each plays, so that a pass renames nothing it did not make.

    %w3 the parameters of block 3    %g3 gathered    %h3 what block 3 reads    %s3 what it saves
    %dw3, %dh3 their gradients       %r3 %dw3 reduced    %e3 the experts of block 3, spread over ranks

Values that a pass gave a stem, like q or q.heads, are %q3 and %q3.heads in block 3; a piece of a block saves %s3.piece.
What belongs to no block carries its call's name: %w.prologue. Forward and backward share names for what they share.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from turbo_compile.ir.graphs import argument, placeholders, results_of
from turbo_compile.ir.program import Call, Program, StepProgram, source, split_groups

_GATHERED = {"all_gather": "g", "reduce_scatter": "r"}


def collective(node: fx.Node) -> str:
    """`all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` or `wait`; "" for any other node.

    Told by name: the functions live a floor above.
    """
    target: Any = node.target
    declared = getattr(target, "__module__", "") == "turbo_compile.collectives"
    return target.__name__ if declared and target.__name__ != "add_gradients" else ""


def exchanged_part(node: fx.Node) -> bool:
    """Whether a node is one of the values that an all_to_all brought."""
    return node.target is operator.getitem and collective(argument(node)) == "wait"


def adds_gradients(node: fx.Node) -> bool:
    return node.target is operator.add or getattr(node.target, "__name__", "") == "add_gradients"


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module"]


def forward_of(program: Program | StepProgram) -> fx.Graph:
    return program.graph if isinstance(program, Program) else program.forward


def short_names(program: Program | StepProgram) -> dict[str, str]:
    """Each block's FQN -> its last two parts, `layers.3`, or the whole where that would name two blocks."""
    short = {block: ".".join(block.split(".")[-2:]) for block in program.blocks}
    count = Counter(short.values())
    return {block: name if count[name] == 1 else block for block, name in short.items()}


def group_names(call: fx.Node) -> tuple[tuple[str, ...], ...]:
    """The FQNs of each group a call takes."""
    found: tuple[tuple[str, ...], ...] = call.meta["group_names"]
    return found


def before_exchange(value: fx.Node) -> fx.Node:
    """What was handed to the collectives that made `value`."""
    while collective(value):
        value = value.args[0]  # type: ignore[assignment]
    return value


def value_names(program: Program | StepProgram) -> dict[fx.Node, str]:
    """A name for every value of the outer graphs but calls, whose results have theirs."""
    forward = _Forward(program)
    if isinstance(program, Program) or program.backward is None:
        return forward.names
    return forward.names | _Backward(program, forward).names


class _Names:
    def __init__(self, program: Program | StepProgram) -> None:
        self.program = program
        self.ordinal = {block: str(index) for index, block in enumerate(program.blocks)}
        self.names: dict[fx.Node, str] = {}
        self.taken: set[str] = set()

    def give(self, node: fx.Node, wanted: str) -> None:
        """Name `node`, unless it has a name; a second taker of one gets a number."""
        if node in self.names:
            return
        name, count = wanted, 2
        while name in self.taken:
            name, count = f"{wanted}.{count}", count + 1
        self.taken.add(name)
        self.names[node] = name

    def suffix(self, fqn: str) -> str:
        """`3` for block 3, `.prologue` for a call outside blocks."""
        return self.ordinal.get(fqn, f".{fqn}")

    def exchange(self, node: fx.Node) -> None:
        """Name a start or wait after what goes in: g for w, r for dw, .sum for a sum, qkv3 for all three."""
        if collective(node).startswith("all_to_all"):
            moved = argument(node)[:1] if collective(node) == "all_to_all_rows" else argument(node)
            self.give(node, f"{_together([self.names[each] for each in moved])}.start")
            return
        value: fx.Node = node.args[0]  # type: ignore[assignment]
        if collective(node) == "wait":
            self.give(node, self.names[value].removesuffix(".start"))
            return
        letter = _GATHERED.get(collective(node), "")
        name = self.names[value]
        self.give(node, f"{letter}{re.sub('^d?w?', '', name)}.start" if letter else f"{name}.sum.start")


class _Forward(_Names):
    def __init__(self, program: Program | StepProgram) -> None:
        super().__init__(program)
        self.graph = forward_of(program)
        self.calls: dict[Call, fx.Node] = {call.meta["call"]: call for call in calls_of(self.graph)}
        self.groups: dict[tuple[str, ...], str] = {}
        self.before: dict[str, str] = {}  # what an all_to_all brought -> what was sent
        self._streams()
        self._outputs()
        for node in self.graph.nodes:
            self._name(node)

    def _streams(self) -> None:
        """%h3 is what block 3 reads of the call nearest before it: the hidden states."""
        order = {call: index for index, call in enumerate(self.calls.values())}
        first = {call.fqn: node for call, node in reversed(self.calls.items())}
        for call in first.values():
            made = [(order[value.args[0]], value) for value in split_groups(call)[1] if _is_result(value)]
            if call.meta["call"].fqn in self.ordinal and made:
                nearest = max(made, key=operator.itemgetter(0))
                self.give(nearest[1], f"h{self.suffix(call.meta['call'].fqn)}")

    def _outputs(self) -> None:
        results: Any = results_of(self.graph)
        results = results if isinstance(self.program, Program) else results[0]
        for name, result in zip(self.program.outputs, results, strict=True):
            self.give(before_exchange(result), name)

    def _name(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif "stem" in node.meta and (exchanged_part(node) or collective(node)):
            self._arrived(node)
        elif collective(node):
            self.exchange(node)
        elif _is_result(node):
            self._result(node)
        elif node.op == "call_function":
            reader = next((user for user in node.users if user.op == "call_module"), None)
            name = getattr(node.target, "__name__", "value").split(".")[0]
            self.give(node, f"seed{self.suffix(reader.meta['call'].fqn)}" if name == "fork" and reader else name)

    def _placeholder(self, node: fx.Node) -> None:
        found = source(node)
        if found.kind != "group":
            self.give(node, found.names[0].rsplit(".", 1)[-1])
            return
        readers = {user.meta["call"].fqn for user in _readers(node)}
        alone = len(readers) == 1
        letter = "e" if self.program.parameters[found.names[0]].axis == "edp" else "w"
        self.give(node, f"{letter}{self.suffix(readers.pop())}" if alone else f"{letter}.{_module_of(found.names[0])}")
        self.groups[found.names] = self.names[node]

    def _result(self, node: fx.Node) -> None:
        call, index = node.args
        fqn = call.meta["call"].fqn  # type: ignore[union-attr]
        part = call.meta["call"].part  # type: ignore[union-attr]
        if "bundle" in node.meta:
            self.give(node, f"s{self.suffix(fqn)}{'.' if part else ''}{part}")
        elif "stem" in node.meta:
            self.give(node, self._stemmed(node, fqn))
        elif fqn in self.ordinal:
            self.give(node, f"h{int(self.ordinal[fqn]) + 1}" if index == 0 else f"x{self.ordinal[fqn]}")
        else:
            self.give(node, node.meta.get("name", f"{fqn}.{index}"))

    def _arrived(self, node: fx.Node) -> None:
        """Name a value that an all_to_all brought, and remember what it was before."""
        self.give(node, self._stemmed(node, node.meta["call"].fqn))
        if (sent := _sent(node)) is not None:
            self.before[self.names[node]] = self.names[sent]

    def _stemmed(self, node: fx.Node, fqn: str) -> str:
        """`q3.heads` for the stem `q.heads` in block 3."""
        stem, dot, tail = node.meta["stem"].partition(".")
        return f"{stem}{self.suffix(fqn)}{dot}{tail}"


class _Backward(_Names):
    """Names of the backward graph: %d and the forward name for a gradient, its parts numbered where it is a sum."""

    def __init__(self, program: StepProgram, forward: _Forward) -> None:
        super().__init__(program)
        assert program.backward is not None
        self.forward = forward
        self.graph = program.backward
        self._placeholders()
        self._gradients()
        for node in self.graph.nodes:
            if collective(node):
                self.exchange(node)
            elif node.op == "call_function":
                self.give(node, getattr(node.target, "__name__", "value").split(".")[0])

    def _placeholders(self) -> None:
        _, bundles, kept = results_of(self.forward.graph)
        inherited = {"saved": iter(bundles), "kept": iter(kept)}
        for node in placeholders(self.graph):
            found = source(node)
            if found.kind in inherited:
                self.give(node, self.forward.names[next(inherited[found.kind])])
            elif found.kind == "group":
                self.give(node, self.forward.groups[found.names])
            else:
                self.give(node, f"d{found.names[0]}")

    def _gradients(self) -> None:
        of: dict[fx.Node, str] = {}
        for call in calls_of(self.graph):
            named = self._differentiated(call)
            for part in call.users:
                of[part] = f"d{named[part.args[1]]}"  # type: ignore[index]
        for node in self.graph.nodes:
            if node.op == "call_function" and adds_gradients(node):
                of[node] = of[before_exchange(node.args[0])]
            elif (sent := _sent(node)) is not None:
                of[node] = f"d{self.forward.before[of[sent].removeprefix('d')]}"
        for wanted, parts in _inverted(of).items():
            self.give(parts[-1], wanted)
            for index, part in enumerate(parts[:-1], 1):
                self.give(part, f"{wanted}.{index}")

    def _differentiated(self, call: fx.Node) -> list[str]:
        """The forward names of what a backward call gives gradients of, in the order of its results."""
        assert isinstance(self.program, StepProgram)
        positions = dict.fromkeys(self.program.compute_of(call).gradients)
        inputs = split_groups(self.forward.calls[call.meta["call"]])[1]
        groups, start = [], 0
        for names in group_names(call):
            if any(("parameter", start + offset) in positions for offset in range(len(names))):
                groups.append(self.forward.groups[names])
            start += len(names)
        return groups + [self.forward.names[inputs[index]] for kind, index in positions if kind == "input"]


def _is_result(value: Any) -> bool:
    """Whether an outer value is one result of a call."""
    return isinstance(value, fx.Node) and value.target is operator.getitem and value.args[0].op == "call_module"  # type: ignore[union-attr]


def _sent(value: fx.Node) -> fx.Node | None:
    """What an all_to_all took where it brought `value`: one of several, or rows along a route. None for what is new."""
    done, index = (argument(value), argument(value, 1)) if exchanged_part(value) else (value, 0)
    start = argument(done) if collective(done) == "wait" else None
    if start is None or collective(start) not in ("all_to_all", "all_to_all_rows"):
        return None
    sent: fx.Node = argument(start)[index]
    return sent


def _together(names: list[str]) -> str:
    """`qkv0` for q0, k0, v0; `dqkv0.heads` for their gradients by heads."""
    found = [re.fullmatch(r"(d?)([a-z]+)(.*)", name) for name in names]
    if len(names) == 1 or not all(found):
        return names[0]
    first: re.Match[str] = found[0]  # type: ignore[assignment]
    return f"{first[1]}{''.join(each[2] for each in found if each)}{first[3]}"


def _readers(group: fx.Node) -> list[fx.Node]:
    """The calls that read a group, gathered or not."""
    found = []
    for user in group.users:
        found += [user] if user.op == "call_module" else _readers(user) if collective(user) else []
    return found


def _module_of(fqn: str) -> str:
    return fqn.split(".")[-2] if "." in fqn else fqn


def _inverted(of: dict[fx.Node, str]) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node, name in of.items():
        found.setdefault(name, []).append(node)
    return found


def joined(names: Iterable[str]) -> str:
    """`%a, %s0..%s93, %b`: neighbours of a run of four and more left out."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    parts = []
    for run in runs:
        parts += [f"%{run[0]}..%{run[-1]}"] if len(run) > 3 else [f"%{name}" for name in run]
    return ", ".join(parts)


def _follows(before: str, name: str) -> bool:
    """Whether two names are neighbours in a run: s3 and s4, or pieces like s3.b and s4.a."""
    a, b = (re.fullmatch(r"(.*?)(\d+)(\D*)", each) for each in (before, name))
    if a is None or b is None or a[1] != b[1]:
        return False
    step = abs(int(a[2]) - int(b[2]))
    return step == 1 if a[3] == b[3] else step < 2 and a[3][:1] == b[3][:1] == "."
