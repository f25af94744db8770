"""Differentiated programs against fp64 autograd: random programs of segments, every recompute mode, both backends.

And GPT-2 with dropout against itself (the slope of the loss along its gradient is the gradient's norm).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from transformers import GPT2Config, GPT2LMHeadModel

from tests.families import ids_of
from tests.parity import whole
from tests.world import World
from turbo_compile import turbo_compile
from turbo_compile.differentiate import differentiate
from turbo_compile.ir.graphs import results_of
from turbo_compile.ir.mesh import build_axes, ensure_process_group
from turbo_compile.ir.placement import Layout
from turbo_compile.ir.program import Call, Parameter, Program, Segment, Source, source, split_groups
from turbo_compile.ir.runner import run
from turbo_compile.kernels import counter_random
from turbo_compile.lower import lower
from turbo_compile.passes.recompute import Recompute
from turbo_compile.passes.shard import ShardParameters
from turbo_compile.plans.sections import Mesh

MODES = ("none", "selective", "full")
HIDDEN = 3

# --- random programs, as data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation of a segment on earlier values, named by index (modulo how many there are)."""

    op: str
    a: int
    b: int


@dataclass(frozen=True)
class Body:
    """A segment: `weights` (H,H) parameters and `inputs` (B,S,H) values, ids and a seed -> the values in `outputs`.

    A value may be an input, or the same twice; `count` adds an integer output, `absent` a None.
    """

    weights: int
    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    count: bool
    absent: bool


@dataclass(frozen=True)
class Use:
    """A call: of which body, on which earlier values, with its own group or an earlier call's."""

    body: int
    inputs: tuple[int, ...]
    shares: int | None
    counts_as_ids: bool
    mode: str
    reshard: bool


@dataclass(frozen=True)
class Recipe:
    """A whole program: its calls in a row, then a loss over the values `read`. `also` is a second output."""

    bodies: tuple[Body, ...]
    uses: tuple[Use, ...]
    read: tuple[int, ...]
    also: int
    also_differentiable: bool
    frozen: frozenset[int]
    sharded: bool


OPS = ("linear", "tanh", "add", "mul", "softmax", "dropout", "scale_by_ids", "turn", "detach", "weights")
_index = st.integers(0, 5)
_bodies = st.builds(
    Body,
    weights=st.integers(1, 2),
    inputs=st.integers(1, 2),
    steps=st.lists(st.builds(Step, st.sampled_from(OPS), _index, _index), min_size=2, max_size=5).map(tuple),
    outputs=st.lists(_index, min_size=1, max_size=3).map(tuple),
    count=st.booleans(),
    absent=st.booleans(),
)
_uses = st.builds(
    Use,
    body=_index,
    inputs=st.tuples(_index, _index),
    shares=st.none() | _index,
    counts_as_ids=st.booleans(),
    mode=st.sampled_from(MODES),
    reshard=st.booleans(),
)
RECIPES = st.builds(
    Recipe,
    bodies=st.lists(_bodies, min_size=1, max_size=3).map(tuple),
    uses=st.lists(_uses, min_size=2, max_size=4).map(tuple),
    read=st.lists(_index, min_size=1, max_size=2).map(tuple),
    also=_index,
    also_differentiable=st.booleans(),
    frozen=st.frozensets(st.integers(0, 3), max_size=2),
    sharded=st.booleans(),
)


def apply(graph: fx.Graph, step: Step, site: int, weights: list[fx.Node], values: list[fx.Node], rest: Any) -> fx.Node:
    ids, seed = rest
    a, b = values[step.a % len(values)], values[step.b % len(values)]
    w = weights[step.b % len(weights)]
    match step.op:
        case "linear":
            return graph.call_function(torch.nn.functional.linear, (a, w))
        case "tanh":
            return graph.call_function(torch.tanh, (a,))
        case "add":
            return graph.call_function(operator.add, (a, b))
        case "mul":
            return graph.call_function(operator.mul, (a, b))
        case "softmax":
            return graph.call_function(torch.softmax, (a, -1))
        case "dropout":
            return graph.call_function(counter_random.dropout, (a, 0.3, seed, site))
        case "scale_by_ids":
            angle = graph.call_function(torch.cos, (graph.call_method("double", (ids,)),))
            return graph.call_function(operator.mul, (a, graph.call_method("unsqueeze", (angle, -1))))
        case "turn":  # a view of a view: an output may share memory with an input
            return graph.call_method("transpose", (graph.call_method("transpose", (a, 0, 1)), 0, 1))
        case "detach":
            return graph.call_method("detach", (a,))
        case "weights":  # computed from parameters alone: never saved
            square = graph.call_function(torch.matmul, (w, graph.call_method("t", (weights[0],))))
            return graph.call_function(torch.matmul, (a, graph.call_function(torch.tanh, (square,))))
    raise AssertionError(step.op)


