"""Read a `ModelCost` from a captured program: what each segment multiplies, moves and keeps.

    cost = read_cost(program, step)       # program = capture(...), step = differentiate(program, ...)

The forward's operations come from the program as the model was written; what our partitions keep and compute again
comes from those partitions; what eager autograd keeps follows from the rule of each operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from turbo_compile.boundaries.attention import attention
from turbo_compile.boundaries.experts import combine, dispatch
from turbo_compile.boundaries.loss import causal_lm_loss_op
from turbo_compile.ir.graphs import argument, placeholders, results_of
from turbo_compile.ir.program import Compute, Program, Segment, StepProgram, source, split_groups
from turbo_compile.ir.segments import is_size, value_of
from turbo_compile.ir.spelling import expression_of
from turbo_compile.kernels.grouped_mm import grouped_mm
from turbo_compile.plans.cost import (
    Attention,
    B,
    CallCost,
    Cut,
    Elementwise,
    GroupCost,
    Matmul,
    ModelCost,
    S,
    Saved,
    SegmentCost,
)

_TYPICAL = {B: 1, S: 4096}  # where sizes are compared, to say which is the largest
_MATMULS = ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm")
_VIEWS = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "getitem",
    "chunk",
    "split",
    "expand",
    "flatten",
    "unflatten",
    "detach",
    "contiguous",
    "getattr",
    "unbind",
    "T",
    "narrow",
    "t",
)
# What autograd keeps of an operator: its inputs, its output, or nothing. Unnamed ones keep their inputs.
_KEEPS_OUTPUT = ("softmax", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "log_softmax", "reciprocal")
_KEEPS_NOTHING: tuple[str, ...] = ("add", "sub", "neg", "cat", "sum", "mean", "to", "float", "type_as", "iadd", "isub")
_KEEPS_NOTHING += (
    "clone",
    "stack",
    "masked_fill",
    "index_select",
    "pad",
    "roll",
    "zeros_like",
    "ones_like",
    "arange",
    "full",
    "cumsum",
)


def read_cost(program: Program, step: StepProgram) -> ModelCost:
    """The cost of `program`; `step` is the same program differentiated, before any pass."""
    names = {node.name: str(node.meta["joint"]) for node in step.forward.nodes if node.op == "call_module"}
    groups: dict[str, GroupCost] = {}
    calls = []
    segments: dict[str, SegmentCost] = {}
    blocks = set(program.blocks)
    experts = _expert_parameters(program)
    for node in program.calls():
        segment = program.segments[str(node.target)]
        call = node.meta["call"]
        used = []
        for group in split_groups(node)[0]:
            name = source(group).names[0]
            groups[name] = _group(name, [program.parameters[fqn] for fqn in source(group).names], experts)
            used.append(name)
        if segment.name not in segments:
            modes = {mode: step.joints[names[node.name]].partition(mode) for mode in ("none", "selective", "full")}
            segments[segment.name] = _Reader(program, segment).read(modes)
        calls.append(CallCost(call.fqn, segment.name, tuple(used), call.fqn in blocks))
    found = [m for segment in segments.values() for m in segment.matmuls if m.experts]
    top_k = max((segment.top_k for segment in segments.values()), default=0)
    hidden, vocabulary = _width(program, segments)
    return ModelCost(
        name=program.name,
        segments=segments,
        groups=groups,
        calls=tuple(calls),
        hidden=hidden,
        vocabulary=vocabulary,
        experts=max((m.experts for m in found), default=0),
        top_k=top_k if found else 0,
        element_bytes=max(_common(program), 1),
    )


def _common(program: Program) -> int:
    """The element size of most parameters."""
    sizes: dict[int, int] = {}
    for parameter in program.parameters.values():
        sizes[parameter.dtype.itemsize] = sizes.get(parameter.dtype.itemsize, 0) + parameter.numel
    return max(sizes, key=lambda size: sizes[size], default=2)


def _expert_parameters(program: Program) -> set[str]:
    """FQNs of the weights and biases that a grouped product reads."""
    found: set[str] = set()
    for call in program.calls():
        segment = program.segments[str(call.target)]
        inputs = placeholders(segment.module.graph)[: segment.parameters]
        names = [fqn for group in split_groups(call)[0] for fqn in source(group).names]
        of = dict(zip(inputs, names, strict=True))
        for node in segment.module.graph.nodes:
            if node.target is grouped_mm:
                for each in (node.args[1], *node.args[3:]):
                    root = _root(each) if isinstance(each, fx.Node) else None
                    if root in of:
                        found.add(of[root])
    return found


def _group(name: str, parameters: Sequence[Any], experts: set[str]) -> GroupCost:
    routed = sum(p.numel for p in parameters if p.fqn in experts)
    total = sum(p.numel for p in parameters)
    return GroupCost(name, total - routed, routed, len(parameters), sum(p.numel for p in parameters if p.trainable))


def _width(program: Program, segments: Mapping[str, SegmentCost]) -> tuple[int, int]:
    """The width of the residual stream, and of the vocabulary: that of the matmul before the loss."""
    for segment in program.segments.values():
        for node in segment.module.graph.nodes:
            if node.target is causal_lm_loss_op:
                logits = value_of(argument(node))
                heads = [m for m in segments[segment.name].matmuls if m.columns == int(logits.shape[-1])]
                return (heads[-1].inner if heads else 0), int(logits.shape[-1])
    return 0, 0


# --- one segment ------------------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Reads one segment's torch-level graph."""

    program: Program
    segment: Segment
    inner: dict[fx.Node, bool] = field(default_factory=dict)
    gradient: dict[fx.Node, bool] = field(default_factory=dict)
    cuts: dict[fx.Node, Cut] = field(default_factory=dict)

    def read(self, modes: Mapping[str, Compute]) -> SegmentCost:
        graph = self.segment.module.graph
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.inputs = placeholders(graph)
        self.weights = set(self.inputs[: self.segment.parameters])
        self._find_cuts()
        self._spread()
        matmuls = [node for node in self.nodes if _kind(node) == "matmul"]
        attentions = tuple(self._attention(node) for node in self.nodes if node.target is attention)
        saved = {mode: self._partition(compute) for mode, compute in modes.items()}
        saved["eager"] = self._kept(self._autograd(fused=False))
        saved["fused"] = self._kept(self._autograd(fused=True))
        sent = [node for node in self.nodes if node.target is dispatch]
        scores = [argument(node) for node in self.nodes if node.target is causal_lm_loss_op]
        outputs = [node for node in results_of(graph) if isinstance(node, fx.Node)]
        return SegmentCost(
            name=self.segment.name,
            matmuls=tuple(self._matmul(node) for node in matmuls),
            attentions=attentions,
            eager=self._eager(),
            fused=self._fused(),
            saved=saved,
            transient=str(self._transient(modes["none"])),
            output=str(sum((self._bytes(value_of(node)) for node in outputs), sympy.Integer(0))),
            dispatched=str(sum((self._dispatched(node) for node in sent), sympy.Integer(0))),
            logits=str(sum((self._numel(value_of(node)) for node in scores), sympy.Integer(0))),
            top_k=max((int(value_of(argument(node, 1)).shape[1]) for node in sent), default=0),
        )

    # --- sizes

    def _expr(self, size: Any) -> sympy.Expr:
        expression = sympy.sympify(expression_of(size))
        return expression.subs({self.program.batch_symbol: B, self.program.sequence_symbol: S})

    def _numel(self, value: Any) -> sympy.Expr:
        if not isinstance(value, torch.Tensor):
            return sympy.Integer(0)
        return sympy.sympify(sympy.prod([self._expr(size) for size in value.shape]))

    def _bytes(self, value: Any) -> sympy.Expr:
        if isinstance(value, tuple | list):
            return sum((self._bytes(each) for each in value), sympy.Integer(0))
        return self._numel(value) * value.dtype.itemsize if isinstance(value, torch.Tensor) else sympy.Integer(0)

    # --- what tensor parallelism cuts

    def _find_cuts(self) -> None:
        """Columns of the weights that feed attention or another weight, rows of those they feed."""
        matmuls = [node for node in self.nodes if _kind(node) == "matmul" and self._weight(node) is not None]
        ends = [*matmuls, *[node for node in self.nodes if node.target in (attention, causal_lm_loss_op)]]
        feeds = {node: self._fed_by(node, ends) for node in ends}
        readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in ends}
        for node, origins in feeds.items():
            for origin in origins:
                readers[origin].append(node)
        for node in matmuls:
            if any(reader.target in (attention, causal_lm_loss_op) for reader in readers[node]):
                self.cuts[node] = "columns"
        for node in matmuls:
            if node in self.cuts:
                continue
            if any(origin.target is attention or self.cuts.get(origin) == "columns" for origin in feeds[node]):
                self.cuts[node] = "rows"
            else:
                later = [reader for reader in readers[node] if _kind(reader) == "matmul"]
                self.cuts[node] = "columns" if any(reader not in self.cuts for reader in later) else "none"

    def _fed_by(self, node: fx.Node, ends: Iterable[fx.Node]) -> list[fx.Node]:
        """The matmuls and attentions whose output reaches an operand of `node` with none between."""
        stops = set(ends)
        found: dict[fx.Node, None] = {}
        start = _operands(node, self.weights)
        seen: set[fx.Node] = set()
        waiting = list(start)
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            if each in stops:
                found[each] = None
            else:
                waiting += _operands(each, self.weights)
        return list(found)

    def _weight(self, node: fx.Node) -> fx.Node | None:
        """The parameter a matmul multiplies with, through views."""
        for each in node.all_input_nodes:
            root = _root(each)
            if root in self.weights and len(value_of(root).shape) >= 2:
                return root
        return None

    def _spread(self) -> None:
        """Which values are cut over `tp`, and which need a gradient."""
        for node in self.inputs:
            self.inner[node] = False
            value = value_of(node)
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            self.gradient[node] = floating and (node in self.weights or self._is_hidden(value))
        for node in self.nodes:
            read = _operands(node, self.weights)
            if _kind(node) == "matmul" and node in self.cuts:
                self.inner[node] = self.cuts[node] == "columns"
            elif node.target is attention:
                self.inner[node] = True
            else:
                self.inner[node] = any(self.inner.get(each, False) for each in read)
            self.gradient[node] = any(self.gradient.get(each, False) for each in node.all_input_nodes)

    def _is_hidden(self, value: Any) -> bool:
        """An input that carries gradient: the residual stream, not a table of cosines."""
        widths = {int(value_of(w).shape[-1]) for w in self.weights if len(value_of(w).shape)}
        last = value.shape[-1] if value.dim() else 0
        return value.dim() >= 2 and isinstance(last, int) and last in widths

    # --- work

    def _matmul(self, node: fx.Node) -> Matmul:
        experts = int(value_of(argument(node, 1)).shape[0]) if node.target is grouped_mm else 0
        cut: Cut = self.cuts.get(node, "none")
        out = value_of(node)
        if _name(node) in ("linear", "grouped_mm") or (_name(node) != "addmm" and self._weight(node) is not None):
            operand = value_of(_operands(node, self.weights)[0])
        else:
            operand = value_of(argument(node, 1 if _name(node) in ("addmm", "baddbmm") else 0))
        rows = sympy.prod([self._expr(size) for size in out.shape[:-1]])
        columns = out.shape[-1]
        inner = operand.shape[-1]
        if not isinstance(columns, int) or not isinstance(inner, int):  # a product over tokens: fold the size into rows
            rows, columns, inner = rows * self._expr(columns) * self._expr(inner), 1, 1
        return Matmul(str(rows), int(inner), int(columns), cut, experts, self._weight(node) is not None)

    def _attention(self, node: fx.Node) -> Attention:
        q, k, v = (value_of(argument(node, index)) for index in range(3))
        window: Any = node.args[8] if len(node.args) > 8 else None
        causal = bool(node.args[7]) if len(node.args) > 7 else True
        return Attention(int(q.shape[1]), int(k.shape[1]), int(q.shape[3]), int(v.shape[3]), window, causal)

    def _dispatched(self, node: fx.Node) -> sympy.Expr:
        hidden, index = value_of(argument(node)), value_of(argument(node, 1))
        return self._numel(index) * int(hidden.shape[-1]) * hidden.dtype.itemsize

    def _elementwise(self) -> list[fx.Node]:
        return [
            node
            for node in self.nodes
            if _kind(node) == "elementwise" and not is_size(node) and isinstance(_tensor(value_of(node)), torch.Tensor)
        ]

    def _eager(self) -> Elementwise:
        """Each operator reads its operands and writes its result."""
        outer = inner = sympy.Integer(0)
        work = self._elementwise()
        for node in work:
            moved = self._bytes(value_of(node))
            moved += sum((self._bytes(value_of(each)) for each in set(node.all_input_nodes) - self.weights), 0)
            if self.inner[node]:
                inner += moved
            else:
                outer += moved
        return Elementwise(str(outer), str(inner), len(work))

    def _fused(self) -> Elementwise:
        """Each run of operators reads what comes from outside it, once, and writes what is read outside it."""
        outer = inner = sympy.Integer(0)
        cluster = self._clusters()
        for number in set(cluster.values()):
            members = [node for node in cluster if cluster[node] == number]
            read = {
                _root(each)
                for node in members
                for each in node.all_input_nodes
                if cluster.get(_root(each)) != number and _root(each) not in self.weights and not is_size(each)
            }
            written = [
                node
                for node in members
                if any(cluster.get(user) != number and not is_size(user) for user in _readers(node))
            ]
            moved = sum((self._bytes(value_of(node)) for node in (*read, *written)), sympy.Integer(0))
            if any(self.inner[node] for node in members):
                inner += moved
            else:
                outer += moved
        return Elementwise(str(outer), str(inner), len(set(cluster.values())))

    def _clusters(self) -> dict[fx.Node, int]:
        """Elementwise nodes by the kernel they fuse into: runs between matmuls, cut at the residual stream."""
        number: dict[fx.Node, int] = {}
        work = set(self._elementwise())
        for node in self.nodes:
            if node not in work:
                continue
            before = [number[root] for each in node.all_input_nodes if (root := _root(each)) in number]
            before = [
                number[root]
                for each in node.all_input_nodes
                if (root := _root(each)) in number and not self._is_residual(root)
            ]
            if not before:
                number[node] = len(set(number.values())) + sum(1 for _ in number)
                continue
            number[node] = before[0]
            for other in before[1:]:
                for each, value in list(number.items()):
                    if value == other:
                        number[each] = before[0]
        return number

    def _is_residual(self, node: fx.Node) -> bool:
        """A sum of two activations that is read again later: the residual stream."""
        if _name(node) not in ("add", "iadd"):
            return False
        read = [each for each in node.all_input_nodes if isinstance(value_of(each), torch.Tensor)]
        shapes = [tuple(value_of(each).shape) for each in read]
        return len(read) == 2 and shapes[0] == shapes[1] and len(node.users) >= 1 and not self.inner[node]

    # --- what is kept

    def _kept(self, nodes: Iterable[fx.Node]) -> Saved:
        outer = inner = sympy.Integer(0)
        for node in dict.fromkeys(nodes):
            value = value_of(node)
            size = self._bytes(_tensor(value) if node.target is not attention else value)
            if self.inner.get(node, False):
                inner += size
            else:
                outer += size
        return Saved(str(outer), str(inner), 0.0, 0.0, 0.0)

    def _autograd(self, fused: bool) -> list[fx.Node]:
        """The storages autograd keeps: by each operator's rule, or of each fused run what enters it."""
        kept: list[fx.Node] = []
        cluster = self._clusters() if fused else {}
        for node in self.nodes:
            if not self.gradient[node] or is_size(node):
                continue
            for each in _keeps(node, self.weights, self.gradient):
                root = _root(each)
                while fused and root in cluster and node in cluster and cluster[root] == cluster[node]:
                    root = self._entry(root, cluster)
                if root not in self.weights and not is_size(root):
                    kept.append(root)
        return kept

    def _entry(self, node: fx.Node, cluster: Mapping[fx.Node, int]) -> fx.Node:
        """What a fused run would keep instead of a value inside it: the largest value that enters it before."""
        read = [_root(each) for each in node.all_input_nodes]
        read = [each for each in read if each not in self.weights and isinstance(value_of(each), torch.Tensor)]
        return max(read, key=lambda each: self._typical(self._bytes(value_of(each)))) if read else node

    def _partition(self, compute: Compute) -> Saved:
        """What one of our partitions keeps, and how much of the forward its backward computes again."""
        if compute.backward is None:
            return Saved("0", "0")
        inputs = placeholders(compute.forward.graph)
        values = results_of(compute.forward.graph)[compute.outputs :]
        total = sympy.Integer(0)
        for kind, index in compute.saved:
            if kind == "parameter":
                continue
            node = inputs[compute.parameters + index] if kind == "input" else values[index]
            if kind == "input" and not self.gradient[self.inputs[compute.parameters + index]]:
                continue  # a table that all calls share
            total += self._bytes(value_of(node))
        forward, backward = _flops(compute.forward), _flops(compute.backward)
        trained = sum(1 for kind, _ in compute.gradients if kind == "parameter") > 0
        again = max(0.0, backward[0] - (2.0 if trained else 1.0) * forward[0])
        attended = float(backward[1] > 0) if forward[1] else 0.0
        elementwise = 0.0 if again == 0.0 and attended == 0.0 else 1.0
        inner = self._typical(total)
        return Saved(str(total), "0", again / forward[0] if forward[0] and inner >= 0 else 0.0, attended, elementwise)

    def _transient(self, compute: Compute) -> sympy.Expr:
        """The most that lives at once inside the backward beyond what it is given."""
        best: sympy.Expr = sympy.Integer(0)
        for module in (compute.forward, compute.backward):
            if module is None:
                continue
            peak = self._peak(module.graph)
            best = max((best, peak), key=self._typical)
        return best

    def _peak(self, graph: fx.Graph) -> sympy.Expr:
        last: dict[fx.Node, int] = {}
        nodes = list(graph.nodes)
        for index, node in enumerate(nodes):
            for each in node.all_input_nodes:
                last[_root(each)] = index
        returned = {_root(each) for each in nodes[-1].all_input_nodes}
        live: dict[fx.Node, tuple[sympy.Expr, float]] = {}
        now = peak = 0.0
        held: list[sympy.Expr] = []
        for index, node in enumerate(nodes):
            if node.op in ("placeholder", "output") or _root(node) is not node:
                continue
            size = self._bytes(_tensor(value_of(node)))
            if (
                _materialised(node) and node not in returned and size.free_symbols
            ):  # weights' gradients are counted apart
                live[node] = (size, self._typical(size))
                now += live[node][1]
            if now > peak:
                peak, held = now, [each for each, _ in live.values()]
            for each in [each for each in live if last.get(each, index) <= index]:
                now -= live.pop(each)[1]
        return sum(held, sympy.Integer(0))

    def _typical(self, expression: Any) -> float:
        value = sympy.sympify(expression).subs(_TYPICAL)
        return float(value) if value.is_number else math.inf


