"""Find the plan: every mesh, micro-batch, mix of recomputation and schedule the engine can run, priced and ranked.

    result = search(model, cluster, Request(gpus=1024, global_batch=1024, seq=4096))
    plan_of(result.best, model, base).save("plan.yaml")

What cannot fit is left out by a lower bound, the rest is predicted in closed form, blocks are given the fastest mix of
recomputation that fits, and the best are simulated. Nothing in it is random: equal questions get equal answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turbo_compile.errors import PlanError
from turbo_compile.plans.candidates import Choice, Request, choices, meshes, modes
from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.cost import ModelCost
from turbo_compile.plans.knapsack import Frontier, Kind, Mix, frontier
from turbo_compile.plans.memory import resident_terms
from turbo_compile.plans.plan import Plan, check_supported
from turbo_compile.plans.ranges import compress
from turbo_compile.plans.sections import Mesh
from turbo_compile.plans.simulation import simulate
from turbo_compile.plans.strategy import Strategy
from turbo_compile.plans.timeline import Prediction, predict
from turbo_compile.plans.values import FrozenMap, divisors, listed

__all__ = ["Candidate", "Request", "SearchResult", "candidate_of", "plan_of", "search"]

SIMULATED = 50
_ROUNDS = 4  # of fitting a mix to the memory that is left
_SLACK = 0.002  # of the budget: what a fitted mix may leave unused
_BARE = ("full", "selective", "none")  # from the least kept to the most


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, as the cost model sees it. `simulated`: its numbers are of the simulated step."""

    strategy: Strategy
    prediction: Prediction
    simulated: bool = False

    @property
    def mesh(self) -> Mesh:
        at = self.strategy
        return Mesh(dp=at.dp, fsdp=at.fsdp, sp=at.sp, ep=at.ep)

    @property
    def family(self) -> tuple[Mesh, int]:
        """Plans of a family differ in recomputation and schedule alone."""
        return self.mesh, self.strategy.micro

    @property
    def order(self) -> tuple[Any, ...]:
        """The faster first; of equals the smaller, then the simpler."""
        at, found = self.strategy, self.prediction
        simple = (not at.reshard, at.prefetch != 1, at.prefetch, at.sp, at.ep, at.dp, at.micro)
        return round(found.step_s, 9), round(found.reserved_bytes), *simple, str(at.recompute)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`ranked`: all plans that fit, the fastest first; `over`: priced, and too large. `pruned`: reason -> how many.

    `considered` counts every plan the search stands for, `predicted` those priced. `budget_bytes` is what a plan may
    reserve.
    """

    request: Request
    model: str
    cluster: str
    ranked: tuple[Candidate, ...]
    over: tuple[Candidate, ...]
    pruned: Mapping[str, int]
    considered: int
    predicted: int
    budget_bytes: float

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def families(self) -> tuple[Candidate, ...]:
        """The fastest plan of each mesh and micro-batch."""
        first: dict[tuple[Mesh, int], Candidate] = {}
        for each in self.ranked:
            first.setdefault(each.family, each)
        return tuple(first.values())

    @property
    def ties(self) -> tuple[Candidate, ...]:
        """Families that the model's own error does not tell from the best."""
        most = self.best.prediction.step_s * (1 + self.best.prediction.relative_error)
        return tuple(each for each in self.families if each.prediction.step_s <= most)

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """Plans that no other beats in both time and memory, the fastest first."""
        kept: list[Candidate] = []
        for each in sorted(self.ranked, key=lambda one: one.order):
            if not kept or each.prediction.reserved_bytes < kept[-1].prediction.reserved_bytes:
                kept.append(each)
        return tuple(kept)


def search(model: ModelCost, cluster: Cluster, request: Request, base: Plan | None = None) -> SearchResult:
    """The plans for `request`, ranked. `base` holds what is not searched: its dtypes.

    Raises:
        PlanError: a request that contradicts itself, or that no plan fits: with the smallest memory any plan needs, and
            what would change that.
    """
    found = _Search(model, cluster, request, Strategy.of(base or Plan(), model))
    found.price()
    if not found.fitting:
        raise PlanError(found.too_large(), key="memory")
    found.mix()
    found.simulate()
    return SearchResult(
        request=request,
        model=model.name,
        cluster=cluster.name,
        ranked=tuple(found.ranked()),
        over=tuple(sorted(found.over, key=lambda each: each.order)),
        pruned=dict(sorted(found.pruned.items(), key=lambda item: (-item[1], item[0]))),
        considered=found.considered,
        predicted=found.predicted,
        budget_bytes=found.budget,
    )


def candidate_of(plan: Plan, model: ModelCost, cluster: Cluster) -> Candidate:
    """A plan from elsewhere, simulated like those of a search."""
    strategy = Strategy.of(plan, model)
    return Candidate(strategy, simulate(model, cluster, strategy).prediction, simulated=True)