def body_module(body: Body) -> fx.GraphModule:
    """The body as torch-level code: weights, inputs, ids, seed -> outputs."""
    graph = fx.Graph()
    weights = [graph.placeholder(f"w{i}") for i in range(body.weights)]
    values = [graph.placeholder(f"x{i}") for i in range(body.inputs)]
    rest = graph.placeholder("ids"), graph.placeholder("seed")
    for site, step in enumerate(body.steps):
        values.append(apply(graph, step, site, weights, values, rest))
    outputs: list[Any] = [values[-1 - index % len(values)] for index in body.outputs]
    if body.count:
        outputs.append(graph.call_method("long", (graph.call_function(operator.gt, (values[-1], 0.1)),)))
        outputs[-1] = graph.call_method("sum", (outputs[-1], -1))
    if body.absent:
        outputs.insert(1, None)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def loss_module(values: int) -> fx.GraphModule:
    """One weight, some values -> the loss, a scalar."""
    graph = fx.Graph()
    weight = graph.placeholder("w")
    parts = []
    for index in range(values):
        projected = graph.call_function(torch.matmul, (graph.placeholder(f"x{index}"), weight))
        parts.append(graph.call_method("mean", (graph.call_function(torch.sin, (projected,)),)))
    total = parts[0]
    for part in parts[1:]:
        total = graph.call_function(operator.add, (total, part))
    graph.output((total,))
    return fx.GraphModule(torch.nn.Module(), graph)


# --- from data to a Program -------------------------------------------------------------------------------------------


@dataclass
class Builder:
    """Puts together the outer graph, with symbolic B and S."""

    frozen: frozenset[int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    segments: dict[str, Segment] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    calls: int = 0

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        ids = torch.zeros(2, 7, dtype=torch.long)
        self.ids = self.mode.from_tensor(ids, symbolic_context=context, source=ConstantSource("ids"))
        with self.mode:
            self.x = torch.zeros(*self.ids.shape, HIDDEN, dtype=torch.float64)
            self.seed = torch.zeros((), dtype=torch.long)

    def batch(self, name: str, value: Tensor) -> fx.Node:
        return self._placeholder(name, Source("batch", (name,)), value)

    def group(self, fqn: str, weights: int) -> fx.Node:
        names = tuple(f"{fqn}.w{i}" for i in range(weights))
        for name in names:
            trainable = len(self.parameters) not in self.frozen
            self.parameters[name] = Parameter(name, torch.Size((HIDDEN, HIDDEN)), torch.float64, trainable)
        with self.mode:
            values = tuple(torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64) for _ in names)
        return self._placeholder(f"w_{fqn}", Source("group", names), values)

    def call(
        self, name: str, fqn: str, module: Callable[[], fx.GraphModule], group: fx.Node, inputs: list[fx.Node]
    ) -> Any:
        flat = (*group.meta["val"], *(node.meta["val"] for node in inputs))
        if name not in self.segments:
            made = module()
            FakeTensorProp(made, self.mode).propagate_dont_convert_inputs(*flat)
            self.segments[name] = Segment(name, made, len(group.meta["val"]))
        results = results_of(self.segments[name].module.graph)
        values = tuple(result.meta["val"] if result is not None else None for result in results)
        call = self.graph.call_module(name, (group, *inputs))
        names = (source(group).names,)
        call.meta.update(groups=1, group_names=names, call=Call(fqn, self.calls), val=values)
        self.calls += 1
        parts = []
        for index, value in enumerate(values):
            if value is not None:
                parts.append(self.graph.call_function(operator.getitem, (call, index)))
                parts[-1].meta["val"] = value
        return parts

    def program(self, fqns: tuple[str, ...], results: dict[str, fx.Node]) -> Program:
        for node in [n for n in self.graph.nodes if n.target is operator.getitem and n not in results.values()]:
            if not node.users:
                self.graph.erase_node(node)
        self.graph.output(tuple(results.values()))
        batch, sequence = (size.node.expr for size in self.ids.shape)
        return Program(
            name="Random",
            graph=self.graph,
            segments=self.segments,
            parameters=self.parameters,
            blocks=fqns,
            outputs=tuple(results),
            fake_mode=self.mode,
            batch_symbol=batch,
            sequence_symbol=sequence,
        )

    def _placeholder(self, name: str, found: Source, value: Any) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta.update(source=found, val=value)
        return node


