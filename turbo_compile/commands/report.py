"""The page of a plan: its step by stream and its memory over time, both by term, and every plan it was chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from turbo_compile.commands.searching import Priced
from turbo_compile.commands.tables import as_json
from turbo_compile.ir import charts
from turbo_compile.plans.search import Candidate, SearchResult, describe, recomputed

_GIB = 2**30
_ROWS = 300  # of the table: the rest are slower still


def report(found: Priced) -> str:
    """One file that works offline."""
    plan, candidate = found.plan, found.candidate
    title = f"{found.model.name} on {plan.mesh.world} x {found.cluster.name}"
    return charts.document(title, *_sections(found, candidate))


def _sections(found: Priced, candidate: Candidate) -> Iterator[str]:
    prediction = candidate.prediction
    yield f"<p>{escape(_headline(found))}</p>"
    yield "<h2>one step</h2>"
    events = [(event.stream, event.name, event.start_s, event.end_s) for event in found.timeline.events]
    yield charts.step(events, found.timeline.memory, prediction.usable_bytes)
    yield "<h2>where the seconds go</h2>"
    yield charts.bars({each.name: each.value for each in found.explanation.seconds}, "s")
    yield "<h2>where the memory goes, at the peak</h2>"
    yield charts.bars({each.name: each.value for each in found.explanation.bytes_}, "GiB", 1 / _GIB)
    if found.result is not None:
        yield from _compared(found, found.result)
    yield "<h2>values</h2>"
    yield charts.table(
        ("key", "value", "from"), (("", [(text, text) for text in row]) for row in found.explanation.values)
    )
    yield from (f"<p>{escape(note)}</p>" for note in found.explanation.notes)
    yield f"<details><summary>plan.yaml</summary><pre>{escape(found.plan.to_yaml())}</pre></details>"
    yield charts.data("answer", as_json(found, _ROWS))


def _headline(found: Priced) -> str:
    at, prediction = found.candidate.strategy, found.candidate.prediction
    return (
        f"{describe(found.candidate)}: {prediction.step_s:.3f} s for {at.rows} rows of {at.seq:,} tokens, "
        f"{prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%}, "
        f"peak {prediction.peak_bytes / _GIB:.1f} of {prediction.usable_bytes / _GIB:.1f} GiB, "
        f"{prediction.exposed_comm_s:.3f} s of communication exposed"
    )


def _compared(found: Priced, result: SearchResult) -> Iterator[str]:
    yield f"<h2>time against memory: {len(result.ranked):,} plans that fit, {len(result.over):,} that do not</h2>"
    yield charts.scatter(_dots(found, result), "GiB reserved", "seconds a step", result.budget_bytes / _GIB)
    yield f"<p>runner-up: {escape(found.explanation.second)}</p>"
    yield "<h2>plans</h2>"
    yield "<p>The fastest of each mesh and micro-batch; shaded: within the model's own error of the best.</p>"
    ties = {each.family for each in result.ties}
    names: tuple[str, ...] = ("dp", "fsdp", "sp", "ep", "micro", "accumulation", "recompute", "reshard", "prefetch")
    names += ("step s", "tokens/s/GPU", "MFU", "peak GiB", "margin GiB", "exposed s")
    rows = (
        ("tie" if each.family in ties else "", _cells(each, result.budget_bytes)) for each in result.families[:_ROWS]
    )
    yield charts.table(names, rows)
    counted = "".join(f"<li>{count:,}: {escape(reason)}</li>" for reason, count in result.pruned.items())
    yield f"<p>Of {result.considered:,} plans {result.predicted:,} were priced. Left out:</p><ul>{counted}</ul>"


def _cells(each: Candidate, budget: float) -> list[tuple[str, object]]:
    at, found = each.strategy, each.prediction
    whole = (at.dp, at.fsdp, at.sp, at.ep, at.micro, at.accumulation)
    margin = (budget - found.reserved_bytes) / _GIB
    return [
        *((str(value), value) for value in whole),
        (recomputed(at), recomputed(at)),
        (str(at.reshard).lower(), str(at.reshard).lower()),
        (str(at.prefetch), at.prefetch),
        (f"{found.step_s:.3f}", found.step_s),
        (f"{found.tokens_per_s_per_gpu:,.0f}", found.tokens_per_s_per_gpu),
        (f"{found.mfu:.1%}", found.mfu),
        (f"{found.peak_bytes / _GIB:.1f}", found.peak_bytes),
        (f"{margin:.1f}", margin),
        (f"{found.exposed_comm_s:.3f}", found.exposed_comm_s),
    ]


def _dots(found: Priced, result: SearchResult) -> Iterator[tuple[float, float, str, str]]:
    """(GiB, seconds, class, words) of each plan; of those that would lie on one another, one."""
    front = {id(each) for each in result.frontier}
    seen: set[tuple[float, float]] = set()
    for kind, plans in (("", result.ranked), ("over", result.over)):
        yield from _kept(plans, kind, front, seen)
    yield _dot(found.candidate, "best")


def _kept(
    plans: Iterable[Candidate], kind: str, front: set[int], seen: set[tuple[float, float]]
) -> Iterator[tuple[float, float, str, str]]:
    for each in plans:
        place = (round(each.prediction.reserved_bytes / _GIB, 1), float(f"{each.prediction.step_s:.2e}"))
        if id(each) in front:
            yield _dot(each, "front")
        elif place not in seen:
            seen.add(place)
            yield _dot(each, kind)


def _dot(each: Candidate, kind: str) -> tuple[float, float, str, str]:
    found = each.prediction
    held = found.reserved_bytes / _GIB
    return held, found.step_s, kind, f"{describe(each)}: {found.step_s:.3f} s, {held:.1f} GiB"
