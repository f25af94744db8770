"""How good predictions are: errors of time and memory, out-of-memory accuracy, rankings, a constant-MFU baseline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from published_rows import Case

from turbo_compile.plans.timeline import Prediction, model_flops


@dataclass(frozen=True)
class Scored:
    """A case and what was predicted for it."""

    case: Case
    prediction: Prediction

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.case.step_s is None else self.prediction.step_s / self.case.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        if self.case.memory is None or self.case.out_of_memory:
            return None
        held = self.prediction.peak_bytes if self.case.memory_kind == "allocated" else self.prediction.reserved_bytes
        return held / self.case.memory - 1.0

    @property
    def utilisation(self) -> float | None:
        """Model flops over the device's peak, as measured."""
        if self.case.step_s is None:
            return None
        peak = self.case.cluster.accelerator.peak(self.case.strategy.dtype)
        flops = model_flops(self.case.model, self.case.strategy)
        return flops / self.case.step_s / self.case.strategy.world / peak


def median(values: Iterable[float]) -> float | None:
    found = sorted(abs(value) for value in values)
    return statistics.median(found) if found else None


def percentile(values: Iterable[float], share: float) -> float | None:
    found = sorted(abs(value) for value in values)
    return found[min(len(found) - 1, int(share * len(found)))] if found else None


def constant_mfu(scored: Sequence[Scored]) -> float:
    """The one utilisation that suits all rows best, in hindsight."""
    return statistics.median(u for each in scored if (u := each.utilisation) is not None)


def baseline_errors(scored: Sequence[Scored], constant: float) -> list[float]:
    """Errors of the step time at that utilisation."""
    return [u / constant - 1.0 for each in scored if (u := each.utilisation) is not None]


def out_of_memory(scored: Sequence[Scored]) -> tuple[float, int, int] | None:
    """Balanced accuracy, and how many ran out of memory and how many did not; None without both."""
    gone = [not each.prediction.fits for each in scored if each.case.out_of_memory]
    ran = [each.prediction.fits for each in scored if not each.case.out_of_memory and each.case.step_s is not None]
    if not gone or not ran:
        return None
    return (sum(gone) / len(gone) + sum(ran) / len(ran)) / 2, len(gone), len(ran)


@dataclass(frozen=True)
class Ranking:
    """One group of plans: what choosing by prediction costs, and how the orders agree."""

    dataset: str
    regret: float
    tau: float | None
    plans: int


def rank(rows: Sequence[Mapping[str, str]], scored: Mapping[str, Scored]) -> tuple[list[Ranking], int]:
    """The groups of a rankings file, and how many rows of it have no prediction."""
    groups: dict[str, list[tuple[float, Scored]]] = {}
    missing = 0
    for row in rows:
        found = scored.get(row["run_id"])
        if found is None:
            missing += 1
            continue
        relative = float(row["relative_to_best"] or 0.0) if row["status"].strip().lower() in ("ok", "") else 0.0
        groups.setdefault(f"{row['dataset']}/{row['group_id']}", []).append((relative, found))
    rankings = [_rank(name.split("/")[0], plans) for name, plans in groups.items()]
    return [each for each in rankings if each is not None], missing


def _rank(dataset: str, plans: list[tuple[float, Scored]]) -> Ranking | None:
    """Regret of the fastest predicted that is predicted to fit; one that ran out of memory is tried and left."""
    ran = [(relative, each) for relative, each in plans if relative > 0.0]
    if len(ran) < 2:
        return None
    best = max(relative for relative, _ in ran)
    order = sorted(plans, key=lambda plan: (not plan[1].prediction.fits, -plan[1].prediction.tokens_per_s_per_gpu))
    chosen = next(relative for relative, _ in order if relative > 0.0)
    return Ranking(dataset, best / chosen - 1.0, kendall(ran), len(ran))


def kendall(plans: Sequence[tuple[float, Scored]]) -> float | None:
    """Tau-b between measured and predicted throughput."""
    agree = ties_measured = ties_predicted = pairs = 0
    for (a, first), (b, second) in combinations(plans, 2):
        x = (a > b) - (a < b)
        p, q = first.prediction.tokens_per_s_per_gpu, second.prediction.tokens_per_s_per_gpu
        y = (p > q) - (p < q)
        pairs += 1
        agree += x * y
        ties_measured += x == 0
        ties_predicted += y == 0
    scale = ((pairs - ties_measured) * (pairs - ties_predicted)) ** 0.5
    return agree / scale if scale else None