def program_of(recipe: Recipe) -> Program:
    build = Builder(recipe.frozen)
    values, ids, seed = [build.batch("x", build.x)], build.batch("ids", build.ids), build.batch("seed", build.seed)
    counts: list[fx.Node] = []
    groups: dict[int, list[fx.Node]] = {}
    made: list[fx.Node] = []
    for turn, use in enumerate(recipe.uses):
        index = use.body % len(recipe.bodies)
        body, fqn = recipe.bodies[index], f"block{turn}"
        own = groups.setdefault(index, [])
        if use.shares is None or not own:
            own.append(build.group(fqn, body.weights))
        group = own[-1 if use.shares is None else use.shares % len(own)]
        inputs = [values[-1 - use.inputs[i] % len(values)] for i in range(body.inputs)]
        inputs += [counts[-1] if use.counts_as_ids and counts else ids, seed]
        parts = build.call(f"body{index}", fqn, lambda body=body: body_module(body), group, inputs)
        counts += [part for part in parts if part.meta["val"].dtype is torch.long]
        made = [part for part in parts if part.meta["val"].dtype is torch.float64]
        values += made
    read = [values[-1 - index % len(values)] for index in recipe.read]
    (loss,) = build.call("loss", "loss", lambda: loss_module(len(read)), build.group("head", 1), read)
    return build.program(
        tuple(f"block{turn}" for turn in range(len(recipe.uses))),
        {"loss": loss, "also": made[recipe.also % len(made)]},
    )


# --- the two ways to run it -------------------------------------------------------------------------------------------


