"""The compute of one call on one rank: how long its forward and backward take, under a strategy."""

from __future__ import annotations

from dataclasses import dataclass

from turbo_compile.plans.cluster import Accelerator, Cluster
from turbo_compile.plans.cost import CallCost, MatmulSize, ModelCost, SegmentSizes
from turbo_compile.plans.rates import LOOPED, Ring, collective_s, flash_s, memory_s, product_s, scores_s
from turbo_compile.plans.strategy import Engine, Strategy

_BACKWARD_BYTES = 1.6  # of the forward's elementwise bytes: gradients in and out, and what was kept
_HOST_BACKWARD = 0.7  # of the forward's time to dispatch an operator: autograd does it in C++


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one call: of the device by kind, of the host, and of collectives that stop it (tp, sp, ep)."""

    matmul: float
    attention: float
    elementwise: float
    host: float
    tp: float = 0.0
    exchange: float = 0.0

    @property
    def device(self) -> float:
        return self.matmul + self.attention + self.elementwise

    @property
    def seconds(self) -> float:
        return max(self.device + self.tp + self.exchange, self.host)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.host + other.host,
            self.tp + other.tp,
            self.exchange + other.exchange,
        )


def forward_work(model: ModelCost, cluster: Cluster, strategy: Strategy, call: CallCost) -> Work:
    """One forward of `call` on one rank, for its rows and its part of the sequence."""
    return _work(model, cluster, strategy, call, 1.0, 1.0, 1.0)


def backward_work(model: ModelCost, cluster: Cluster, strategy: Strategy, call: CallCost, mode: str) -> Work:
    """One backward of `call`, with what `mode` computes again."""
    size = sizes(model, strategy)[call.segment]
    device, engine = cluster.accelerator, strategy.engine
    matmul = sum(
        _product_s(device, m, strategy, which)
        for m in _local(size, strategy)
        for which in (("input", "weight") if m.trained and strategy.trained > 0.5 else ("input",))
    )
    attention = _attention(size, cluster, strategy, True)
    outer, inner, kernels = size.eager if engine.kernels == "eager" else size.fused
    moved = (outer / _outer_cut(strategy) + inner / strategy.tp) * _BACKWARD_BYTES
    launches = kernels * 1.3 + 2 * len(size.matmuls) + 3 * len(size.attentions)
    work = Work(
        matmul,
        attention,
        memory_s(device, moved),
        _host(device, engine, size, launches, _HOST_BACKWARD) + engine.block_host_s * call.block,
        _tp(size, cluster, strategy),
        _exchange(size, cluster, strategy),
    )
    kept = size.saved[mode if mode in size.saved else "none"]
    if mode in ("full", "selective"):
        if engine.name == "turbo_compile":
            again = (kept.matmul, kept.attention, kept.elementwise)
        else:  # eager checkpointing runs the block's whole forward again; selective, only what is cheap
            again = (1.0, 1.0, 1.0) if mode == "full" else (0.0, 1.0 if engine.attention == "scores" else 0.0, 1.0)
        work += _work(model, cluster, strategy, call, *again)
    return work


def sizes(model: ModelCost, strategy: Strategy) -> dict[str, SegmentSizes]:
    """Every segment's sizes for what one rank holds of the batch."""
    return model.sizes(strategy.micro, strategy.seq / (strategy.sp * strategy.cp))  # type: ignore[return-value]


def _work(
    model: ModelCost,
    cluster: Cluster,
    strategy: Strategy,
    call: CallCost,
    matmul: float,
    attention: float,
    elementwise: float,
) -> Work:
    """A forward, or the given shares of one."""
    size = sizes(model, strategy)[call.segment]
    device, engine = cluster.accelerator, strategy.engine
    products = sum(_product_s(device, m, strategy, "forward") for m in _local(size, strategy))
    outer, inner, kernels = size.eager if engine.kernels == "eager" else size.fused
    moved = outer / _outer_cut(strategy) + inner / strategy.tp
    launches = kernels * elementwise + len(size.matmuls) * matmul + len(size.attentions) * attention
    exchanged = matmul > 0.5 or elementwise > 0.5
    return Work(
        products * matmul,
        _attention(size, cluster, strategy, False) * attention if attention else 0.0,
        memory_s(device, moved) * elementwise,
        _host(device, engine, size, launches, 1.0) + engine.block_host_s * call.block * min(1.0, launches),
        _tp(size, cluster, strategy) if matmul > 0.5 else 0.0,
        _exchange(size, cluster, strategy) if exchanged else 0.0,
    )


