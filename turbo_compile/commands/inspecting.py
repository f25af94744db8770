"""`turbo-compile inspect`: the step a plan makes of a model, for any number of ranks, without weights or a GPU."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from turbo_compile import _torch
from turbo_compile.api import check_experts, trace
from turbo_compile.capture import Signature
from turbo_compile.commands.models import build_on_meta, find_model
from turbo_compile.commands.options import InspectOptions
from turbo_compile.commands.searching import cost_of
from turbo_compile.dtypes import choose_dtypes
from turbo_compile.ir import charts
from turbo_compile.ir.dump import Dump
from turbo_compile.ir.mesh import build_axes
from turbo_compile.ir.placement import layouts
from turbo_compile.ir.program import StepProgram
from turbo_compile.ir.text import show
from turbo_compile.plans.cluster import load_cluster
from turbo_compile.plans.plan import Plan, check_supported
from turbo_compile.plans.simulation import simulate
from turbo_compile.plans.strategy import Strategy

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Inspection:
    """`step` is the program after all passes, `stages` a row a pass, `facts` what a reader asks first."""

    step: str
    stages: str
    facts: tuple[tuple[str, str], ...]


def inspect_model(options: InspectOptions) -> Inspection:
    """Compile on paper: captured on meta, sharded over a process group that nobody answers, written as text.

    Raises:
        TurboCompileError: the model cannot be captured, or the plan does not fit it.
    """
    began = time.perf_counter()
    plan = options.plan
    check_supported(plan)
    model = build_on_meta(find_model(options.model))
    with _Pretend(plan.mesh.world), tempfile.TemporaryDirectory() as nowhere:
        build_axes(plan.mesh, _CPU)
        check_experts(model, plan)
        held = _held(model, plan)
        dump = Dump(options.output or Path(nowhere), plan)
        dump.charts = _predicted(options) if options.cluster is not None else ""
        program = trace(model, plan, _signature(model, plan), choose_dtypes(model, plan.dtype), _CPU, dump)
        stages = (dump.directory / "summary.txt").read_text(encoding="utf-8")
    facts = (*_facts(model, plan, program, held), ("inspected in", f"{time.perf_counter() - began:.1f} s"))
    return Inspection(show(program, after=dump.stages[-1].title), stages, facts)


def _predicted(options: InspectOptions) -> str:
    """The step by stream, the memory over it, and both by term, as the cost model sees them."""
    model, cluster = cost_of(options.model, options.plan), load_cluster(options.cluster or "")
    strategy = Strategy.of(options.plan, model)
    line = simulate(model, cluster, strategy)
    found = line.prediction
    events = [(event.stream, event.name, event.start_s, event.end_s) for event in line.events]
    both = ((found.time_terms, "s", 1.0), (found.memory_terms, "GiB", 2**-30))
    return charts.part(
        f"<h2>predicted on {escape(cluster.name)}: {found.step_s:.3f} s for {strategy.rows} rows of {strategy.seq} "
        f"tokens, {found.peak_bytes / 2**30:.1f} GiB at the peak</h2>",
        charts.step(events, line.memory, found.usable_bytes),
        *(
            charts.bars({name: value for name, value in terms.items() if value}, unit, scale)
            for terms, unit, scale in both
        ),
    )


class _Pretend:
    """A world of any size, in which this process is rank 0 and every collective is a promise."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __enter__(self) -> None:
        dist.init_process_group("fake", store=_torch.fake_process_group_store(), rank=0, world_size=self.ranks)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def _signature(model: PreTrainedModel, plan: Plan) -> Signature:
    """A training step with a loss, as `model(input_ids=..., labels=...)` would ask for it."""
    static = plan.batch.shapes == "static" and plan.batch.seq is not None
    return Signature(
        loss=True,
        logits=False,
        training=True,
        differentiable=True,
        router=bool(getattr(model.config, "output_router_logits", False)),
        trainable=frozenset(name for name, p in model.named_parameters() if p.requires_grad),
        shape=(plan.batch.micro or 1, -(-plan.batch.seq // plan.mesh.sp)) if static and plan.batch.seq else None,
    )


def _held(model: PreTrainedModel, plan: Plan) -> str:
    """Bytes of parameters on a rank, which differ where rows do not divide, most where there are fewer than ranks."""
    masters = choose_dtypes(model, plan.dtype).master
    shapes = {name: (p.shape, masters[name]) for name, p in model.named_parameters()}
    fullest, total = 0, 0
    for name, layout in layouts(plan, shapes).items():
        shape, dtype = shapes[name]
        row = shape[1:].numel() * dtype.itemsize if len(shape) else dtype.itemsize
        fullest += layout.chunk * row
        total += shape.numel() * dtype.itemsize // layout.ranks if layout.sharded else shape.numel() * dtype.itemsize
    if fullest < 1.05 * total:
        return f"{total / 2**30:.2f} GiB"
    return f"{total / 2**30:.2f} GiB on average, {fullest / 2**30:.2f} on the fullest, as rows do not divide"


def _facts(model: PreTrainedModel, plan: Plan, program: StepProgram, held: str) -> list[tuple[str, str]]:
    count = sum(p.numel() for p in model.parameters())
    mesh = ", ".join(f"{axis}={size}" for axis in ("dp", "fsdp", "sp", "ep") if (size := getattr(plan.mesh, axis)) > 1)
    calls = Counter(str(node.target) for node in program.forward.nodes if node.op == "call_module")
    return [
        ("model", f"{type(model).__name__}, {_count(count)} parameters in {len(program.blocks)} blocks"),
        ("mesh", f"{plan.mesh.world} ranks: {mesh}" if mesh else "1 rank"),
        ("weights a rank", f"{held}; as much again for gradients"),
        ("segments", ", ".join(f"{name} x {times}" if times > 1 else name for name, times in calls.items())),
    ]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
