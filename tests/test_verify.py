"""`verify`: each rule, broken in the smallest way, is reported with the pass, the node and the rule."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.fx as fx

from tests.programs import chain, copied_program, copied_step
from turbo_compile import collectives
from turbo_compile.differentiate import differentiate
from turbo_compile.errors import InvalidProgram
from turbo_compile.ir.graphs import output_node, results_of, set_results
from turbo_compile.ir.names import collective
from turbo_compile.ir.program import Call, Program, Source, StepProgram
from turbo_compile.ir.runner import run
from turbo_compile.ir.verify import verify
from turbo_compile.passes import forward_passes, step_passes
from turbo_compile.passes.shard import ShardParameters
from turbo_compile.plans.plan import Plan

BLOCKS = ("model.layers.0", "model.layers.1")


@dataclass(frozen=True)
class Break:
    """A pass with a bug."""

    how: Callable[[Any], None]
    exact: ClassVar[bool] = False

    def run(self, program: Program | StepProgram) -> None:
        self.how(program)


def refused(program: Program | StepProgram, how: Callable[[Any], None], node: str, rule: str) -> None:
    with pytest.raises(InvalidProgram) as caught:
        run([Break(how)], program)
    stage, _, message = str(caught.value).partition(": ")
    assert stage.startswith("after Break(")
    assert message.startswith(f"node {node}: "), message
    assert rule in message


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module"]


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def started(graph: fx.Graph, kind: str) -> list[fx.Node]:
    return [node for node in graph.nodes if collective(node) == kind]


# --- what is right passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [{}, {"tied": True}, {"routed": True}, {"frozen": {f"{BLOCKS[0]}.up.weight"}}])
@pytest.mark.parametrize(
    "plan",
    [
        {"schedule": {"reshard": False, "prefetch": 0}},
        {"mesh": {"dp": 2}, "recompute": {BLOCKS[0]: "full", BLOCKS[1]: "selective"}, "schedule": {"prefetch": 3}},
    ],
)
def test_every_stage_of_a_good_program_passes(made, plan):
    program = chain(**made)
    run(forward_passes(Plan()), program)
    step = differentiate(program, ("loss",))
    run(step_passes(Plan(**plan), step.blocks), step)


def test_a_program_that_is_only_evaluated_passes():
    program = chain()
    step = differentiate(program, ())
    assert step.backward is None
    run([ShardParameters(dict.fromkeys(BLOCKS, True))], step)


def test_verifying_94_layers_takes_a_moment():
    step = differentiate(chain(94), ("loss",))
    ShardParameters(dict.fromkeys(step.blocks, True)).run(step)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        verify(step)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.2


# --- a forward program -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> Program:
    return chain()


@pytest.fixture
def program(whole) -> Program:
    return copied_program(whole)


def _late(program: Program) -> None:
    first, second, *_ = calls(program.graph)
    first.prepend(second)


def _compute(program: Program) -> None:
    with program.graph.inserting_before(output_node(program.graph)):
        program.graph.call_function(torch.neg, (results_of(program.graph)[0],))


def _method(program: Program) -> None:
    with program.graph.inserting_before(output_node(program.graph)):
        program.graph.call_method("neg", (results_of(program.graph)[0],))


def _unknown_segment(program: Program) -> None:
    calls(program.graph)[1].target = "gone"


def _sourceless(program: Program) -> None:
    del named(program.graph, "ids").meta["source"]


def _saved_in_forward(program: Program) -> None:
    named(program.graph, "ids").meta["source"] = Source("saved", ("ids",))


def _input_lost(program: Program) -> None:
    call = calls(program.graph)[1]
    call.args = call.args[:-1]


def _groups_swapped(program: Program) -> None:
    first, second = calls(program.graph)[1:3]
    first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])


def _parameter_lost(program: Program) -> None:
    call = calls(program.graph)[1]
    call.meta["group_names"] = (call.meta["group_names"][0][:1],)


def _result_beyond(program: Program) -> None:
    named(program.graph, "getitem_2").args = (calls(program.graph)[1], 1)


def _result_whole(program: Program) -> None:
    named(program.graph, "getitem_2").target = operator.add


def _input_halved(program: Program) -> None:
    named(program.graph, "getitem").meta["val"] = named(program.graph, "getitem").meta["val"].to(torch.bfloat16)


def _input_transposed(program: Program) -> None:
    value = named(program.graph, "getitem_1").meta["val"]
    named(program.graph, "getitem_1").meta["val"] = value.transpose(0, 1)


def _parameter_halved(program: Program) -> None:
    fqn = f"{BLOCKS[1]}.up.weight"
    program.parameters = program.parameters | {fqn: replace(program.parameters[fqn], dtype=torch.bfloat16)}


def _block_twice(program: Program) -> None:
    call = calls(program.graph)[2]
    call.meta["call"] = Call(BLOCKS[0], 2)


def _block_gone(program: Program) -> None:
    program.blocks = (*program.blocks, "model.layers.2")


@pytest.mark.parametrize(
    ("how", "node", "rule"),
    [
        (_late, "fwd %block (model.layers.0)", "reads %getitem before it is made"),
        (_compute, "fwd %neg", "is compute, and belongs in a segment"),
        (_method, "fwd %neg", "an outer graph has no call_method"),
        (_unknown_segment, "fwd %block (model.layers.0)", "calls gone, a segment this program does not have"),
        (_sourceless, "fwd %ids", "a placeholder stands for one of batch, buffer, group"),
        (_saved_in_forward, "fwd %ids", "a placeholder stands for one of batch, buffer, group"),
        (_input_lost, "fwd %block (model.layers.0)", "takes 2 inputs besides its parameters, and gets 1"),
        (_groups_swapped, "fwd %block (model.layers.0)", "does not hold the parameters the call reads there"),
        (_parameter_lost, "fwd %block (model.layers.0)", "takes 2 parameters, and gets groups of [1]"),
        (_result_beyond, "fwd %getitem_2", "a call has 1 results, and each is taken by its number"),
        (_result_whole, "fwd %getitem_2", "each is taken by its number"),
        (_input_halved, "fwd %block (model.layers.0)", "%getitem is bf16["),
        (_input_transposed, "fwd %block (model.layers.0)", "%getitem_1 is fp32["),
        (_parameter_halved, "fwd %block_1 (model.layers.1)", "is bf16[12, 8] where the segment takes fp32[12, 8]"),
        (_block_twice, "fwd %block_1 (model.layers.0)", "block model.layers.0 is called 2 times instead of once"),
        (_block_gone, "fwd %output", "block model.layers.2 is called 0 times instead of once"),
    ],
)
def test_a_program_is_refused(program, how, node, rule):
    refused(program, how, node, rule)


def test_a_collective_inside_a_segment_is_refused():
    def sum_inside(program: Program) -> None:
        graph = program.segments["block"].module.graph
        with graph.inserting_before(output_node(graph)):
            graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (results_of(graph)[0],))

    refused(chain(), sum_inside, "%wait_tensor_default", "segment block holds _c10d_functional.wait_tensor.default")


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded() -> StepProgram:
    """With a sum of gradients: the tied weight is read in the prologue and in the epilogue."""
    made = differentiate(chain(tied=True, frozen={"model.norm.weight"}), ("loss",))
    run([ShardParameters({BLOCKS[0]: True, BLOCKS[1]: False})], made)
    return made


@pytest.fixture
def step(sharded) -> StepProgram:
    return copied_step(sharded)


def _wait_lost(step: StepProgram) -> None:
    start = started(step.forward, "all_gather")[0]
    (wait,) = start.users
    wait.replace_all_uses_with(start)
    step.forward.erase_node(wait)


def _waited_twice(step: StepProgram) -> None:
    start = started(step.forward, "all_gather")[0]
    with step.forward.inserting_after(start):
        step.forward.call_function(collectives.wait, (start,))


def _waits_for_a_value(step: StepProgram) -> None:
    with step.forward.inserting_before(output_node(step.forward)):
        step.forward.call_function(collectives.wait, (results_of(step.forward)[0][0],))


def _axis_unknown(step: StepProgram) -> None:
    start = started(step.forward, "all_gather")[0]
    start.args = (start.args[0], "rows")


def _not_gathered(step: StepProgram) -> None:
    call = calls(step.forward)[1]
    call.replace_input_with(call.args[0], call.args[0].args[0].args[0])


def _bundle_read_twice(step: StepProgram) -> None:
    later = calls(step.backward)[2]
    later.args = (later.args[0], calls(step.backward)[1].args[1], *later.args[2:])


def _bundles_swapped(step: StepProgram) -> None:
    results, (first, second, *others), kept = results_of(step.forward)
    set_results(step.forward, (results, (second, first, *others), kept))


def _bundle_not_returned(step: StepProgram) -> None:
    results, bundles, kept = results_of(step.forward)
    set_results(step.forward, (results, bundles[:-1], kept))


def _partitions_differ(step: StepProgram) -> None:
    calls(step.backward)[1].target = f"{step.compute('block', 'full').name}_backward"


def _kept_not_returned(step: StepProgram) -> None:
    results, bundles, kept = results_of(step.forward)
    set_results(step.forward, (results, bundles, kept[:-1]))


def _kept_not_taken(step: StepProgram) -> None:
    results, bundles, kept = results_of(step.forward)
    set_results(step.forward, (results, bundles, (*kept, kept[0])))


def _needed_group_dropped(step: StepProgram) -> None:
    call = calls(step.backward)[2]
    call.args = (None, *call.args[1:])


def _gradient_lost(step: StepProgram) -> None:
    set_results(step.backward, results_of(step.backward)[:-1])


def _gradient_and_its_group_lost(step: StepProgram) -> None:
    _gradient_lost(step)
    step.gradient_groups = step.gradient_groups[:-1]


def _gradients_swapped(step: StepProgram) -> None:
    first, second, *others = results_of(step.backward)
    set_results(step.backward, (second, first, *others))


def _gradient_twice(step: StepProgram) -> None:
    set_results(step.backward, (*results_of(step.backward), results_of(step.backward)[-1]))
    step.gradient_groups = (*step.gradient_groups, step.gradient_groups[-1])


def _frozen_late(step: StepProgram) -> None:
    fqn = f"{BLOCKS[1]}.up.weight"
    step.parameters = step.parameters | {fqn: replace(step.parameters[fqn], trainable=False)}


def _sum(step: StepProgram) -> fx.Node:
    return next(node for node in step.backward.nodes if node.target is collectives.add_gradients)


def _part_of_a_sum_lost(step: StepProgram) -> None:
    _sum(step).replace_all_uses_with(_sum(step).args[0])


def _part_of_a_sum_twice(step: StepProgram) -> None:
    _sum(step).args = (_sum(step).args[0], _sum(step).args[0])


def _not_reduced(step: StepProgram) -> None:
    gradient = results_of(step.backward)[-1]
    gradient.replace_all_uses_with(gradient.args[0].args[0])


def _reduced_twice(step: StepProgram) -> None:
    gradient = results_of(step.backward)[-1]
    with step.backward.inserting_after(gradient):
        start = step.backward.call_function(collectives.reduce_scatter, (gradient, "shard"))
    with step.backward.inserting_after(start):
        wait = step.backward.call_function(collectives.wait, (start,))
    wait.meta["fqns"] = start.meta["fqns"] = gradient.meta["fqns"]
    gradient.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not start)


def _added_after_reduction(step: StepProgram) -> None:
    total = _sum(step)
    with step.backward.inserting_before(total):
        start = step.backward.call_function(collectives.reduce_scatter, (total.args[0], "shard"))
        wait = step.backward.call_function(collectives.wait, (start,))
    total.args = (wait, total.args[1])


def _tangent_of_another(step: StepProgram) -> None:
    call = calls(step.backward)[1]
    loss = next(node for node in step.backward.nodes if node.name == "d_loss")
    call.args = (*call.args[:-1], loss)


@pytest.mark.parametrize(
    ("how", "node", "rule"),
    [
        (_wait_lost, "fwd %all_gather", "a started all_gather is waited for once and read by nothing else"),
        (_waited_twice, "fwd %all_gather", "waited for once and read by nothing else, not 2 times"),
        (_waits_for_a_value, "fwd %wait_4", "waits for something that no collective started"),
        (_axis_unknown, "fwd %all_gather", "'rows' is no mesh axis; there are world, dp, shard"),
        (_not_gathered, "fwd %block (model.layers.0)", "reads %w_model_layers_0_up_weight, which is sharded"),
        (_bundle_read_twice, "bwd %s_model_layers_0", "a bundle is read by one backward call, not by 0"),
        (_bundles_swapped, "bwd %prologue_none_backward (prologue)", "reads the bundle of model.layers.0"),
        (_bundle_not_returned, "fwd %epilogue (epilogue)", "forward returns 3 bundles of the 4 that calls save"),
        (_partitions_differ, "bwd %block_none_backward (model.layers.1)", "saved, but runs block_full_backward"),
        (_kept_not_returned, "bwd %w_model_norm_weight", "takes model.norm.weight, where forward keeps nothing"),
        (_kept_not_taken, "fwd %wait", "is kept for backward, which does not take it"),
        (_needed_group_dropped, "bwd %block_none_backward_1 (model.layers.0)", "again, and gets nothing"),
        (_gradient_lost, "bwd %output", "returns 2 gradients for 3 groups"),
        (_gradient_and_its_group_lost, "bwd %output", "down.weight is trained and has no gradient"),
        (_gradients_swapped, "bwd %wait_2", "is returned as the gradient of model.embed.weight"),
        (_gradient_twice, "bwd %output", "up.weight has more than one gradient"),
        (_frozen_late, "bwd %wait_3", "model.layers.1.up.weight is frozen, and gets a gradient"),
        (_part_of_a_sum_lost, "bwd %wait_1", "the gradient of model.embed.weight leaves out its use in prologue"),
        (_part_of_a_sum_twice, "bwd %wait_1", "the gradient of model.embed.weight leaves out its use in prologue"),
        (_not_reduced, "bwd %getitem_2", "a gradient is reduced once over shard, not 0 times"),
        (_reduced_twice, "bwd %wait_4", "a gradient is reduced once over shard, not 2 times"),
        (_added_after_reduction, "bwd %add_gradients", "adds gradients after their reduction"),
        (_tangent_of_another, "bwd %block_none_backward (model.layers.1)", "%d_loss is fp32[] where"),
    ],
)
def test_a_step_is_refused(step, how, node, rule):
    refused(step, how, node, rule)


def test_a_use_that_is_counted_twice_is_refused(step):
    def also_twice(step: StepProgram) -> None:
        total = _sum(step)
        with step.backward.inserting_after(total):
            more = step.backward.call_function(collectives.add_gradients, (total, total.args[0]))
        more.meta["fqns"] = total.meta["fqns"]
        total.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)

    refused(step, also_twice, "bwd %wait_1", "the gradient of model.embed.weight counts epilogue twice")


def test_a_program_that_arrives_broken_is_refused_before_any_pass(program):
    _unknown_segment(program)
    with pytest.raises(InvalidProgram, match=r"^after capture: node fwd %block"):
        run([], program)
