"""What flows through the compiler: a program of shared segments, and the step that training runs.

The outer graph is `torch.fx`: segment calls (`call_module`), boundary ops and collectives (`call_function`), nothing
else. A placeholder stands for one batch field, one buffer, or one *group*: the parameters that travel together, as a
tuple. A call takes its groups first, then its inputs, and returns a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
import torch.fx as fx

from turbo_compile.ir.graphs import placeholders


@dataclass(frozen=True, slots=True)
class Source:
    """What a placeholder of an outer graph stands for.

    `batch` and `buffer` have one name (a field, an FQN); `group` has the FQNs of its parameters in order; `saved` is
    a call's bundle of saved values and `tangent` the gradient of an output, in the backward graph.
    """

    kind: Literal["batch", "buffer", "group", "kept", "saved", "tangent"]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a segment: the module it stands for (`model.layers.3`, or the segment's name), and its turn.

    `part` tells the pieces of a block apart that a pass cut at its boundaries; "" is a whole block.
    """

    fqn: str
    index: int
    part: str = ""

    @property
    def label(self) -> str:
        """Unlike that of any other call of the program."""
        return f"{self.fqn}.{self.part}" if self.part else self.fqn


@dataclass(frozen=True, slots=True)
class SequenceSlicing:
    """What sequence parallelism does to a batch: where it cuts, which fields, and what fills the last chunk up.

    Fields in `padded` are lengthened on the right to a multiple of the ranks, with their value; those in `sliced` are
    then cut into one contiguous chunk of tokens a rank; those in `global_` stay whole on every rank.
    """

    boundary: str
    padded: Mapping[str, int]
    sliced: tuple[str, ...]
    global_: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sliced:
    """A program whose segments hold 1/`ranks` of the sequence between attentions: S counts those tokens, `whole` all.

    Both are symbols (numbers where shapes are static); `whole` is `ranks` times the other in every call.
    """

    contract: SequenceSlicing
    ranks: int
    whole: sympy.Expr


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the program uses it: its shape, the dtype compute wants, and whether it is trained.

    It is gathered over `axis`: over `shard` to its full shape, experts over `edp` to those one rank computes.
    """

    fqn: str
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    axis: str = "shard"

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True, slots=True)
class Segment:
    """A different stretch of plain compute, once. `module` takes `parameters` tensors first, then its inputs."""

    name: str
    module: fx.GraphModule
    parameters: int

    def values(self) -> list[Any]:
        """Fake values of the placeholders, in order."""
        return [node.meta["val"] for node in placeholders(self.module.graph)]


@dataclass(slots=True)
class Program:
    """A model's forward: the outer graph and its segments, with symbolic batch and sequence sizes.

    `outputs` names what the outer graph returns, in order (`loss`, `aux_loss`, `logits`). `guards` are the conditions
    on `B` and `S` under which the capture holds. `fused` says of each fusion that fired where it did.
    """

    name: str
    graph: fx.Graph
    segments: dict[str, Segment]
    parameters: dict[str, Parameter]
    blocks: tuple[str, ...]
    outputs: tuple[str, ...]
    fake_mode: Any
    batch_symbol: sympy.Expr
    sequence_symbol: sympy.Expr
    guards: tuple[sympy.Expr, ...] = ()
    sliced: Sliced | None = None
    fused: dict[str, str] = field(default_factory=dict)

    def calls(self) -> Iterator[fx.Node]:
        return (node for node in self.graph.nodes if node.op == "call_module")


@dataclass(frozen=True, slots=True)
class Compute:
    """One differentiated use of a segment: its forward and backward graphs and how values pass between them.

    forward: parameters, inputs -> outputs, then saved values. backward: saved values (integers first), then tangents
    -> one gradient per entry of `gradients`. `saved` says where each saved value comes from: ("parameter", i) is
    gathered again, ("input", i) and ("value", i) travel in the call's bundle. `inputs` counts non-parameter inputs.
    """

    name: str
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    parameters: int
    inputs: int
    outputs: int
    saved: tuple[tuple[Literal["parameter", "input", "value"], int], ...] = ()
    tangents: tuple[int, ...] = ()
    gradients: tuple[tuple[Literal["parameter", "input"], int], ...] = ()


@dataclass(slots=True)
class StepProgram:
    """A training step (or, with no backward, an evaluation): two outer graphs and the computes they call.

    The forward graph returns (outputs, bundles, kept groups); the backward graph takes the bundles and the tangents
    and returns one tuple of gradients a group, in the order of `gradient_groups`.
    """

    name: str
    forward: fx.Graph
    backward: fx.Graph | None
    computes: dict[str, Compute]
    joints: dict[str, Any]
    parameters: dict[str, Parameter]
    blocks: tuple[str, ...]
    outputs: tuple[str, ...]
    fake_mode: Any
    batch_symbol: sympy.Expr
    sequence_symbol: sympy.Expr
    guards: tuple[sympy.Expr, ...] = ()
    sliced: Sliced | None = None
    fused: dict[str, str] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    gradient_groups: tuple[tuple[str, ...], ...] = ()

    def compute(self, joint: str, mode: str) -> Compute:
        """The compute of a joint graph in `mode`, partitioned once."""
        name = self.joints[joint].named(mode)
        if name not in self.computes:
            self.computes[name] = self.joints[joint].partition(mode)
        return self.computes[name]

    def compute_of(self, call: fx.Node) -> Compute:
        """The compute a call of either graph uses."""
        return self.computes[str(call.target).removesuffix("_backward")]

    def graphs(self) -> tuple[tuple[str, fx.Graph], ...]:
        pairs = (("fwd", self.forward), ("bwd", self.backward))
        return tuple((name, graph) for name, graph in pairs if graph is not None)


def split_groups(call: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[Any, ...]]:
    """A call's leading group arguments, and the rest."""
    count = call.meta["groups"]
    arguments: tuple[Any, ...] = call.args
    return arguments[:count], arguments[count:]


def source(node: fx.Node) -> Source:
    """What an outer placeholder stands for."""
    found: Source = node.meta["source"]
    return found
