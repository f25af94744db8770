"""How long a step takes and how much memory it needs, in closed form: microseconds, for thousands of candidates.

prediction = predict(model, cluster, strategy)

What each stream does when, and the memory over a step, is simulated in `turbo_compile.plans.simulation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.cost import CallCost, ModelCost
from turbo_compile.plans.memory import gathered_bytes, held_parameters, memory_terms, stage_calls
from turbo_compile.plans.rates import Ring, collective_s, memory_s
from turbo_compile.plans.strategy import Engine, Strategy
from turbo_compile.plans.work import Work, backward_work, forward_work, sizes

__all__ = ["Engine", "Event", "Prediction", "Strategy", "Timeline", "predict"]

RELATIVE_ERROR = 0.10  # median of the step time over published runs: what ties are judged by


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step, predicted. `peak_bytes` is allocated, `reserved_bytes` what the allocator takes for it and the context.

    `time_terms` add up to `step_s`, `memory_terms` to `peak_bytes`. `mfu` counts active parameters and attention once
    forward and twice backward, nothing computed again.
    """

    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_bytes: float
    reserved_bytes: float
    usable_bytes: float
    exposed_comm_s: float
    time_terms: Mapping[str, float]
    memory_terms: Mapping[str, float]
    fits: bool
    relative_error: float = RELATIVE_ERROR