# --- nodes ------------------------------------------------------------------------------------------------------------


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    packet = getattr(node.target, "_overloadpacket", None)
    return str(getattr(packet or node.target, "__name__", node.target))


def _kind(node: fx.Node) -> str:
    if node.target is attention:
        return "attention"
    if node.target is grouped_mm or _name(node) in _MATMULS:
        return "matmul"
    if _name(node) in _VIEWS or (_name(node) in ("to", "type_as", "float") and _same_dtype(node)):
        return "view"
    return "elementwise"


def _same_dtype(node: fx.Node) -> bool:
    before, after = value_of(node.all_input_nodes[0]), value_of(node)
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype == after.dtype


def _tensor(value: Any) -> Any:
    """A value, or the first tensor of several."""
    if isinstance(value, tuple | list):
        return next((each for each in value if isinstance(each, torch.Tensor)), None)
    return value


def _root(node: fx.Node) -> fx.Node:
    """The node whose storage a view shows."""
    while node.op in ("call_function", "call_method") and node.all_input_nodes and _kind(node) == "view":
        before = node.all_input_nodes[0]
        if node.target is operator.getitem and _kind(before) != "view" and not _is_tensor(before):
            return node  # one result of an operator with several
        node = before
    return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _operands(node: fx.Node, weights: set[fx.Node]) -> list[fx.Node]:
    """The activations whose numbers a node passes on: of routed rows not where they go, of a product not the weight."""
    if node.target in (dispatch, combine):
        return [node.args[0]]  # type: ignore[list-item]
    if node.target is grouped_mm:
        return [node.args[0]]  # type: ignore[list-item]
    if node.target is attention:
        return list(node.args[:3])  # type: ignore[arg-type]
    read = [each for each in node.all_input_nodes if _root(each) not in weights and not is_size(each)]
    return [each for each in read if not isinstance(value_of(each), torch.Tensor) or _floating(each)]


