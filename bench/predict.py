"""Score predictions of step time and memory against published training runs.

    python bench/predict.py --runs runs.csv --rankings rankings.csv [--out predictions.csv]

A row is a run: its model, hardware, axes, batch and what was measured. Rows that cannot be described are skipped, and
counted by reason. The first time takes minutes (each model is captured), later ones seconds.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this one, from wherever it is started

from published_rows import GIB, Skip, read_case
from published_scores import (
    Ranking,
    Scored,
    baseline_errors,
    constant_mfu,
    median,
    out_of_memory,
    percentile,
    rank,
)

from turbo_compile.plans.timeline import predict

# Device factors and engine overheads were set while looking at these datasets; all others were only tested on.
FITTED = ("vtrain1", "alephalpha", "deepcompile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", required=True, help="a CSV of runs, one a row")
    parser.add_argument("--rankings", help="a CSV of groups of runs, ranked")
    parser.add_argument("--out", help="write a prediction a row to this CSV")
    options = parser.parse_args()
    console = Console(width=140)
    with open(options.runs, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    scored, skipped = _predict_all(rows)
    console.print(f"{len(scored)} of {len(rows)} rows predicted; skipped:")
    for reason, count in skipped.most_common():
        console.print(f"  {count:5d}  {reason}")
    rankings: list[Ranking] = []
    if options.rankings:
        with open(options.rankings, newline="", encoding="utf-8") as file:
            rankings, missing = rank(list(csv.DictReader(file)), {each.case.id: each for each in scored})
        console.print(f"{len(rankings)} groups ranked; {missing} of their rows have no prediction")
    _report(console, scored, rankings)
    if options.out:
        _write(options.out, scored)


def _predict_all(rows: Sequence[dict[str, str]]) -> tuple[list[Scored], Counter[str]]:
    scored = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            case = read_case(row)
        except Skip as reason:
            skipped[str(reason)] += 1
            continue
        scored.append(Scored(case, predict(case.model, case.cluster, case.strategy)))
    return scored, skipped


def _report(console: Console, scored: Sequence[Scored], rankings: Sequence[Ranking]) -> None:
    complete = [each for each in scored if each.case.tier == "A"]
    rest = [each for each in scored if each.case.tier != "A"]
    for title, part, ranked in (
        ("Complete configurations (tier A)", complete, rankings),
        ("Incomplete configurations (tiers B and C)", rest, ()),
    ):
        if part:
            console.print(_table(title, part, ranked))


def _table(title: str, scored: Sequence[Scored], rankings: Sequence[Ranking]) -> Table:
    table = Table(title=title)
    for name in (
        "dataset",
        "rows",
        "time median",
        "p90",
        "bias",
        "constant MFU",
        "MoE median",
        "memory (alloc)",
        "p95",
        "memory (other)",
        "OOM",
        "regret",
        "tau",
    ):
        table.add_column(name, justify="left" if name == "dataset" else "right")
    constant = constant_mfu(scored)
    names = list(dict.fromkeys(each.case.dataset for each in scored))
    for name in names:
        part = [each for each in scored if each.case.dataset == name]
        groups = [each for each in rankings if each.dataset == name]
        table.add_row(f"{name}{' (fitted)' if name in FITTED else ''}", *_cells(part, groups, constant))
    table.add_section()
    table.add_row("all", *_cells(scored, rankings, constant))
    flash = [each for each in scored if each.case.flash]
    if 0 < len(flash) < len(scored):
        table.add_row("flash attention", *_cells(flash, (), constant))
        table.add_row("scores in memory", *_cells([each for each in scored if not each.case.flash], (), constant))
    tested = [each for each in scored if each.case.dataset not in FITTED]
    if tested:
        table.add_row("only tested", *_cells(tested, [r for r in rankings if r.dataset not in FITTED], constant))
    return table


def _cells(scored: Sequence[Scored], rankings: Sequence[Ranking], constant: float) -> list[str]:
    errors = [e for each in scored if (e := each.time_error) is not None]
    moe = [e for each in scored if each.case.moe and (e := each.time_error) is not None]
    allocated = [e for each in scored if each.case.memory_kind == "allocated" and (e := each.memory_error) is not None]
    other = [e for each in scored if each.case.memory_kind != "allocated" and (e := each.memory_error) is not None]
    memory = out_of_memory(scored)
    bias = sorted(errors)[len(errors) // 2] if errors else None
    taus = [each.tau for each in rankings if each.tau is not None]
    return [
        str(len(errors)),
        _percent(median(errors)),
        _percent(percentile(errors, 0.9)),
        "" if bias is None else f"{bias:+.0%}",
        _percent(median(baseline_errors(scored, constant))),
        _percent(median(moe)),
        _percent(median(allocated)),
        _percent(percentile(allocated, 0.95)),
        _percent(median(other)),
        "" if memory is None else f"{memory[0]:.1%} ({memory[1]}/{memory[1] + memory[2]})",
        _percent(sum(each.regret for each in rankings) / len(rankings) if rankings else None),
        f"{sum(taus) / len(taus):.2f}" if taus else "",
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _write(path: str, scored: Sequence[Scored]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "id",
                "dataset",
                "tier",
                "step_s",
                "measured_step_s",
                "tokens_per_s_per_gpu",
                "mfu",
                "peak_gib",
                "reserved_gib",
                "measured_gib",
                "memory_kind",
                "fits",
                "oom",
                "flash",
                "terms",
            ]
        )
        for each in scored:
            case, made = each.case, each.prediction
            terms = " ".join(f"{name.replace(' ', '_')}={value:.4g}" for name, value in made.time_terms.items())
            writer.writerow(
                [
                    case.id,
                    case.dataset,
                    case.tier,
                    f"{made.step_s:.6g}",
                    case.step_s or "",
                    f"{made.tokens_per_s_per_gpu:.6g}",
                    f"{made.mfu:.4f}",
                    f"{made.peak_bytes / GIB:.3f}",
                    f"{made.reserved_bytes / GIB:.3f}",
                    f"{case.memory / GIB:.3f}" if case.memory else "",
                    case.memory_kind,
                    made.fits,
                    case.out_of_memory,
                    case.flash,
                    terms,
                ]
            )


if __name__ == "__main__":
    main()
