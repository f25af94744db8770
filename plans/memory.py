"""What a rank holds at the peak of a step, by term: allocated, and what the allocator reserves for it."""

from __future__ import annotations

from collections.abc import Mapping

from turbo_compile.kernels.linear_cross_entropy import BUDGET
from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.cost import CallCost, GroupCost, ModelCost, SegmentSizes
from turbo_compile.plans.strategy import Strategy
from turbo_compile.plans.work import sizes


def stage_calls(model: ModelCost, strategy: Strategy, stage: int) -> tuple[CallCost, ...]:
    """Those of one pipeline stage: blocks in equal parts, what comes before with the first, after with the last."""
    if strategy.pp == 1:
        return model.calls
    blocks = [index for index, call in enumerate(model.calls) if call.block]
    bounds = [blocks[0] + len(blocks) * part // strategy.pp for part in range(strategy.pp + 1)]
    first = 0 if stage == 0 else bounds[stage]
    last = len(model.calls) if stage == strategy.pp - 1 else bounds[stage + 1]
    return model.calls[first:last]


def held_parameters(model: ModelCost, strategy: Strategy, calls: tuple[CallCost, ...]) -> tuple[float, float]:
    """Elements of dense and of expert parameters of `calls` on a rank, before any sharding over data."""
    names = dict.fromkeys(name for call in calls for name in call.groups)
    dense = sum(model.groups[name].dense for name in names) / strategy.tp
    routed = sum(model.groups[name].experts for name in names) / (strategy.tp * strategy.ep)
    return float(dense), float(routed)


def resident_terms(model: ModelCost, strategy: Strategy, calls: tuple[CallCost, ...]) -> dict[str, float]:
    """Bytes of weights, masters, optimizer state and gradients: what lives from step to step, and gradients."""
    dense, routed = held_parameters(model, strategy, calls)
    whole = dense + routed
    cut = dense / strategy.shard + routed / max(1.0, strategy.shard / strategy.ep)
    trained = strategy.trained

    def part(stage: int) -> float:
        return cut if strategy.zero_stage >= stage else whole

    return {
        "weights": part(3) * strategy.weight_bytes,
        "master": part(1 if strategy.weight_bytes else 3) * strategy.master_bytes,
        "optimizer": part(1) * strategy.optimizer_bytes * trained,
        "gradients": part(2) * strategy.gradient_bytes * trained,
    }


def gathered_bytes(group: GroupCost, strategy: Strategy) -> float:
    """One call's parameters, gathered: experts only those this rank computes."""
    return (group.dense + group.experts / strategy.ep) / strategy.tp * strategy.gather_bytes


def saved_bytes(size: SegmentSizes, strategy: Strategy, mode: str) -> float:
    """What one call keeps for backward."""
    engine = strategy.engine
    if engine.name == "turbo_compile":
        key = mode
    elif mode == "full":
        return size.output / (strategy.tp if strategy.tp_sequence else 1)
    else:
        key = "eager" if engine.kernels == "eager" else "fused"
    kept = size.saved[key]
    outer = kept.outer / (strategy.tp if strategy.tp_sequence else 1.0)
    total = outer + kept.inner / strategy.tp
    if engine.attention == "scores" and mode != "selective":
        total += score_bytes(size, strategy)
    return total


def score_bytes(size: SegmentSizes, strategy: Strategy) -> float:
    """Scores written to memory and kept: probabilities, their dropout mask and result."""
    elements = sum(each.heads for each in size.attentions) / strategy.tp * strategy.micro * float(strategy.seq) ** 2
    return elements * 5.0


def memory_terms(model: ModelCost, cluster: Cluster, strategy: Strategy) -> Mapping[str, float]:
    """Bytes at the peak of the fullest stage, by term."""
    stages = {0, strategy.pp - 1}
    found = [_stage_terms(model, cluster, strategy, stage) for stage in stages]
    return max(found, key=lambda terms: sum(terms.values()))


def _stage_terms(model: ModelCost, cluster: Cluster, strategy: Strategy, stage: int) -> dict[str, float]:
    calls = stage_calls(model, strategy, stage)
    size = sizes(model, strategy)
    terms = resident_terms(model, strategy, calls)
    blocks = [call for call in calls if call.block]
    total = len(model.blocks)
    before = sum(1 for call in model.calls[: model.calls.index(calls[0])] if call.block) if calls else 0
    modes = [strategy.mode(before + index, total) for index in range(len(blocks))]
    kept = sum(saved_bytes(size[call.segment], strategy, mode) for call, mode in zip(blocks, modes, strict=True))
    flying = in_flight(strategy, stage)
    terms["saved"] = kept * flying
    terms["block"] = max(
        (block_peak(size[c.segment], strategy, m) for c, m in zip(blocks, modes, strict=True)), default=0.0
    )
    scores = max((size[call.segment].logits for call in calls), default=0.0)
    logits = logits_bytes(model, scores, strategy)
    if logits > terms["block"]:  # the loss is the peak: no block is under way then
        terms["block"] = 0.0
        terms["logits"] = logits
    if (strategy.zero_stage >= 3 and strategy.shard > 1) or strategy.engine.name == "turbo_compile":
        terms["gathered"] = _gathered(model, strategy, calls)
    return terms


def logits_bytes(model: ModelCost, scores: float, strategy: Strategy) -> float:
    """What the loss holds for `scores` logits."""
    whole = scores / (strategy.tp if strategy.engine.vocabulary_parallel else 1) * strategy.engine.logit_bytes
    if not strategy.engine.head_fused or not scores:
        return whole
    return min(whole, float(BUDGET["cuda"])) + 4.0 * model.vocabulary * model.hidden


def in_flight(strategy: Strategy, stage: int) -> float:
    """Micro-batches whose saved values a stage holds at once, in 1F1B; interleaving holds more."""
    if strategy.pp == 1:
        return 1.0
    waiting = min(strategy.pp - stage, strategy.accumulation)
    if strategy.vpp > 1:
        return min(waiting + (strategy.pp - 1) / strategy.vpp, strategy.accumulation)
    return float(waiting)


def block_peak(size: SegmentSizes, strategy: Strategy, mode: str) -> float:
    """What lives while a block's backward runs, beyond what all blocks keep."""
    outer = size.output / (strategy.tp if strategy.tp_sequence else 1.0)
    again = 0.0
    if mode == "full":
        again = saved_bytes(size, strategy, "none")
    elif mode == "selective" and strategy.engine.name == "turbo_compile":
        again = saved_bytes(size, strategy, "none") - saved_bytes(size, strategy, "selective")
    elif mode == "selective" and strategy.engine.attention == "scores":
        again = score_bytes(size, strategy)
    return again + 2.0 * outer + size.transient / strategy.tp * 0.5


def _gathered(model: ModelCost, strategy: Strategy, calls: tuple[CallCost, ...]) -> float:
    """Gathered parameters in flight beside the working block's, and one block's whole gradient before it is reduced."""
    groups = [model.group_of(call) for call in calls]
    largest = max((gathered_bytes(group, strategy) for group in groups), default=0.0)
    blocks = [gathered_bytes(model.group_of(call), strategy) for call in calls if call.block]
    block = max(blocks, default=0.0)
    engine = strategy.engine
    flying = min(block * (1 + strategy.prefetch), engine.live_bytes)
    held = sum(blocks) if not strategy.reshard else max(flying, min(largest, engine.live_bytes))
    gradient = max(gradient_bytes(group, strategy) for group in groups)
    return held + strategy.kept * sum(blocks) + min(gradient, engine.bucket_bytes)


def gradient_bytes(group: GroupCost, strategy: Strategy) -> float:
    """One call's whole gradient before it is reduced: as backward makes it, and as it travels, if that is a copy."""
    made = gathered_bytes(group, strategy)
    copied = strategy.engine.name == "turbo_compile" or strategy.reduce_bytes != strategy.gather_bytes
    return made * (1 + strategy.reduce_bytes / strategy.gather_bytes) if copied else made