def _floating(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.op in ("call_function", "call_method") and _kind(user) == "view" and not is_size(user):
            found += _readers(user)
        else:
            found.append(user)
    return found


def _keeps(node: fx.Node, weights: set[fx.Node], gradient: Mapping[fx.Node, bool]) -> list[fx.Node]:
    """What eager autograd keeps of one operator."""
    kind, name = _kind(node), _name(node)
    if kind == "view" or name in _KEEPS_NOTHING:
        return []
    if kind == "attention":
        return [*node.args[:3], node]  # type: ignore[list-item]
    if kind == "matmul":
        read = [each for each in node.all_input_nodes if _floating(each)]
        return [each for each in read if _root(each) not in weights]
    if node.target is dispatch:
        return []
    if node.target is combine:
        return [each for each in node.all_input_nodes if _floating(each)]
    if node.target is causal_lm_loss_op:
        return [node.args[0]]  # type: ignore[list-item]
    if name in _KEEPS_OUTPUT:
        return [node]
    read = [each for each in node.all_input_nodes if _floating(each)]
    if name in ("mul", "imul") and len(read) == 2:
        first, second = read
        return [one for one, other in ((first, second), (second, first)) if gradient.get(other, False)]
    return read


def _materialised(node: fx.Node) -> bool:
    """Whether compiled code writes a value to memory: what matmuls and attention make, and what they read."""
    ends = (*_MATMULS, "attention", "attention_backward", "grouped_mm", "grouped_outer", "_grouped_mm")
    return _name(node) in ends or any(_name(user) in ends or user.op == "output" for user in _readers(node))


def _flops(module: fx.GraphModule) -> tuple[float, float]:
    """Flops of matmuls, and the number of attention forwards, of an ATen graph at a typical size."""
    total, attended = 0.0, 0.0
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        name = _name(node)
        if name == "attention":
            attended += 1
        elif name in ("mm", "addmm", "bmm", "baddbmm", "grouped_mm", "grouped_outer"):
            total += _product(node, name)
    return total, attended


def _product(node: fx.Node, name: str) -> float:
    first = value_of(argument(node, 1 if name in ("addmm", "baddbmm") else 0))
    out = value_of(node)
    if name == "grouped_outer":
        return 2.0 * _hint(first.shape[0]) * _hint(out.shape[1]) * _hint(out.shape[2])
    return 2.0 * math.prod(_hint(size) for size in out.shape) * _hint(first.shape[-1])


def _hint(size: Any) -> float:
    expression = sympy.sympify(expression_of(size))
    return float(expression.subs({symbol: 1024 for symbol in expression.free_symbols}))
