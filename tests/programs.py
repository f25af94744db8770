"""Small programs for tests, built by hand: an embedding, blocks that are all alike, a head with its loss.

They have what captured ones have (groups, buffers, shared inputs, symbolic B and S), and take milliseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from turbo_compile.boundaries.router import router_counts
from turbo_compile.ir.program import Call, Parameter, Program, Segment, Source, StepProgram
from turbo_compile.ir.segments import clone_module

HIDDEN, WIDE, VOCABULARY = 8, 12, 10


def prologue(embed: Tensor, ids: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return F.embedding(ids, embed), torch.cos(ids.float() * scale)


def block(up: Tensor, down: Tensor, hidden: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    inner = torch.tanh(F.linear(hidden, up)) * angle.unsqueeze(-1)
    return (hidden + F.linear(inner, down),)


def routed_block(up: Tensor, down: Tensor, gate: Tensor, hidden: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    inner = torch.tanh(F.linear(hidden, up)) * angle.unsqueeze(-1)
    return hidden + F.linear(inner, down), F.linear(hidden, gate).flatten(0, 1)


def epilogue(norm: Tensor, head: Tensor, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(hidden * norm, head)
    return ((logits.sum(-1) - targets.float()).square().mean(),)


def routed_epilogue(norm: Tensor, head: Tensor, hidden: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(hidden * norm, head)
    return ((logits.sum(-1) - targets.float()).square().mean() + counts.sum(),)


def chain(
    blocks: int = 2,
    *,
    tied: bool = False,
    routed: bool = False,
    frozen: Collection[str] = (),
    symbols: str = "ids",
) -> Program:
    """Embedding, `blocks` blocks, head. `tied` heads share the embedding; `routed` blocks also give router logits.

    torch names the symbols of B and S after `symbols`.
    """
    build = _Builder(frozen, symbols)
    embed = build.group({"model.embed.weight": (VOCABULARY, HIDDEN)})
    ids = build.batch("ids", build.ids)
    scale = build.placeholder("scale", Source("buffer", ("model.rotary.scale",)), build.tensor(()))
    hidden, angle = build.call("prologue", "prologue", prologue, [embed], [ids, scale])
    angle.meta["name"] = "angle"
    logits = []
    for index in range(blocks):
        fqn = f"model.layers.{index}"
        shapes = {f"{fqn}.up.weight": (WIDE, HIDDEN), f"{fqn}.down.weight": (HIDDEN, WIDE)}
        shapes |= {f"{fqn}.gate.weight": (4, HIDDEN)} if routed else {}
        group = build.group(shapes)
        hidden, *rest = build.call("block", fqn, routed_block if routed else block, [group], [hidden, angle])
        logits += rest
    targets = build.batch("targets", build.like_ids())
    inputs = [hidden, targets]
    if routed:
        inputs.append(build.counts(logits, build.batch("valid", build.like_ids(torch.bool))))
    head = routed_epilogue if routed else epilogue
    own = build.group({"model.norm.weight": (HIDDEN,)} | ({} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}))
    (loss,) = build.call("epilogue", "epilogue", head, [own, embed] if tied else [own], inputs)
    return build.program(tuple(f"model.layers.{index}" for index in range(blocks)), loss)


class _Builder:
    def __init__(self, frozen: Collection[str], symbols: str) -> None:
        self.frozen = frozen
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        ids = torch.zeros(2, 7, dtype=torch.long)
        self.ids = self.mode.from_tensor(ids, symbolic_context=context, source=ConstantSource(symbols))
        self.graph = fx.Graph()
        self.segments: dict[str, Segment] = {}
        self.parameters: dict[str, Parameter] = {}
        self.calls = 0

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        with self.mode:
            return torch.zeros(shape)

    def like_ids(self, dtype: torch.dtype = torch.long) -> Tensor:
        with self.mode:
            return torch.zeros_like(self.ids, dtype=dtype)

    def placeholder(self, name: str, source: Source, value: Any) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta.update(source=source, val=value)
        return node

    def batch(self, name: str, value: Tensor) -> fx.Node:
        return self.placeholder(name, Source("batch", (name,)), value)

    def group(self, shapes: Mapping[str, tuple[int, ...]]) -> fx.Node:
        for fqn, shape in shapes.items():
            self.parameters[fqn] = Parameter(fqn, torch.Size(shape), torch.float32, fqn not in self.frozen)
        names = tuple(shapes)
        return self.placeholder(
            f"w_{names[0].replace('.', '_')}", Source("group", names), tuple(map(self.tensor, shapes.values()))
        )

    def call(
        self, segment: str, fqn: str, function: Callable[..., Any], groups: list[fx.Node], inputs: list[fx.Node]
    ) -> list[fx.Node]:
        flat = [value for group in groups for value in group.meta["val"]]
        if segment not in self.segments:
            module = fx.symbolic_trace(function)
            FakeTensorProp(module, self.mode).propagate_dont_convert_inputs(
                *flat, *(node.meta["val"] for node in inputs)
            )
            self.segments[segment] = Segment(segment, module, len(flat))
        output = next(node for node in reversed(self.segments[segment].module.graph.nodes) if node.op == "output")
        values = tuple(result.meta["val"] for result in output.args[0])
        call = self.graph.call_module(segment, (*groups, *inputs))
        names = tuple(group.meta["source"].names for group in groups)
        call.meta.update(groups=len(groups), group_names=names, call=Call(fqn, self.calls), val=values)
        self.calls += 1
        parts = [self.graph.call_function(operator.getitem, (call, index)) for index in range(len(values))]
        for part, value in zip(parts, values, strict=True):
            part.meta["val"] = value
        return parts

    def counts(self, logits: list[fx.Node], valid: fx.Node) -> fx.Node:
        node = self.graph.call_function(router_counts, (logits, valid, 2))
        node.meta["val"] = self.tensor((5,))
        return node

    def program(self, blocks: tuple[str, ...], loss: fx.Node) -> Program:
        self.graph.output((loss,))
        batch, sequence = (size.node.expr for size in self.ids.shape)
        assert isinstance(batch, sympy.Symbol)
        return Program(
            name="Chain",
            graph=self.graph,
            segments=self.segments,
            parameters=self.parameters,
            blocks=blocks,
            outputs=("loss",),
            fake_mode=self.mode,
            batch_symbol=batch,
            sequence_symbol=sequence,
        )


def copied(graph: fx.Graph) -> fx.Graph:
    """The same outer graph, to be rewritten."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, lambda argument: env[argument])
    return new


def copied_program(program: Program) -> Program:
    segments = {name: replace(each, module=clone_module(each.module)) for name, each in program.segments.items()}
    return replace(program, graph=copied(program.graph), segments=segments)


def copied_step(step: StepProgram) -> StepProgram:
    backward = copied(step.backward) if step.backward is not None else None
    return replace(step, forward=copied(step.forward), backward=backward, computes=dict(step.computes))
