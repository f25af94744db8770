"""One step, simulated: what each stream does when, and what is allocated when, under the schedule the engine emits.

timeline = simulate(model, cluster, strategy)

A stream does one thing at a time. A gather is issued in program order, `prefetch` calls before its use, and starts when
compute has come so far; compute waits for its gather; a reduction starts when its backward is done. Gathers and
reductions share one link. What runs beside a transfer is slowed by the cluster's contention.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from turbo_compile.errors import PlanError
from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.cost import CallCost, ModelCost, SegmentSizes
from turbo_compile.plans.memory import (
    block_peak,
    gathered_bytes,
    gradient_bytes,
    logits_bytes,
    resident_terms,
    saved_bytes,
)
from turbo_compile.plans.strategy import Strategy
from turbo_compile.plans.timeline import (
    Event,
    Timeline,
    exchanges_parameters,
    per_step_terms,
    predict,
    prediction_of,
    priced_stage,
)
from turbo_compile.plans.work import Work, sizes

_SHOWN = 2  # micro-batches of a step that are simulated: the others repeat the last


def simulate(model: ModelCost, cluster: Cluster, strategy: Strategy) -> Timeline:
    """One step as events on the compute, gather, reduce and all_to_all streams, and its memory over time.

    Of many micro-batches two are simulated, and the second is repeated; the events are those of the two.

    Raises:
        PlanError: a strategy with pipeline stages, which `predict` prices in closed form.
    """
    if strategy.pp > 1:
        raise PlanError(f"a step of pp={strategy.pp} pipeline stages is not simulated; predict prices it")
    return _Simulation(model, cluster, strategy).timeline()


@dataclass(slots=True)
class _Memory:
    """Bytes by term over time."""

    changes: list[tuple[float, str, float]] = field(default_factory=list)

    def hold(self, term: str, held: float, start: float, end: float | None = None) -> None:
        self.changes.append((start, term, held))
        if end is not None:
            self.changes.append((end, term, -held))

    def curve(self) -> tuple[list[tuple[float, float]], dict[str, float]]:
        """The total at each change, and the terms of the peak."""
        now: Counter[str] = Counter()
        peak: dict[str, float] = {}
        most, total, points = -1.0, 0.0, []
        # At one moment what is freed goes first: a stream reuses what it has just let go.
        for at, changes in groupby(sorted(self.changes, key=lambda each: (each[0], each[2])), lambda each: each[0]):
            for _, term, change in changes:
                now[term] += change  # type: ignore[assignment]
                total += change
            points.append((at, total))
            if total > most:
                most, peak = total, dict(now)
        return points, {term: held for term, held in peak.items() if held > 0.5}


class _Simulation:
    def __init__(self, model: ModelCost, cluster: Cluster, strategy: Strategy) -> None:
        self.model, self.cluster, self.strategy = model, cluster, strategy
        self.units = priced_stage(model, cluster, strategy, 0)
        self.sizes = sizes(model, strategy)
        self.sharded = exchanges_parameters(strategy)
        groups = [model.group_of(unit.call) for unit in self.units]
        self.elements = max(1, sum(group.dense + group.experts for group in groups))  # a tied weight counts twice
        self.ahead = strategy.prefetch if strategy.engine.overlap > 0 else 0
        self.events: list[Event] = []
        self.memory = _Memory()
        self.compute = self.link = 0.0  # when each is free
        self.gathered: dict[int, tuple[float, float]] = {}  # by unit: when it was allocated, and when it is there
        self.saved: dict[int, float] = {}  # by unit: when its forward ended
        self.gradients = 0.0

    def timeline(self) -> Timeline:
        strategy = self.strategy
        resident = resident_terms(self.model, strategy, self.model.calls)
        self.gradients = resident.pop("gradients")
        for term, held in resident.items():
            self.memory.hold(term, held, 0.0)
        shown = min(_SHOWN, strategy.accumulation)
        ends = [self._micro_batch(index) for index in range(shown)]
        repeated = (ends[-1] - ends[0]) * (strategy.accumulation - shown) if shown > 1 else 0.0
        self._finish()
        return self._result(self.compute + repeated)

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def _micro_batch(self, index: int) -> float:
        """Forward and backward of one; returns when the last of it is done."""
        order = range(len(self.units))
        for place in order:
            self._issue(place, order)
            self._forward(place)
        back = range(len(self.units) - 1, -1, -1)
        for place in back:
            self._issue(place, back)
            self._backward(place, index)
        self.compute = self.link = max(self.compute, self.link)
        return self.compute

    def _issue(self, place: int, order: range) -> None:
        """Start the gathers that the program has before the compute of `place`: its own, and those ahead."""
        if not self.sharded:
            return
        at = order.index(place)
        for other in order[at : at + 1 + self.ahead]:
            if other not in self.gathered:
                start = max(self.compute, self.link)
                self.link = start + self.units[other].gather
                self.gathered[other] = start, self.link
                self._event("gather", self.units[other].call.fqn, start, self.link)

    def _forward(self, place: int) -> None:
        unit = self.units[place]
        start, end = self._compute(unit.forward, place, f"forward {unit.call.fqn}")
        size = self.sizes[unit.call.segment]
        self.memory.hold("block", size.output + size.transient / self.strategy.tp * 0.5, start, end)
        self._logits(size, start, end)
        self.saved[place] = end
        if self.sharded and self.strategy.reshard and unit.call.block:
            self._reshard(place, end)

    def _backward(self, place: int, index: int) -> None:
        unit, strategy = self.units[place], self.strategy
        start, end = self._compute(unit.backward, place, f"backward {unit.call.fqn}")
        size, mode = self.sizes[unit.call.segment], self._mode(unit.call)
        if unit.call.block:
            self.memory.hold("saved", saved_bytes(size, strategy, mode), self.saved.pop(place), end)
            self.memory.hold("block", block_peak(size, strategy, mode), start, end)
        self._logits(size, start, end)
        group = self.model.group_of(unit.call)
        done = end
        if self.sharded:
            self._reshard(place, end)
            begin = max(end, self.link)
            done = self.link = begin + unit.reduce
            self._event("reduce", unit.call.fqn, begin, done)
        if self.sharded or strategy.engine.name == "turbo_compile":
            self.memory.hold("gathered", gradient_bytes(group, strategy), start, done)
        if index == 0:
            share = (group.dense + group.experts) / self.elements
            self.memory.hold("gradients", self.gradients * share, done)

    def _reshard(self, place: int, end: float) -> None:
        start, _ = self.gathered.pop(place)
        group = self.model.group_of(self.units[place].call)
        self.memory.hold("gathered", gathered_bytes(group, self.strategy), start, end)

    def _logits(self, size: SegmentSizes, start: float, end: float) -> None:
        if size.logits:
            self.memory.hold("logits", logits_bytes(self.model, size.logits, self.strategy), start, end)

    def _mode(self, call: CallCost) -> str:
        blocks = self.model.blocks
        return self.strategy.mode(blocks.index(call), len(blocks)) if call.block else "none"

    def _compute(self, work: Work, place: int, name: str) -> tuple[float, float]:
        """Run one call, in two halves about what it exchanges with other ranks; returns when it began and ended."""
        start = self.compute
        if self.sharded:
            start = max(start, self.gathered[place][1])
        engine = self.strategy.engine
        seconds = work.seconds + engine.call_s + engine.stall * work.device
        beside = max(0.0, min(self.link, start + seconds) - start)
        seconds += beside * self.cluster.contention
        end = start + seconds
        if work.exchange:
            middle = start + (seconds - work.exchange) / 2
            self._event("compute", name, start, middle)
            self._event("all_to_all", name, middle, middle + work.exchange)
            self._event("compute", name, middle + work.exchange, end)
        else:
            self._event("compute", name, start, end)
        self.compute = end
        return start, end

    def _event(self, stream: str, name: str, start: float, end: float) -> None:
        if end > start:
            self.events.append(Event(stream, name, start, end))

    # --- after the last one -------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """What reduces gradients that no block reduced, the norm and the optimizer."""
        terms = per_step_terms(self.model, self.cluster, self.strategy)
        streams = {"gradient communication": "reduce", "optimizer": "compute", "host": "compute"}
        for term in ("gradient communication", "optimizer", "host"):
            if term in terms:
                self._event(streams[term], term, self.compute, self.compute + terms[term])
                self.compute += terms[term]

    def _result(self, step_s: float) -> Timeline:
        closed = predict(self.model, self.cluster, self.strategy).time_terms
        terms = {name: value for name, value in closed.items() if name != "sharding communication"}
        if self.sharded:
            terms["sharding communication"] = max(0.0, step_s - sum(terms.values()))
        curve, peak = self.memory.curve()
        curve.append((self.compute, curve[-1][1]))
        found = prediction_of(self.model, self.cluster, self.strategy, terms, peak)
        return Timeline(tuple(self.events), tuple(curve), found)