def evaluate(program: Program, batch: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of the program by plain calls of its segments: autograd follows."""
    env: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found = source(node)
            env[node] = batch[found.names[0]] if found.kind == "batch" else [parameters[fqn] for fqn in found.names]
        elif node.op == "call_module":
            groups, inputs = split_groups(node)
            flat = [parameter for group in groups for parameter in env[group]]
            env[node] = program.segments[str(node.target)].module(*flat, *(env[value] for value in inputs))
        elif node.target is operator.getitem:
            env[node] = env[node.args[0]][node.args[1]]
    return dict(zip(program.outputs, (env[node] for node in results_of(program.graph)), strict=True))


def compiled_step(
    recipe: Recipe, program: Program, backend: str
) -> Callable[[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """batch, parameters, tangents -> outputs and gradients, through differentiate, the passes and lower."""
    differentiable = ("loss", "also") if recipe.also_differentiable else ("loss",)
    step = differentiate(program, differentiable)
    passes: list[Any] = [Recompute({f"block{turn}": use.mode for turn, use in enumerate(recipe.uses)})]
    if recipe.sharded:
        passes.append(ShardParameters({f"block{turn}": use.reshard for turn, use in enumerate(recipe.uses)}))
    run(passes, step)
    ensure_process_group(torch.device("cpu"))
    axes = build_axes(Mesh(), torch.device("cpu"))
    layouts = {fqn: Layout(p.shape, 1, False) for fqn, p in program.parameters.items()}
    made = lower(step, axes, layouts, torch.float64, {}, backend)

    def run_step(
        batch: dict[str, Tensor], parameters: dict[str, Tensor], tangents: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def read(node: fx.Node) -> Any:
            found = source(node)
            if found.kind == "batch":
                return batch[found.names[0]]
            return tuple(parameters[fqn] for fqn in found.names)

        with torch.no_grad():
            results, bundles, kept = made.forward(*map(read, made.inputs))
            by_name, left = dict(zip(made.bundle_names, bundles, strict=True)), iter(kept)
            arguments = []
            for node in made.backward_inputs:
                match source(node).kind:
                    case "saved":
                        arguments.append(by_name[source(node).names[0]])
                    case "kept":
                        arguments.append([next(left)])
                    case "tangent":
                        arguments.append([tangents[source(node).names[0]].clone()])
                    case _:
                        arguments.append(read(node))
            gradients = made.backward(*arguments) if made.backward is not None else ()
        found = zip(step.gradient_groups, gradients, strict=True)
        by_fqn = {fqn: t for names, ts in found for fqn, t in zip(names, ts, strict=True)}
        return dict(zip(program.outputs, results, strict=True)), by_fqn

    return run_step


def check(recipe: Recipe, backend: str) -> None:
    program = program_of(recipe)
    step = compiled_step(recipe, program, backend)
    for rows, length in ((3, 5), (2, 4)):
        generator = torch.Generator().manual_seed(rows)
        batch = {
            "x": torch.randn(rows, length, HIDDEN, dtype=torch.float64, generator=generator),
            "ids": torch.randint(0, 9, (rows, length), generator=generator),
            "seed": torch.tensor(2**40 + rows),
        }
        weights = {
            fqn: torch.randn(p.shape, dtype=torch.float64, generator=generator) for fqn, p in program.parameters.items()
        }
        leaves = {fqn: w.clone().requires_grad_(program.parameters[fqn].trainable) for fqn, w in weights.items()}
        expected = evaluate(program, batch, leaves)
        tangents = {
            "loss": torch.tensor(0.7, dtype=torch.float64),
            "also": torch.randn(rows, length, HIDDEN, dtype=torch.float64, generator=generator),
        }
        roots = [
            name
            for name in (("loss", "also") if recipe.also_differentiable else ("loss",))
            if expected[name].requires_grad
        ]
        if roots:
            torch.autograd.backward([expected[name] for name in roots], [tangents[name] for name in roots])
        given = {name: value.clone() for name, value in batch.items()}
        outputs, gradients = step(given, weights, tangents)
        for name, value in expected.items():
            torch.testing.assert_close(outputs[name], value.detach(), rtol=1e-10, atol=1e-12)
        for fqn, leaf in leaves.items():
            ours = gradients.get(fqn, torch.zeros_like(leaf))
            reference = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
            assert leaf.requires_grad or fqn not in gradients, f"{fqn} is frozen"
        assert all(torch.equal(given[name], batch[name]) for name in batch), "a batch field was written to"


@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(RECIPES)
def test_random_programs_have_autograds_gradients(recipe: Recipe) -> None:
    check(recipe, "eager")


def chosen(*modes: str, sharded: bool = False) -> Recipe:
    """A program with a bit of everything: tied weights, dropout, returned inputs, unused, integer and None outputs."""
    first = Body(
        weights=2,
        inputs=1,
        steps=(Step("linear", 0, 0), Step("dropout", 1, 0), Step("weights", 2, 1), Step("scale_by_ids", 3, 0)),
        outputs=(0, 4, 0),
        count=True,
        absent=True,
    )
    second = Body(
        weights=1,
        inputs=2,
        steps=(Step("softmax", 0, 0), Step("mul", 2, 1), Step("linear", 3, 0), Step("turn", 0, 0)),
        outputs=(0, 1),
        count=False,
        absent=False,
    )
    uses = (
        Use(0, (0, 0), None, counts_as_ids=False, mode=modes[0], reshard=True),
        Use(1, (0, 1), None, counts_as_ids=True, mode=modes[1], reshard=False),
        Use(0, (1, 0), 0, counts_as_ids=True, mode=modes[2], reshard=True),
    )
    return Recipe((first, second), uses, (0, 2), 1, True, frozenset({1}), sharded)


MIXTURES = [("none", "selective", "full"), ("full", "full", "none"), ("selective", "none", "selective")]


def test_uses_of_one_group_may_train_different_weights_of_it() -> None:
    body = Body(2, 1, (Step("linear", 0, 0), Step("linear", 0, 1)), outputs=(0, 1), count=False, absent=False)
    uses = (
        Use(0, (0, 0), None, counts_as_ids=False, mode="none", reshard=True),  # of both weights
        Use(0, (0, 0), 0, counts_as_ids=False, mode="full", reshard=True),  # its second output goes nowhere
    )
    for sharded in (False, True):
        check(Recipe((body,), uses, (1, 3), 0, False, frozenset(), sharded), "eager")


@pytest.mark.parametrize("modes", MIXTURES, ids="-".join)
def test_mixed_partitions_have_autograds_gradients(modes: tuple[str, ...]) -> None:
    check(chosen(*modes, sharded=modes[0] == "full"), "eager")


def test_compiled_partitions_have_autograds_gradients() -> None:
    steps = (Step("linear", 0, 0), Step("dropout", 1, 0), Step("weights", 2, 0), Step("add", 3, 0))
    body = Body(1, 1, steps, outputs=(0, 3), count=True, absent=True)  # its last value and a copy of its input
    first, last = (
        Use(0, (1 - turn, 0), 0, counts_as_ids=True, mode=mode, reshard=True)
        for turn, mode in enumerate(("selective", "full"))
    )
    recipe = Recipe((body,), (first, last), (0, 1), 0, False, frozenset(), sharded=True)
    check(recipe, "inductor")
    check(recipe, "inductor")  # from Inductor's cache


# --- dropout: the gradient must belong to the loss --------------------------------------------------------------------

VOCABULARY = 61


def dropped() -> GPT2LMHeadModel:
    """GPT-2 in fp64 with every dropout on, the same weights in every process."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.3,
        embd_pdrop=0.3,
        attn_pdrop=0.3,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).double().train()