def plan_of(candidate: Candidate, model: ModelCost, base: Plan, found_by: Mapping[str, Any] | None = None) -> Plan:
    """The plan that `candidate` stands for, as a file would hold it. `found_by` is the question, for `explain`."""
    at, found = candidate.strategy, candidate.prediction
    values: dict[str, Any] = {
        "mesh": {"dp": at.dp, "fsdp": at.fsdp, "sp": at.sp, "ep": at.ep},
        "batch": {"global": at.rows, "micro": at.micro, "seq": at.seq},
        "recompute": _ranges(at.recompute, [call.fqn for call in model.blocks]),
        "schedule": {"reshard": at.reshard, "prefetch": at.prefetch},
        "expected": {
            "step_s": round(found.step_s, 6),
            "peak_gib": round(found.peak_bytes / 2**30, 3),
            "exposed_comm_s": round(found.exposed_comm_s, 6),
        },
    }
    plan = Plan.layers(base, values | ({"found_by": dict(found_by)} if found_by else {}))
    check_supported(plan)
    return plan


def _ranges(recompute: str | tuple[str, ...], names: Sequence[str]) -> str | dict[str, str]:
    """One word where all blocks agree, else a mode for each range of neighbours."""
    if isinstance(recompute, str):
        return recompute
    runs: list[tuple[str, list[str]]] = []
    for name, mode in zip(names, recompute, strict=True):
        if not runs or runs[-1][0] != mode:
            runs.append((mode, []))
        runs[-1][1].append(name)
    return {key: mode for mode, run in runs for key in compress(run)}


