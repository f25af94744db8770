"""Why a plan is what it is: where each second and each byte goes, where each value came from, what came second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.search import Candidate, SearchResult, describe

_CHOSEN = {
    "mesh.dp": "dp",
    "mesh.fsdp": "fsdp",
    "mesh.sp": "sp",
    "mesh.ep": "ep",
    "batch.micro": "micro",
    "recompute": "recompute",
    "schedule.reshard": "reshard",
    "schedule.prefetch": "prefetch",
}
_ASKED = {"batch.global": "asked: the global batch", "batch.seq": "asked: the sequence length"}


@dataclass(frozen=True, slots=True)
class Share:
    """One term of a whole: its value and its part of it."""

    name: str
    value: float
    share: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """`values`: dotted key, value, where it came from. `second` is the best plan of another mesh or micro-batch."""

    seconds: tuple[Share, ...]
    bytes_: tuple[Share, ...]
    values: tuple[tuple[str, str, str], ...]
    second: str
    pruned: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]


def explain(plan: Plan, candidate: Candidate, cluster: Cluster, result: SearchResult | None = None) -> Explanation:
    """`candidate` is `plan` priced; `result` the search it is compared with, if there was one."""
    found = candidate.prediction
    return Explanation(
        seconds=_shares(found.time_terms),
        bytes_=_shares(found.memory_terms),
        values=_values(plan),
        second=_second(candidate, result) if result is not None else "",
        pruned=tuple(result.pruned.items()) if result is not None else (),
        notes=_notes(candidate, cluster, result),
    )


def _shares(terms: Mapping[str, float]) -> tuple[Share, ...]:
    total = sum(terms.values()) or 1.0
    ordered = sorted(terms.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Share(name, value, value / total) for name, value in ordered if value > 0)


def _values(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    defaults, data = Plan().to_dict(), plan.to_dict()
    rows = []
    for key, origin in plan.origins.items():
        section, _, name = key.partition(".")
        if section in ("expected", "found_by"):
            continue
        value, usual = data[section], defaults[section]
        if name:
            value, usual = value[name], usual.get(name) if isinstance(usual, Mapping) else None
        rows.append((key, _spelled(value), _origin(plan, key, origin, value == usual)))
    return tuple(rows)


def _origin(plan: Plan, key: str, origin: str, usual: bool) -> str:
    """What a searched plan's file says of a value is that the search wrote it: say why it did."""
    if plan.found_by is None or origin == "default":
        return origin
    fixed = plan.found_by.get("fix") or {}
    if key in _CHOSEN:
        name = _CHOSEN[key]
        return f"--fix {name}={fixed[name]}" if name in fixed else "chosen by the search"
    if key in _ASKED:
        return _ASKED[key]
    return "default" if usual else origin


def _spelled(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _second(candidate: Candidate, result: SearchResult) -> str:
    """The best plan of another family, how much slower, and the terms that make the difference."""
    other = next((each for each in result.families if each.family != candidate.family), None)
    if other is None:
        return "no plan of another mesh or micro-batch fits"
    mine, theirs = candidate.prediction, other.prediction
    change = theirs.step_s / mine.step_s - 1
    how = f"{abs(change):.1%} {'slower' if change >= 0 else 'faster'}"
    names = sorted({*mine.time_terms, *theirs.time_terms})
    terms = [(theirs.time_terms.get(name, 0.0) - mine.time_terms.get(name, 0.0), name) for name in names]
    largest = sorted((term for term in terms if abs(term[0]) > 0.001 * mine.step_s), key=lambda term: -abs(term[0]))
    why = ", ".join(f"{name} {seconds:+.3f} s" for seconds, name in largest[:3])
    tie = f"; within the model's own error of {mine.relative_error:.0%}" if abs(change) <= mine.relative_error else ""
    memory = f"{theirs.reserved_bytes / 2**30:.1f} GiB"
    return f"{describe(other)}: {theirs.step_s:.3f} s, {how}{tie}, {memory}" + (f" ({why})" if why else "")


def _notes(candidate: Candidate, cluster: Cluster, result: SearchResult | None) -> tuple[str, ...]:
    notes = [f"{cluster.name}: {cluster.notes.strip()}"] if cluster.notes else []
    found = candidate.prediction
    if not found.fits:
        notes.append(
            f"it does not fit: {found.reserved_bytes / 2**30:.1f} GiB, and a device gives "
            f"{found.usable_bytes / 2**30:.1f}"
        )
    if result is not None and result.best.prediction.step_s < found.step_s * 0.999:
        notes.append(
            f"a search finds {describe(result.best)}: {result.best.prediction.step_s:.3f} s, "
            f"{found.step_s / result.best.prediction.step_s:.2f} times as fast"
        )
    return tuple(notes)