def seeded_loss(model: Any, ids: Tensor, seed: int = 11) -> Tensor:
    torch.manual_seed(seed)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def slope(mode: str, backend: str) -> tuple[float, float, list[float]]:
    """|gradient|, the loss's slope along it, and the loss of one seed twice and of another; the same on every rank.

    Rank r takes its half of the two rows.
    """
    plan = {"mesh": {"fsdp": dist.get_world_size() if dist.is_initialized() else 1}, "recompute": mode}
    model = turbo_compile(dropped(), plan, backend=backend)
    ids = ids_of(2, 8, VOCABULARY, 1).tensor_split(plan["mesh"]["fsdp"])[dist.get_rank()]
    loss = seeded_loss(model, ids)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    norm = float(torch.stack([whole(g).norm() for g in gradients]).norm())
    moved = []
    for distance in (1e-3, -2e-3, 1e-3):
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), torch._foreach_mul(gradients, distance / norm))
        moved.append(float(seeded_loss(model, ids).detach()))
    others = [float(loss.detach()), moved[2], float(seeded_loss(model, ids, seed=12).detach())]
    return norm, (moved[0] - moved[1]) / 2e-3, others


def check_slope(norm: float, along: float, losses: list[float]) -> None:
    assert norm > 1.0 and abs(along / norm - 1) < 0.01, (norm, along)
    once, again, other = losses
    assert again == pytest.approx(once, abs=1e-9) and abs(other - once) > 1e-3


@pytest.mark.parametrize(("mode", "backend"), [*((mode, "eager") for mode in MODES), ("full", "inductor")])
def test_the_gradient_is_the_slope_of_the_loss(mode: str, backend: str) -> None:
    check_slope(*slope(mode, backend))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_gradient_is_the_slope_of_the_loss_on_two_ranks(world: World, mode: str) -> None:
    first, second = world.run(slope, mode, "eager")
    check_slope(*first)
    assert first == second


def masks_of_equal_rows() -> tuple[list[float], list[float]]:
    """Of a row that every rank shares: the logits in training, twice under one seed, and in evaluation."""
    model = turbo_compile(dropped(), "auto", backend="eager")
    ids = ids_of(1, 8, VOCABULARY, 1)
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        drawn.append(model(input_ids=ids).logits.detach())
    assert torch.equal(*drawn)
    model.eval()
    with torch.no_grad():
        return drawn[0].flatten().tolist(), model(input_ids=ids).logits.flatten().tolist()


def test_equal_rows_on_two_ranks_get_different_masks_and_equal_logits_in_eval(world: World) -> None:
    (drawn, evaluated), (other_drawn, other_evaluated) = world.run(masks_of_equal_rows)
    assert evaluated == other_evaluated
    assert max(abs(a - b) for a, b in zip(drawn, other_drawn, strict=True)) > 0.1
