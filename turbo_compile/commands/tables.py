"""What search, explain and predict print: tables, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from turbo_compile.commands.searching import Priced
from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.explain import Share
from turbo_compile.plans.search import Candidate, SearchResult, describe, recomputed

GIB = 2**30


def print_search(console: Console, found: Priced, top: int) -> None:
    """The best plan of each mesh and micro-batch; those the model cannot tell from the best are marked."""
    result = found.result
    assert result is not None
    console.print(_plans(result, result.families[:top]))
    ties = len(result.ties) - 1
    error = result.best.prediction.relative_error
    if ties:
        console.print(f"= {ties} more within the model's own error ({error:.0%}) of the best: measure to choose")
    for line in facts(found):
        console.print(line)


def print_plan(console: Console, found: Priced) -> None:
    """One plan: its numbers, where they come from, and what it was compared with."""
    console.print(_one(found))
    console.print(_shares("seconds of a step", found.explanation.seconds, 1.0, "s"))
    console.print(_shares("memory at the peak", found.explanation.bytes_, 1 / GIB, "GiB"))
    console.print(_values(found))
    if found.explanation.second:
        console.print(f"runner-up  {found.explanation.second}")
    for line in facts(found):
        console.print(line)
    for note in found.explanation.notes:
        console.print(f"note       {note}")


def facts(found: Priced) -> Iterable[str]:
    """What was tried and left out, and how long it took."""
    if found.result is not None:
        yield f"considered {found.result.considered:,} plans, priced {found.result.predicted:,}"
        for reason, count in found.explanation.pruned:
            yield f"left out   {count:,}: {reason}"
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.seconds.items())
    yield f"took       {took}"


def as_json(found: Priced, top: int) -> dict[str, Any]:
    """The same for programs: seconds, bytes and fractions, no durations of the search itself."""
    answer: dict[str, Any] = {
        "model": found.model.name,
        "cluster": found.cluster.name,
        "gpus": found.plan.mesh.world,
        "plan": found.plan.to_dict(),
        "best": _row(found.candidate),
        "time_s": dict(found.candidate.prediction.time_terms),
        "memory_bytes": dict(found.candidate.prediction.memory_terms),
        "values": [list(each) for each in found.explanation.values],
    }
    result = found.result
    if result is not None:
        answer |= {
            "ranked": [_row(each) for each in result.families[:top]],
            "ties": len(result.ties),
            "runner_up": found.explanation.second,
            "considered": result.considered,
            "priced": result.predicted,
            "pruned": dict(result.pruned),
            "budget_bytes": result.budget_bytes,
            "frontier": [
                [each.prediction.step_s, each.prediction.reserved_bytes, describe(each)] for each in result.frontier
            ],
        }
    return answer


def print_cluster(console: Console, cluster: Cluster) -> None:
    """What was measured, in words."""
    device = cluster.accelerator
    table = Table(title=f"{cluster.name}: {device.name}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for dtype, peak in device.flop_per_s.items():
        table.add_row(f"matmul, {dtype}", f"{peak / 1e12:,.3f} Tflop/s")
    reached = device.peak("bf16")
    table.add_row("attention, forward", f"{reached * device.attention_efficiency / 1e12:,.3f} Tflop/s")
    table.add_row("attention, backward", f"{reached * device.attention_backward_efficiency / 1e12:,.3f} Tflop/s")
    table.add_row("memory", f"{device.hbm_bytes_per_s * device.memory_efficiency / 1e9:,.1f} GB/s")
    table.add_row("usable memory", f"{device.usable_bytes / GIB:,.1f} GiB")
    table.add_row("an operation", f"{device.dispatch_s * 1e6:,.1f} us")
    for level in cluster.levels:
        table.add_row(f"{level.name}: gather, reduce", f"{level.bytes_per_s * level.efficiency / 1e9:,.2f} GB/s")
        exchange = level.bytes_per_s * level.all_to_all_efficiency
        table.add_row(f"{level.name}: all_to_all", f"{exchange / 1e9:,.2f} GB/s")
        table.add_row(f"{level.name}: latency", f"{(level.latency_s + level.step_s) * 1e6:,.0f} us")
    console.print(table)


def _row(candidate: Candidate) -> dict[str, Any]:
    at, found = candidate.strategy, candidate.prediction
    return {
        "dp": at.dp,
        "fsdp": at.fsdp,
        "sp": at.sp,
        "ep": at.ep,
        "micro": at.micro,
        "accumulation": at.accumulation,
        "recompute": recomputed(at),
        "reshard": at.reshard,
        "prefetch": at.prefetch,
        "step_s": found.step_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu": found.mfu,
        "peak_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "usable_bytes": found.usable_bytes,
        "exposed_comm_s": found.exposed_comm_s,
        "simulated": candidate.simulated,
    }


def _plans(result: SearchResult, candidates: Iterable[Candidate]) -> Table:
    request = result.request
    where = f"{result.model} on {request.gpus} x {result.cluster}"
    table = Table(title=f"{where}, {request.global_batch} rows of {request.seq:,} tokens", title_justify="left")
    _columns(table)
    ties = {each.family for each in result.ties}
    for place, each in enumerate(candidates, 1):
        mark = "=" if each.family in ties and place > 1 else ""
        table.add_row(f"{place}{mark}", *_cells(each, result.budget_bytes), style="bold" if place == 1 else "")
    return table


def _one(found: Priced) -> Table:
    plan = found.plan
    where, rows = f"{found.model.name} on {plan.mesh.world} x {found.cluster.name}", found.candidate.strategy.rows
    table = Table(title=f"{where}, {rows} rows of {plan.batch.seq:,} tokens", title_justify="left")
    _columns(table)
    budget = found.result.budget_bytes if found.result is not None else found.candidate.prediction.usable_bytes
    table.add_row("", *_cells(found.candidate, budget))
    return table


def _columns(table: Table) -> None:
    table.add_column("")
    for name in ("dp", "fsdp", "sp", "ep", "micro"):
        table.add_column(name, justify="right")
    table.add_column("recompute")
    table.add_column("schedule")
    for name in ("step s", "tokens/s/GPU", "MFU", "peak GiB", "margin", "exposed s"):
        table.add_column(name, justify="right")


def _cells(candidate: Candidate, budget: float) -> list[str]:
    at, found = candidate.strategy, candidate.prediction
    rows = f"{at.micro}" if at.accumulation == 1 else f"{at.micro} x {at.accumulation}"
    schedule = f"{'reshard' if at.reshard else 'keep'} +{at.prefetch}"
    return [
        *(str(size) for size in (at.dp, at.fsdp, at.sp, at.ep)),
        rows,
        recomputed(at),
        schedule,
        f"{found.step_s:.3f}",
        f"{found.tokens_per_s_per_gpu:,.0f}",
        f"{found.mfu:.1%}",
        f"{found.peak_bytes / GIB:.1f}",
        f"{(budget - found.reserved_bytes) / GIB:.1f}",
        f"{found.exposed_comm_s:.3f}",
    ]


def _shares(title: str, shares: Iterable[Share], scale: float, unit: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("term")
    table.add_column(unit, justify="right")
    table.add_column("share", justify="right")
    for each in shares:
        table.add_row(each.name, f"{each.value * scale:.3f}", f"{each.share:.1%}")
    return table


def _values(found: Priced) -> Table:
    table = Table(title="values", title_justify="left")
    for name in ("key", "value", "from"):
        table.add_column(name, overflow="fold")
    for row in found.explanation.values:
        table.add_row(*row)
    return table
