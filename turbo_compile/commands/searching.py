"""`turbo-compile search`: the plan for a model on a cluster, found without weights and without a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from turbo_compile.commands.models import find_model
from turbo_compile.commands.options import SearchOptions
from turbo_compile.costing import cost_of_config
from turbo_compile.dtypes import WORDS
from turbo_compile.errors import PlanError
from turbo_compile.plans.candidates import KEYS, said
from turbo_compile.plans.cluster import Cluster, cluster_names, load_cluster
from turbo_compile.plans.cost import ModelCost
from turbo_compile.plans.explain import Explanation, explain
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.search import Candidate, Request, SearchResult, plan_of, search
from turbo_compile.plans.simulation import simulate
from turbo_compile.plans.source import Source
from turbo_compile.plans.timeline import Timeline
from turbo_compile.plans.values import listed


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan with its simulated step, and how it came about. `result` None: it was given, not searched for."""

    plan: Plan
    candidate: Candidate
    timeline: Timeline
    explanation: Explanation
    model: ModelCost
    cluster: Cluster
    result: SearchResult | None
    seconds: Mapping[str, float]


def search_model(options: SearchOptions) -> Priced:
    """Find the best plan.

    Raises:
        TurboCompileError: no such model or cluster, a request that contradicts itself, or nothing that fits.
    """
    cluster = read_cluster(options.cluster)
    request = request_of(options)
    began = time.perf_counter()
    base = _in_mixed_precision(options.base, cluster)
    model = cost_of(options.model, base)
    captured = time.perf_counter()
    result = search(model, cluster, request, base)
    found_by: dict[str, Any] = {"model": options.model, "cluster": options.cluster, "memory": request.memory}
    found_by |= {"fix": dict(request.fixed)} if request.fixed else {}
    plan = plan_of(result.best, model, base, found_by)
    seconds = {"capture": captured - began, "search": time.perf_counter() - captured}
    return priced(plan, result.best, model, cluster, result, seconds)


def _in_mixed_precision(base: Plan, cluster: Cluster) -> Plan:
    """`base`, its dtypes said: compute in bf16 where the accelerator is faster in it, masters in fp32."""
    faster = cluster.accelerator.peak("bf16") > cluster.accelerator.peak("fp32")
    usual = {"compute": "bf16" if faster else "fp32", "master": "fp32"}
    unsaid = {name: word for name, word in usual.items() if base.origins[f"dtype.{name}"] == "default"}
    return Plan.layers(base, Source({"dtype": unsaid}, dict.fromkeys((f"dtype.{name}" for name in unsaid), "usual")))


def priced(
    plan: Plan,
    candidate: Candidate,
    model: ModelCost,
    cluster: Cluster,
    result: SearchResult | None,
    seconds: Mapping[str, float],
) -> Priced:
    timeline = simulate(model, cluster, candidate.strategy)
    why = explain(plan, candidate, cluster, result)
    return Priced(plan, candidate, timeline, why, model, cluster, result, seconds)


def read_cluster(name: str | None) -> Cluster:
    if name is None:
        known = listed(cluster_names())
        raise PlanError(f"say which --cluster: {known}, or a file that calibrate wrote", key="cluster")
    return load_cluster(name)


def cost_of(model: str, plan: Plan) -> ModelCost:
    """What the model that MODEL names costs, in the compute dtype of `plan`."""
    source = find_model(model)
    compute = WORDS.get(plan.dtype.compute) or source.config.dtype or torch.float32
    return replace(cost_of_config(source.config, compute), name=source.name)


def request_of(options: SearchOptions) -> Request:
    """The question: the command line, and what the plan it starts from already says.

    Raises:
        PlanError: something is missing, or said twice and differently.
    """
    fixed: dict[str, Any] = dict(options.fixed)
    for name, value in said(options.base).items():
        if fixed.setdefault(name, value) != value:
            raise PlanError(
                f"--fix {name}={fixed[name]} contradicts {KEYS[name]}={value} "
                f"({options.base.origins[KEYS[name]]}); say it once",
                key="fix",
            )
    batch = options.base.batch
    asked = {
        "--gpus": options.gpus,
        "--global-batch": options.global_batch or batch.global_,
        "--seq": options.seq or batch.seq,
    }
    missing = [name for name, value in asked.items() if value is None]
    if missing:
        raise PlanError(f"say {listed(missing, 'and')}: the ranks, and the rows and tokens a row of one step")
    gpus, rows, seq = asked.values()
    assert gpus is not None and rows is not None and seq is not None
    return Request(gpus, rows, seq, options.memory, fixed)
