"""Write what the compiler made, stage by stage, for people to read.

    plan.yaml  00-capture.txt  01-SumOverRanks.txt  ...  segments/<name>.txt  summary.txt  index.html

A process that compiles more programs than one (training, evaluation) puts the later ones in `2/`, `3/` beside them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path

import sympy
import torch
import torch.fx as fx

from turbo_compile.ir.graphs import argument
from turbo_compile.ir.names import collective
from turbo_compile.ir.page import Stage, page
from turbo_compile.ir.program import Parameter, Program, StepProgram
from turbo_compile.ir.segment_text import show_segments
from turbo_compile.ir.spelling import Spelling, symbolic_bytes
from turbo_compile.ir.text import graphs_of, show
from turbo_compile.plans.plan import Plan

_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def open_dump(directory: str | PathLike[str] | None, plan: Plan, rank: int) -> Dump | None:
    """A dump into `directory`, else into TURBO_COMPILE_DUMP; None if neither is given, and on every rank but 0."""
    chosen = directory or os.environ.get("TURBO_COMPILE_DUMP")
    return Dump(Path(chosen), plan) if chosen and rank == 0 else None


class Dump:
    """The files of one compilation. A stage is on disk as soon as it is told: a failure leaves those before it."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.root = directory
        self.plan = plan
        self.programs = 0
        self.charts = ""  # HTML that the pages begin with
        self._begin()

    def stage(self, title: str, program: Program | StepProgram, seconds: float = 0.0) -> None:
        """Write `program` as it is after `title`, a pass with its options or one of the steps between passes."""
        if title == "capture" and self.stages:
            self._begin()
        name = f"{len(self.stages):02d}-{title.partition('(')[0]}"
        text = show(program, after=title)
        self._write(f"{name}.txt", text)
        for segment, body in show_segments(program).items():
            self.segments[segment] = body
            self._write(f"segments/{segment}.txt", body)
        nodes = sum(len(graph.nodes) for _, graph in graphs_of(program))
        self.stages.append(Stage(name, title, text, nodes, _moves(program, self.plan), seconds))
        self._write("summary.txt", summary(program.name, self.stages))
        self._write("index.html", page(program.name, self.stages, self._others(), self.charts))

    def _begin(self) -> None:
        self.programs += 1
        self.directory = self.root if self.programs == 1 else self.root / str(self.programs)
        self.stages: list[Stage] = []
        self.segments: dict[str, str] = {}
        self.directory.joinpath("segments").mkdir(parents=True, exist_ok=True)
        for old in (*self.directory.glob("[0-9][0-9]-*.txt"), *self.directory.glob("segments/*.txt")):
            old.unlink()  # an earlier dump's, which would mix with this one
        self._write("plan.yaml", self.plan.to_yaml())

    def _others(self) -> Iterator[tuple[str, str]]:
        """What the page shows besides the stages."""
        yield "summary", (self.directory / "summary.txt").read_text(encoding="utf-8")
        yield "plan", self.plan.to_yaml()
        yield from ((f"segment {name}", body) for name, body in self.segments.items())

    def _write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text, encoding="utf-8")


def summary(name: str, stages: Sequence[Stage]) -> str:
    """A row a stage: nodes of the outer graphs, exchanges by kind and axis with their bytes, and milliseconds."""
    kinds = sorted({kind for stage in stages for kind in stage.moves})
    rows = [["stage", "nodes", *kinds, "ms"]]
    for stage in stages:
        moves = [f"{stage.moves[kind][0]}: {stage.moves[kind][1]}" if kind in stage.moves else "" for kind in kinds]
        rows.append([stage.name, str(stage.nodes), *moves, f"{stage.seconds * 1e3:.1f}" if stage.seconds else ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    what = "bytes: whole tensors of one step, in the dtype that travels; of n ranks each receives (n-1)/n of them"
    return "\n".join([name, "", *table, "", what]) + "\n"


def _moves(program: Program | StepProgram, plan: Plan) -> dict[str, tuple[int, str]]:
    """How often, and how much, each kind of exchange moves over each axis in a step."""
    spelling = Spelling(program)
    count: Counter[str] = Counter()
    moved: dict[str, sympy.Expr] = {}
    for _, graph in graphs_of(program):
        for node in graph.nodes:
            if collective(node) not in ("", "wait"):
                kind = f"{collective(node)}@{node.args[1]}"
                count[kind] += 1
                moved[kind] = moved.get(kind, sympy.Integer(0)) + _bytes_of(node, program, plan, spelling)
    return {kind: (number, symbolic_bytes(moved[kind])) for kind, number in count.items()}


def _bytes_of(node: fx.Node, program: Program | StepProgram, plan: Plan, spelling: Spelling) -> sympy.Expr:
    if collective(node).startswith("all_to_all"):
        sent = (value.meta.get("val") for value in argument(node))
        return spelling.bytes(value for value in sent if isinstance(value, torch.Tensor))
    parameters = [program.parameters[fqn] for fqn in node.meta.get("fqns", ())]
    if not parameters:
        value = node.meta["val"]
        return spelling.bytes(value if isinstance(value, (tuple, list)) else [value])
    if collective(node) == "all_gather":
        return sympy.Integer(sum(parameter.numel * parameter.dtype.itemsize for parameter in parameters))
    shards = plan.mesh.shard if node.args[1] == "dp" else 1  # over dp a rank sends its shard, already reduced
    return sympy.Integer(_reduced_bytes(parameters, plan) // shards)


def _reduced_bytes(parameters: Iterable[Parameter], plan: Plan) -> int:
    total = 0
    for parameter in parameters:
        auto = 8 if parameter.dtype is torch.float64 else 4
        own = {"auto": auto, "model": parameter.dtype.itemsize}
        total += parameter.numel * (own | _ITEMSIZE)[plan.dtype.reduce]
    return total
