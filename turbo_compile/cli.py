"""`turbo-compile`: find a plan, inspect it, check its numbers, train with it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from turbo_compile import commands
from turbo_compile.commands.failures import RankFailed
from turbo_compile.commands.options import (
    CalibrateOptions,
    CheckOptions,
    InspectOptions,
    PredictOptions,
    SearchOptions,
    TrainOptions,
)
from turbo_compile.commands.settings import launched, plan_ranks, read_fixed, read_plan
from turbo_compile.errors import TurboCompileError

if TYPE_CHECKING:
    from turbo_compile.commands.searching import Priced

app = typer.Typer(
    name="turbo-compile",
    help="Compile an unmodified Hugging Face model and a plan into the same model, trained in parallel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FIXABLE = "dp, fsdp, sp, ep, micro, recompute, reshard, prefetch"
MODEL = "A hub id, a local directory with a config.json, or a config file."
Plan = Annotated[Path | None, typer.Option("--plan", "-p", help="A plan (YAML). Default: fsdp over all ranks.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One value of the plan, over the file: mesh.fsdp=8.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Local processes to start. Default: what the mesh spans.")]
Backend = Annotated[Literal["inductor", "eager"], typer.Option(help="eager interprets the program, for debugging.")]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="To compute in; weights stay fp32.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]
Cluster = Annotated[str | None, typer.Option(help="A cluster that comes with the package, or a file (calibrate).")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Ranks to plan for.")]
Rows = Annotated[int | None, typer.Option("--global-batch", min=1, help="Rows a step, over all ranks.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens a row.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page: the step by stream, memory, all plans.")]


@app.command()
def search(
    model: Annotated[str, typer.Argument(help=MODEL)],
    cluster: Cluster = None,
    gpus: Gpus = None,
    global_batch: Rows = None,
    seq: Seq = None,
    memory: Annotated[float, typer.Option(help="Share of a device's usable memory that a plan may take.")] = 0.92,
    fix: Annotated[list[str] | None, typer.Option(help=f"Choices already made: ep=8,sp=4. Of {FIXABLE}.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 10,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best plan (YAML).")] = None,
    as_json: Json = False,
    html: Html = None,
    plan: Annotated[Path | None, typer.Option("--plan", "-p", help="A plan: what it says is kept.")] = None,
    settings: Set = None,
    traceback: Traceback = False,
) -> None:
    """Find the fastest plan for a model on a cluster. Needs no weights and no GPU."""
    with _errors_in_a_line(traceback):
        base = read_plan(plan, settings or (), base={"dtype": {"compute": "bf16", "master": "fp32"}})
        options = SearchOptions(model, cluster, gpus, global_batch, seq, memory, read_fixed(fix or ()), base)
        found = commands.search_model(options)
        _write(output, found.plan.to_yaml(), html, lambda: commands.report(found))
    if as_json:
        print(json.dumps(commands.as_json(found, top), indent=1))
        return
    commands.print_search(_console(), found, top)
    if output is not None:
        _console().print(f"plan       {output}")


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan (YAML), as search writes it or as you did.")],
    model: Annotated[str | None, typer.Option(help=f"{MODEL} Default: what the plan was found for.")] = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    global_batch: Rows = None,
    seq: Seq = None,
    as_json: Json = False,
    html: Html = None,
    settings: Set = None,
    traceback: Traceback = False,
) -> None:
    """Say where a plan's seconds and bytes go, where its values came from, what came second and what was left out."""
    with _errors_in_a_line(traceback):
        chosen = read_plan(plan, settings or ())
        found = commands.explain_plan(PredictOptions(model, cluster, gpus, global_batch, seq, chosen))
        _write(None, "", html, lambda: commands.report(found))
    _print_plan(found, as_json)


@app.command()
def predict(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL} Default: what the plan was found for.")] = None,
    plan: Plan = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    global_batch: Rows = None,
    seq: Seq = None,
    as_json: Json = False,
    html: Html = None,
    settings: Set = None,
    traceback: Traceback = False,
) -> None:
    """Say how long a step of one plan takes and how much memory, without running it."""
    with _errors_in_a_line(traceback):
        chosen = read_plan(plan, settings or (), base={"dtype": {"compute": "bf16", "master": "fp32"}})
        found = commands.predict_plan(PredictOptions(model, cluster, gpus, global_batch, seq, chosen))
        _write(None, "", html, lambda: commands.report(found))
    _print_plan(found, as_json)


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The cluster file to write.")],
    ranks: Ranks = None,
    dtype: Annotated[list[str] | None, typer.Option(help="To measure. Default: bf16 and fp32; on a CPU fp32.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: about a minute.")] = False,
    traceback: Traceback = False,
) -> None:
    """Measure this machine, or under torchrun these machines, into a file for --cluster."""
    with _errors_in_a_line(traceback):
        options = CalibrateOptions(output, tuple(dtype or ()), quick)
        world = ranks or launched() or 1
        measured = commands.on_ranks("turbo_compile.commands.calibrating:calibrate", options, world)
    if _speaks():
        commands.print_cluster(_console(), measured)
        _console().print(f"cluster file  {output}")


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help=MODEL)],
    plan: Plan = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write every stage into this folder.")] = None,
    cluster: Annotated[str | None, typer.Option(help="In the page of -o: the step as predicted on it.")] = None,
    settings: Set = None,
    traceback: Traceback = False,
) -> None:
    """Show the training step a plan makes of a model. Needs no weights, no GPU and no other ranks."""
    with _errors_in_a_line(traceback):
        found = commands.inspect_model(InspectOptions(model, read_plan(plan, settings or ()), output, cluster))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(found.step)
    console.print(found.stages)
    _print_facts(found.facts)
    if output is not None:
        console.print(f"every stage, and index.html to read them side by side: {output}")