def _outer_cut(strategy: Strategy) -> float:
    """How many ways the residual stream is cut within a tensor-parallel group."""
    return strategy.tp if strategy.tp_sequence else 1.0


def _product_s(device: Accelerator, m: MatmulSize, strategy: Strategy, which: str) -> float:
    """One matmul of the model as the engine runs it."""
    seconds = product_s(device, m, strategy.tp, _held(m, strategy), strategy.dtype, which)
    return seconds / LOOPED if m.experts and strategy.engine.experts == "loop" else seconds


def _held(m: MatmulSize, strategy: Strategy) -> float:
    """Experts one rank computes."""
    return m.experts / strategy.ep if m.experts else 0.0


def _local(size: SegmentSizes, strategy: Strategy) -> tuple[MatmulSize, ...]:
    """The matmuls as one rank meets them: the fullest expert rank has more rows than the mean."""
    if strategy.imbalance == 1.0:
        return size.matmuls
    return tuple(
        MatmulSize(m.rows * strategy.imbalance, m.inner, m.columns, m.cut, m.experts, m.trained, m.batch)
        if m.experts
        else m
        for m in size.matmuls
    )


def _host(device: object, engine: Engine, size: SegmentSizes, launches: float, share: float) -> float:
    """What the host needs to start it all."""
    per = device.launch_s if engine.kernels == "compiled" else device.dispatch_s * share  # type: ignore[attr-defined]
    if engine.experts == "loop":
        launches += sum(8.0 * m.experts for m in size.matmuls if m.experts)
    return launches * per


def _attention(size: SegmentSizes, cluster: Cluster, strategy: Strategy, backward: bool) -> float:
    engine, device = strategy.engine, cluster.accelerator
    share = 1.0 / (strategy.tp * strategy.sp * strategy.cp)
    total = 0.0
    for each in size.attentions:
        if engine.attention == "flash":
            total += flash_s(device, each, strategy.micro, strategy.seq, share, backward, engine.attention_factor)
        else:
            total += scores_s(device, each, strategy.micro, strategy.seq, share, backward, engine.score_passes)
    return total


def _tp(size: SegmentSizes, cluster: Cluster, strategy: Strategy) -> float:
    """What tensor parallelism exchanges in a pass: an all_reduce (or its two halves) after each cut pair of weights."""
    if strategy.tp == 1:
        return 0.0
    joins = sum(1 for m in size.matmuls if m.cut == "rows")
    if not joins:
        return 0.0
    each = collective_s(cluster, "all_reduce", size.output, Ring(strategy.tp))
    return joins * each * (1.0 - strategy.engine.overlap_tp)


def _exchange(size: SegmentSizes, cluster: Cluster, strategy: Strategy) -> float:
    """Ulysses around each attention, ring attention's passes, and routed rows to their experts and back."""
    total = 0.0
    for each in size.attentions:
        held = strategy.micro * strategy.seq / (strategy.sp * strategy.cp) * 2.0
        if strategy.sp > 1:
            groups = max(each.groups, strategy.sp) / strategy.tp
            wide = each.heads / strategy.tp * each.width + groups * (each.width + each.value_width)
            ring = Ring(strategy.sp, strategy.tp * strategy.cp)
            total += collective_s(cluster, "all_to_all", held * wide, ring)
            total += collective_s(cluster, "all_to_all", held * each.heads / strategy.tp * each.value_width, ring)
        if strategy.cp > 1:
            wide = each.groups / strategy.tp * (each.width + each.value_width)
            moved = held * wide * strategy.cp
            total += 0.3 * collective_s(cluster, "all_gather", moved, Ring(strategy.cp, strategy.tp))
    if strategy.ep > 1 and size.dispatched:
        ring = Ring(strategy.ep, strategy.tp)
        total += 2.0 * collective_s(cluster, "all_to_all", size.dispatched * strategy.imbalance, ring)
    return total
