"""The rewrites between the model and the machine, in their order, a reason a line."""

from __future__ import annotations

from collections.abc import Iterable

from turbo_compile.boundaries.sequence import MODEL_ENTRY
from turbo_compile.ir.runner import Pass
from turbo_compile.passes.experts import ExpertParallel
from turbo_compile.passes.grouped_experts import FuseGroupedExperts
from turbo_compile.passes.linear_cross_entropy import FuseLinearCrossEntropy
from turbo_compile.passes.overlap import OverlapShared
from turbo_compile.passes.prefetch import Prefetch
from turbo_compile.passes.recompute import Recompute
from turbo_compile.passes.sequence import SequenceParallel
from turbo_compile.passes.shard import ShardParameters
from turbo_compile.passes.statistics import SumOverRanks
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.ranges import resolve_ranges


def forward_passes(plan: Plan) -> tuple[Pass, ...]:
    """The rewrites of the forward program, before it is differentiated."""
    passes: list[Pass] = []
    if fuses(plan, "linear_cross_entropy"):
        passes.append(FuseLinearCrossEntropy(plan.fuse != "auto"))
    if plan.mesh.ep > 1:
        passes.append(ExpertParallel(plan.mesh.ep, plan.mesh.edp))  # first: it parts a block's experts from the rest
    if fuses(plan, "grouped_experts"):
        passes.append(FuseGroupedExperts(plan.fuse != "auto"))  # after: what travels is then no longer fused with
    if plan.mesh.sp > 1:
        passes.append(SequenceParallel(plan.mesh.sp, MODEL_ENTRY))
    passes.append(SumOverRanks())  # losses and counts are of the global batch: differentiated with their sum in place
    return tuple(passes)


def fuses(plan: Plan, name: str) -> bool:
    """Whether a plan asks for a fusion."""
    return plan.fuse == "auto" or name in plan.fuse


def step_passes(plan: Plan, blocks: Iterable[str]) -> tuple[Pass, ...]:
    """The rewrites of the step, whose ranges of `plan` name these blocks."""
    names = list(blocks)
    modes = resolve_ranges(plan.recompute, names, what="recompute")
    reshard = resolve_ranges(plan.schedule.reshard, names, what="schedule.reshard")
    return (
        Recompute(modes),  # which partition each call uses: fixes what is saved, and which parameters backward reads
        ShardParameters(reshard, plan.mesh.dp > 1),  # placements, then the collectives they imply
        *((OverlapShared(),) if plan.schedule.overlap and plan.mesh.ep > 1 else ()),  # shared experts beside a dispatch
        Prefetch(plan.schedule.prefetch),  # last: it fixes the order of communication
    )