@app.command()
def check(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL} Default: a small Qwen3.")] = None,
    plan: Plan = None,
    ranks: Ranks = None,
    backend: Backend = "inductor",
    dtype: Dtype = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same architecture at toy size, random weights.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows of random tokens a rank.")] = 2,
    seq: Annotated[int, typer.Option(min=2, help="Tokens a row.")] = 24,
    seeds: Annotated[int | None, typer.Option(min=1, help="Sets of random weights. Default: 1; 5 in bf16.")] = None,
    settings: Set = None,
    traceback: Traceback = False,
) -> None:
    """Compare loss and every gradient with the plain model in one process. Exit code 1: they differ."""
    with _errors_in_a_line(traceback):
        base = {"dtype": {"compute": "fp32"}}
        chosen, world = plan_ranks(read_plan(plan, _settings(settings, dtype), base=base), ranks)
        low = chosen.dtype.compute in ("bf16", "fp16")
        count = seeds if seeds is not None else 5 if low else 1
        options = CheckOptions(model, chosen, backend, tiny, rows * chosen.mesh.dp * chosen.mesh.fsdp, seq, count)
        report = commands.on_ranks("turbo_compile.commands.checking:check_model", options, world)
    if _speaks():
        Console().print(report.table())
        Console(soft_wrap=True, highlight=False).print(report.verdict(), style="green" if report.ok else "bold red")
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def train(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL} Default: a Qwen3 of 5 million parameters.")] = None,
    data: Annotated[
        Path | None, typer.Option(help='A text file, or JSONL with a "text" a line. Default: Pride and Prejudice.')
    ] = None,
    plan: Plan = None,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 50,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate after warm-up.")] = 3e-3,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows a step, all ranks. Default: the plan's, or 8.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens a row. Default: the plan's, or 128.")] = None,
    pack: Annotated[
        bool, typer.Option("--pack/--no-pack", help="Join documents in a row, or give each its own rows, padded.")
    ] = True,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the checkpoint goes.")] = Path("outputs"),
    backend: Backend = "inductor",
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the dropout and the order of the text.")] = 0,
    settings: Set = None,
    traceback: Traceback = False,
) -> None:
    """Train a model on a text and write a Hugging Face checkpoint. Under torchrun it uses its ranks."""
    with _errors_in_a_line(traceback):
        base = {"dtype": {"master": "fp32"}}
        chosen, world = plan_ranks(read_plan(plan, _settings(settings, dtype), base=base), ranks)
        rows, length = batch or chosen.batch.global_ or 8, seq or chosen.batch.seq or 128
        options = TrainOptions(model, data, chosen, backend, steps, lr, rows, length, pack, output, seed)
        done = commands.on_ranks("turbo_compile.commands.training:train_model", options, world)
    if _speaks():
        _print_facts(
            (
                ("loss", f"{done.first_loss:.4f} at the first step, {done.last_loss:.4f} at the last"),
                ("speed", f"{done.tokens_per_s:,.0f} tokens/s, after {done.compile_s:.1f} s of compilation"),
                ("peak memory", f"{done.peak_bytes / 2**30:.2f} GiB a rank"),
                ("checkpoint", str(done.checkpoint)),
            )
        )


def main() -> None:
    app()


def _console() -> Console:
    """As wide as a table needs where nobody watches."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160, soft_wrap=True)


def _print_plan(found: Priced, as_json: bool) -> None:
    if as_json:
        print(json.dumps(commands.as_json(found, 10), indent=1))
    else:
        commands.print_plan(_console(), found)


def _write(output: Path | None, text: str, html: Path | None, page: Callable[[], str]) -> None:
    for path, made in ((output, lambda: text), (html, page)):
        if path is None:
            continue
        try:
            path.write_text(made(), encoding="utf-8")
        except OSError as error:
            raise TurboCompileError(f"cannot write {path}: {error.strerror}") from None


def _settings(settings: list[str] | None, dtype: str | None) -> list[str]:
    short = [f"dtype.compute={dtype}", "dtype.master=fp32"] if dtype is not None else []
    return [*short, *(settings or ())]


def _print_facts(facts: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        Console(soft_wrap=True, highlight=False, markup=False).print(f"{name:<{width}}  {value}")


def _speaks() -> bool:
    """Under a launcher every rank comes here: one of them prints."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _errors_in_a_line(traceback: bool) -> Iterator[None]:
    """What this package or a rank of it raised on purpose, as one red line and exit code 2; Ctrl-C as 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except TurboCompileError as error:
        if traceback:
            raise
        _print_error(str(error))
        raise typer.Exit(2) from None
    except RankFailed as error:
        _print_rank_failure(error, traceback)
        raise typer.Exit(2 if error.expected else 1) from None


def _print_rank_failure(error: RankFailed, traceback: bool) -> None:
    if traceback or not error.expected:
        print(error.details, file=sys.stderr, end="")
    _print_error(str(error) if error.expected else f"rank {error.rank} failed: {error}")


def _print_error(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.print(f"error: {message}", style="bold red")