class _Search:
    """The state of one search."""

    def __init__(self, model: ModelCost, cluster: Cluster, request: Request, template: Strategy) -> None:
        self.model = model
        self.cluster = cluster
        self.request = request
        self.template = replace(template, seq=request.seq)
        self.budget = cluster.accelerator.usable_bytes * request.memory
        self.modes = [mode for mode in _BARE if mode in modes(request)]
        self.fitting: list[Candidate] = []
        self.over: list[Candidate] = []
        self.partial: list[tuple[Choice, Candidate]] = []  # fits only where some blocks recompute more
        self.smallest: Candidate | None = None
        self.pruned: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.considered = 0
        self.predicted = 0

    # --- every plan whose blocks are all alike ------------------------------------------------------------------------

    def price(self) -> None:
        """Predict each choice in each mode, from the least kept to the most, as far as it fits."""
        found = list(meshes(self.model, self.request, self.refused))
        if not found:
            raise PlanError(self._no_mesh(), key="fix")
        for mesh in found:
            every = list(choices(mesh, self.request))
            self.considered += len(every) * len(self.modes)
            if self._states(mesh) > self.budget:
                self._too_large(mesh, every)
                continue
            full: set[tuple[bool, int]] = set()  # schedules that no larger micro-batch fits
            for choice in every:
                if (choice.reshard, choice.prefetch) in full:
                    self.pruned["a smaller micro-batch already did not fit"] += len(self.modes)
                elif not self._price_modes(choice):
                    full.add((choice.reshard, choice.prefetch))

    def _price_modes(self, choice: Choice) -> bool:
        """Whether any mode of `choice` fits."""
        last: Candidate | None = None
        for place, mode in enumerate(self.modes):
            each = self._predict(self._strategy(choice, mode))
            self._remember(each)
            if not self._fits(each):
                self.over.append(each)
                self.pruned["does not fit in memory"] += 1
                more = len(self.modes) - place - 1
                if more:
                    self.pruned["less recomputation already did not fit"] += more
                break
            self.fitting.append(each)
            last = each
        if last is not None and len(self.modes) > 1 and last.strategy.recompute != self.modes[-1]:
            self.partial.append((choice, last))
        return last is not None

    def _states(self, mesh: Mesh) -> float:
        """Bytes of parameters, optimizer states and gradients alone: the least any plan on `mesh` reserves."""
        at = replace(self.template, dp=mesh.dp, fsdp=mesh.fsdp, sp=mesh.sp, ep=mesh.ep)
        return sum(resident_terms(self.model, at, self.model.calls).values())

    def _too_large(self, mesh: Mesh, every: Sequence[Choice]) -> None:
        self.pruned["parameters, gradients and optimizer states alone do not fit"] += len(every) * len(self.modes)
        if every:
            self._remember(self._predict(self._strategy(every[0], self.modes[0])))

    def _strategy(self, choice: Choice, recompute: str | tuple[str, ...]) -> Strategy:
        mesh = choice.mesh
        return replace(
            self.template,
            dp=mesh.dp,
            fsdp=mesh.fsdp,
            sp=mesh.sp,
            ep=mesh.ep,
            micro=choice.micro,
            accumulation=choice.accumulation,
            reshard=choice.reshard,
            prefetch=choice.prefetch,
            recompute=recompute,
        )

    def _predict(self, strategy: Strategy) -> Candidate:
        self.predicted += 1
        return Candidate(strategy, predict(self.model, self.cluster, strategy))

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.prediction.reserved_bytes <= self.budget

    def _remember(self, each: Candidate) -> None:
        least = self.smallest
        if least is None or each.prediction.reserved_bytes < least.prediction.reserved_bytes:
            self.smallest = each

    # --- mixes --------------------------------------------------------------------------------------------------------

    def mix(self) -> None:
        """Where not all blocks can keep more: let as many as fit. Only where that could still be among the best."""
        bounded = []
        for choice, last in self.partial:
            bound = self._predict(self._strategy(choice, self.modes[-1])).prediction.step_s
            bounded.append((bound, last.order, choice, last))
        best = min(each.prediction.step_s for each in self.fitting)
        for bound, _, choice, last in sorted(bounded, key=lambda item: item[:2]):
            if bound > best * (1 + last.prediction.relative_error):
                self.pruned["even with nothing recomputed it would be slower than the best by more than a tie"] += 1
                continue
            found = self._fitted(choice)
            if found is not None:
                self.considered += 1
                self.fitting.append(found)
                best = min(best, found.prediction.step_s)

    def _fitted(self, choice: Choice, reserve: float = 0.0) -> Candidate | None:
        """The fastest mix for `choice` that leaves `reserve` bytes; None if that is one mode for all."""
        bare = self._predict(self._strategy(choice, self.modes[0]))
        kinds, mixes = self._frontier(choice, bare)
        engine = self.template.engine.reserved
        room = self.budget - reserve - bare.prediction.reserved_bytes
        best: Candidate | None = None
        for _ in range(_ROUNDS):
            mix = mixes.best(room / engine)
            if mix is None:
                break
            each = self._predict(self._strategy(choice, _spread(mix, kinds, self.modes, len(self.model.blocks))))
            left = self.budget - reserve - each.prediction.reserved_bytes
            if left >= 0 and (best is None or each.order < best.order):
                best = each
            if 0 <= left < _SLACK * self.budget:
                break
            room += left
        return best if best is not None and not isinstance(best.strategy.recompute, str) else None

    def _frontier(self, choice: Choice, bare: Candidate) -> tuple[list[list[int]], Frontier]:
        """Blocks by kind, and the mixes of modes: seconds and bytes above those of all blocks in the barest mode."""
        places: dict[str, list[int]] = {}
        for place, call in enumerate(self.model.blocks):
            places.setdefault(call.segment, []).append(place)
        kinds = []
        for own in places.values():
            costs = {self.modes[0]: (0.0, 0.0)}
            for mode in self.modes[1:]:
                words = [self.modes[0]] * len(self.model.blocks)
                for place in own:
                    words[place] = mode
                each = self._predict(self._strategy(choice, _simple(words))).prediction
                costs[mode] = (
                    (each.step_s - bare.prediction.step_s) / len(own),
                    (each.memory_terms["saved"] - bare.prediction.memory_terms["saved"]) / len(own),
                )
            kinds.append(Kind(len(own), costs))
        return list(places.values()), frontier(kinds)

    # --- the best -----------------------------------------------------------------------------------------------------

    def simulate(self) -> None:
        """Replace the numbers of the best candidates by those of their simulated step."""
        for each in _best(self.fitting):
            self.fitting.remove(each)
            found = self._simulated(each)
            over = found.prediction.reserved_bytes - self.budget
            if over > 0 and not isinstance(each.strategy.recompute, str):
                at = each.strategy
                choice = Choice(each.mesh, at.micro, at.accumulation, at.reshard, at.prefetch)
                again = self._fitted(choice, reserve=over)
                found = found if again is None else self._simulated(again)
            (self.fitting if self._fits(found) else self.over).append(found)
        if not self.fitting:
            raise PlanError(self.too_large(), key="memory")

    def _simulated(self, each: Candidate) -> Candidate:
        found = simulate(self.model, self.cluster, each.strategy).prediction
        return replace(each, prediction=found, simulated=True)

    def ranked(self) -> list[Candidate]:
        """Simulated plans by time, then the rest by predicted time: the two are not quite the same measure."""
        return sorted(self.fitting, key=lambda each: (not each.simulated, each.order))

    # --- when there is none -------------------------------------------------------------------------------------------

    def _no_mesh(self) -> str:
        request = self.request
        ranks = [dp for dp in divisors(request.gpus) if request.global_batch % dp == 0]
        why = "; ".join(f"{reason} ({count} times)" for reason, count in sorted(self.refused.items()))
        hint = ""
        if "dp x fsdp does not divide the global batch" in self.refused:
            rows = -(-request.global_batch // request.gpus) * request.gpus
            hint = f"; a global batch of {rows} rows divides over all {request.gpus} GPUs"
            hint += f", and {request.global_batch} rows over at most {max(ranks)}" if ranks else ""
        fixed = ", ".join(f"{name}={value}" for name, value in request.fixed.items())
        asked = f" with --fix {fixed}" if fixed else ""
        why = why or "the fixed sizes do not multiply to it"
        return f"no mesh of {request.gpus} GPUs can run {self.model.name}{asked}: {why}{hint}"

    def too_large(self) -> str:
        """The smallest memory any plan needs, and what would make one fit."""
        least = self.smallest
        assert least is not None
        needs, has = least.prediction.reserved_bytes / 2**30, self.budget / 2**30
        where = f"{self.request.gpus} GPUs of {self.cluster.accelerator.name}"
        return (
            f"no plan of {self.model.name} fits {where}: the smallest needs "
            f"{needs:.1f} GiB a GPU ({describe(least)}), and {has:.1f} may be used; {self._advice()}"
        )

    def _advice(self) -> str:
        """What would make a plan fit, tried out."""
        works = []
        for name, value in self.request.fixed.items():
            free = {key: each for key, each in self.request.fixed.items() if key != name}
            least = self._least(replace(self.request, fixed=FrozenMap(free)))
            if least is not None:
                works.append(f"without --fix {name}={value} ({describe(least)})")
        for times in (2, 4, 8, 16, 32, 64):
            more = replace(self.request, gpus=self.request.gpus * times)
            if self._least(more) is None and self.request.global_batch % more.gpus:
                more = replace(more, global_batch=self.request.global_batch * times)
            least = self._least(more)
            if least is not None:
                works.append(f"with {more.gpus} GPUs")
                break
        seq = self.request.seq
        while seq > 256 and seq % 2 == 0:
            seq //= 2
            if self._least(replace(self.request, seq=seq)) is not None:
                works.append(f"with rows of {seq} tokens")
                break
        usual = "more GPUs, recompute=full, a larger sp, micro=1, or a lower-precision dtype.master"
        return f"it would fit {listed(works)}" if works else f"what helps: {usual}"

    def _least(self, request: Request) -> Candidate | None:
        """The smallest plan of another request, if it fits."""
        try:
            other = _Search(self.model, self.cluster, request, self.template)
            for mesh in meshes(self.model, request, Counter()):
                first = next(choices(mesh, request), None)
                if first is not None:
                    other._remember(other._predict(other._strategy(first, other.modes[0])))
        except PlanError:
            return None
        least = other.smallest
        return least if least is not None and other._fits(least) else None


def describe(candidate: Candidate) -> str:
    """A plan in a few words."""
    at = candidate.strategy
    axes = " ".join(f"{axis}={size}" for axis in ("dp", "fsdp", "sp", "ep") if (size := getattr(at, axis)) > 1)
    schedule = "" if at.reshard else ", no reshard"
    return f"{axes or 'one rank'}, micro={at.micro}, recompute={recomputed(at)}{schedule}"


def recomputed(strategy: Strategy) -> str:
    """How many blocks recompute what: one word, or `full 32, none 16`."""
    if isinstance(strategy.recompute, str):
        return strategy.recompute
    return ", ".join(f"{mode} {count}" for mode, count in Counter(strategy.recompute).items())


def _best(fitting: Iterable[Candidate]) -> list[Candidate]:
    """Those to simulate: the best of half as many families, and the best of all."""
    ordered = sorted(fitting, key=lambda each: each.order)
    chosen: dict[int, Candidate] = {}
    seen: set[tuple[Mesh, int]] = set()
    for each in ordered:
        if each.family not in seen and len(chosen) < SIMULATED // 2:
            seen.add(each.family)
            chosen[id(each)] = each
    for each in ordered:
        if len(chosen) < SIMULATED:
            chosen[id(each)] = each
    return sorted(chosen.values(), key=lambda each: each.order)


def _spread(mix: Mix, kinds: Sequence[Sequence[int]], words: Sequence[str], blocks: int) -> str | tuple[str, ...]:
    """A mode for each block. Those that keep least come first: backward frees the others before it reaches them."""
    spread = [""] * blocks
    for counts, places in zip(mix, kinds, strict=True):
        own: Iterator[str] = (word for word, count in zip(words, counts, strict=True) for _ in range(count))
        for place, word in zip(places, own, strict=True):
            spread[place] = word
    return _simple(spread)


def _simple(words: Sequence[str]) -> str | tuple[str, ...]:
    return words[0] if len(set(words)) == 1 else tuple(words)