@dataclass(frozen=True, slots=True)
class Event:
    """Something a stream does: `compute`, `gather`, `reduce` or `all_to_all`."""

    stream: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step of the fullest rank."""

    events: tuple[Event, ...]
    memory: tuple[tuple[float, float], ...]  # (seconds, allocated bytes)
    prediction: Prediction = field(compare=False)


def predict(model: ModelCost, cluster: Cluster, strategy: Strategy) -> Prediction:
    """The step time and peak memory of one way to train `model` on `cluster`."""
    terms = _time_terms(model, cluster, strategy)
    return prediction_of(model, cluster, strategy, terms, memory_terms(model, cluster, strategy))


def prediction_of(
    model: ModelCost,
    cluster: Cluster,
    strategy: Strategy,
    terms: Mapping[str, float],
    memory: Mapping[str, float],
) -> Prediction:
    step = sum(terms.values())
    device = cluster.accelerator
    flops = model_flops(model, strategy)
    peak = sum(memory.values())
    reserved = peak * strategy.engine.reserved + device.context_bytes
    exposed = sum(value for name, value in terms.items() if name.endswith("communication"))
    return Prediction(
        step_s=step,
        tokens_per_s_per_gpu=strategy.tokens / step / strategy.world,
        mfu=flops / step / strategy.world / device.peak(strategy.dtype),
        peak_bytes=peak,
        reserved_bytes=reserved,
        usable_bytes=device.usable_bytes,
        exposed_comm_s=exposed,
        time_terms=terms,
        memory_terms=memory,
        fits=reserved <= device.usable_bytes,
    )


def model_flops(model: ModelCost, strategy: Strategy) -> float:
    """Of one step of the whole world, nothing computed again."""
    rows = strategy.rows
    once = model.matmul_flops(1, strategy.seq) * rows
    return 3.0 * once + 3.5 * model.attention_flops(1, strategy.seq) * rows


# --- closed form ------------------------------------------------------------------------------------------------------


def exchanges_parameters(strategy: Strategy) -> bool:
    """Whether each call gathers its parameters and reduces their gradients; without it, a step reduces them once."""
    return strategy.zero_stage >= 3 and strategy.shard * strategy.dp > 1


@dataclass(frozen=True, slots=True)
class Unit:
    """One call of a stage, priced: compute forward and backward, its gather and its reduction."""

    call: CallCost
    forward: Work
    backward: Work
    gather: float
    reduce: float


def _time_terms(model: ModelCost, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    stages = [priced_stage(model, cluster, strategy, stage) for stage in _different_stages(strategy)]
    priced = [_stage_terms(units, cluster, strategy) for units in stages]
    slowest = max(priced, key=lambda terms: sum(terms.values()))
    micro = sum(slowest.values())
    terms = {name: value * strategy.accumulation for name, value in slowest.items()}
    if strategy.pp > 1:
        usual = sum(priced[1 if len(priced) > 2 else 0].values())
        others = (strategy.pp - 2) * usual + sum(priced[0].values()) + sum(priced[-1].values()) - micro
        if strategy.pp == 2:
            others = sum(sum(each.values()) for each in priced) - micro
        terms["pipeline bubble"] = max(0.0, others) / strategy.vpp
        terms["pipeline communication"] = _sends(model, cluster, strategy)
    for name, value in per_step_terms(model, cluster, strategy).items():
        terms[name] = terms.get(name, 0.0) + value
    return terms


def _different_stages(strategy: Strategy) -> tuple[int, ...]:
    if strategy.pp == 1:
        return (0,)
    return (0, strategy.pp - 1) if strategy.pp == 2 else (0, 1, strategy.pp - 1)


def priced_stage(model: ModelCost, cluster: Cluster, strategy: Strategy, stage: int) -> list[Unit]:
    units: list[Unit] = []
    total = len(model.blocks)
    calls = stage_calls(model, strategy, stage)
    place = sum(1 for call in model.calls[: model.calls.index(calls[0])] if call.block)
    memo: dict[tuple[str, str, tuple[int, int]], tuple[Work, Work, float, float]] = {}
    for call in calls:
        mode = strategy.mode(place, total) if call.block else "none"
        place += call.block
        group = model.group_of(call)
        key = (call.segment, mode, (group.dense, group.experts))
        if key not in memo:
            sharded = strategy.zero_stage >= 3
            memo[key] = (
                forward_work(model, cluster, strategy, call),
                backward_work(model, cluster, strategy, call, mode),
                _gather(cluster, strategy, gathered_bytes(group, strategy)) if sharded else 0.0,
                _reduce(cluster, strategy, gathered_bytes(group, strategy)) if sharded else 0.0,
            )
        units.append(Unit(call, *memo[key]))
    return units


def _gather(cluster: Cluster, strategy: Strategy, moved: float) -> float:
    return collective_s(cluster, "all_gather", moved, _shard_ring(strategy))


def _reduce(cluster: Cluster, strategy: Strategy, moved: float) -> float:
    moved *= strategy.reduce_bytes / strategy.gather_bytes * strategy.trained
    seconds = collective_s(cluster, "reduce_scatter", moved, _shard_ring(strategy))
    if strategy.dp > 1:
        ring = Ring(strategy.dp, strategy.tp * strategy.cp * strategy.shard)
        seconds += collective_s(cluster, "all_reduce", moved / strategy.shard, ring)
    return seconds


def _shard_ring(strategy: Strategy) -> Ring:
    return Ring(strategy.shard * strategy.cp, strategy.tp)


def _stage_terms(units: list[Unit], cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """One micro-batch through one stage: compute by kind, and what communication adds to it."""
    engine = strategy.engine
    compute = _sum([unit.forward for unit in units] + [unit.backward for unit in units])
    terms = {
        "matmul": compute.matmul,
        "attention": compute.attention,
        "elementwise": compute.elementwise,
        "tensor parallel communication": compute.tp,
        "exchange communication": compute.exchange,
    }
    if engine.stall:
        terms["stalls"] = engine.stall * compute.device
    busy = [unit.forward.seconds + engine.call_s for unit in units]
    busy_back = [unit.backward.seconds + engine.call_s for unit in units]
    waited = sum(busy) + sum(busy_back) - sum(value for name, value in terms.items() if name != "stalls")
    terms["host"] = max(0.0, waited)
    if exchanges_parameters(strategy):
        terms["sharding communication"] = _exposed(units, busy, busy_back, cluster, strategy)
    return terms


def _exposed(
    units: list[Unit], busy: list[float], busy_back: list[float], cluster: Cluster, strategy: Strategy
) -> float:
    """What gathers and reductions add to compute: those not hidden, and the slow-down of what they hide behind."""
    engine = strategy.engine
    ahead = strategy.prefetch > 0
    total = 0.0
    for index, seconds in enumerate(busy):
        later = units[index + 1].gather if index + 1 < len(units) else 0.0
        hidden = min(later * engine.overlap, seconds) if ahead else 0.0
        total += later - hidden + hidden * cluster.contention
    total += units[0].gather
    for index in reversed(range(len(units))):
        seconds = busy_back[index]
        gather = units[index - 1].gather * (1.0 - strategy.kept) if index and strategy.reshard else 0.0
        reduction = units[index + 1].reduce if index + 1 < len(units) else 0.0
        both = gather + reduction
        hidden = min(both * engine.overlap, seconds) if ahead else min(reduction * engine.overlap, seconds)
        total += both - hidden + hidden * cluster.contention
    return total + units[0].reduce


def _sum(works: list[Work]) -> Work:
    total = Work(0.0, 0.0, 0.0, 0.0)
    for work in works:
        total += work
    return total


def _sends(model: ModelCost, cluster: Cluster, strategy: Strategy) -> float:
    """Activations to the next stage and gradients back: each stage waits for one of each a micro-batch and part."""
    blocks = model.blocks
    moved = sizes(model, strategy)[blocks[0].segment].output / (strategy.tp if strategy.tp_sequence else 1)
    stride = strategy.tp * strategy.cp * strategy.shard * strategy.dp
    each = collective_s(cluster, "send", moved, Ring(2, stride))
    return 2.0 * each * strategy.vpp * (strategy.accumulation + strategy.pp - 1)


def per_step_terms(model: ModelCost, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """Once a step: reducing replicated gradients, the norm, the optimizer, gathering sharded updates."""
    device, engine = cluster.accelerator, strategy.engine
    terms = {"host": engine.host_s}
    dense, routed = max(
        (
            held_parameters(model, strategy, stage_calls(model, strategy, stage))
            for stage in _different_stages(strategy)
        ),
        key=sum,
    )
    whole = (dense + routed) * strategy.trained
    replicas = strategy.shard * strategy.dp
    if strategy.zero_stage < 3 and replicas > 1:
        ring = Ring(replicas * strategy.cp, strategy.tp)
        if strategy.zero_stage == 0:
            seconds = collective_s(cluster, "all_reduce", whole * strategy.reduce_bytes, ring)
        else:
            seconds = collective_s(cluster, "reduce_scatter", whole * strategy.reduce_bytes, ring)
            seconds += collective_s(cluster, "all_gather", whole * strategy.gather_bytes, ring)
        terms["gradient communication"] = seconds * (1.0 - engine.overlap_gradients)
    mine = whole / (strategy.shard if strategy.zero_stage >= 1 else 1)
    moved = 2.0 * (strategy.master_bytes + strategy.optimizer_bytes) + 2.0 * strategy.gradient_bytes
    moved += strategy.weight_bytes
    terms["optimizer"] = memory_s(device, mine * moved * (1.0 if engine.fused_optimizer else 2.5))
    return terms
