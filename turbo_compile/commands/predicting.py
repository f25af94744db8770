"""`turbo-compile predict` and `explain`: what one plan takes, and why it is what it is."""

from __future__ import annotations

import time
from dataclasses import replace

from turbo_compile.commands.options import PredictOptions, SearchOptions
from turbo_compile.commands.searching import Priced, cost_of, priced, read_cluster, request_of
from turbo_compile.errors import PlanError
from turbo_compile.plans.plan import Plan, check_supported
from turbo_compile.plans.search import candidate_of, search
from turbo_compile.plans.source import Source


def predict_plan(options: PredictOptions) -> Priced:
    """Price a plan as it is.

    Raises:
        TurboCompileError: no such model or cluster, or a plan that does not span the ranks.
    """
    plan = _complete(options)
    check_supported(plan)
    cluster = read_cluster(options.cluster or _asked(plan, "cluster"))
    began = time.perf_counter()
    model = cost_of(_model(options.model, plan), plan)
    captured = time.perf_counter()
    candidate = candidate_of(plan, model, cluster)
    seconds = {"capture": captured - began, "prediction": time.perf_counter() - captured}
    return priced(plan, candidate, model, cluster, None, seconds)


def explain_plan(options: PredictOptions) -> Priced:
    """Price a plan beside the plans a search finds under the same question.

    Raises:
        TurboCompileError: as `predict_plan`; or the file does not say what it was found for, and nobody else does.
    """
    alone = predict_plan(options)
    plan, asked = alone.plan, alone.plan.found_by or {}
    question = SearchOptions(
        model=_model(options.model, plan),
        cluster=options.cluster or asked.get("cluster"),
        gpus=plan.mesh.world,
        global_batch=alone.candidate.strategy.rows,
        seq=alone.candidate.strategy.seq,
        memory=asked.get("memory", 0.92),
        fixed=asked.get("fix") or {},
        base=Plan(dtype=plan.dtype, parameters=plan.parameters, replicate_below=plan.replicate_below),
    )
    began = time.perf_counter()
    result = search(alone.model, alone.cluster, request_of(question), question.base)
    seconds = {**alone.seconds, "search": time.perf_counter() - began}
    found = priced(plan, alone.candidate, alone.model, alone.cluster, result, seconds)
    return replace(found, timeline=alone.timeline)


def _complete(options: PredictOptions) -> Plan:
    """The plan with the ranks and the batch that the command line gives it."""
    plan = options.plan
    if options.gpus is not None:
        if not any(plan.origins[f"mesh.{axis}"] != "default" for axis in ("dp", "fsdp", "sp", "ep")):
            plan = Plan.layers(plan, Source({"mesh": {"fsdp": options.gpus}}, {"mesh.fsdp": "--gpus"}))
        plan.mesh.check_world(options.gpus)
    given = {"global": options.global_batch, "seq": options.seq}
    batch = {key: value for key, value in given.items() if value is not None}
    names = {"global": "--global-batch", "seq": "--seq"}
    if batch:
        plan = Plan.layers(plan, Source({"batch": batch}, {f"batch.{key}": names[key] for key in batch}))
    if plan.batch.seq is None:
        raise PlanError("the plan does not say batch.seq; give --seq", key="batch.seq")
    if plan.batch.micro is None:
        plan = _with_micro(plan)
    return plan


def _with_micro(plan: Plan) -> Plan:
    """A plan that leaves the micro-batch open takes all rows of a rank at once."""
    ranks = plan.mesh.dp * plan.mesh.fsdp
    rows = plan.batch.global_ or ranks
    if rows % ranks:
        raise PlanError(
            f"batch.global={rows} is not a multiple of dp x fsdp = {ranks}, the ranks that split the rows",
            key="batch.global",
        )
    return Plan.layers(plan, Source({"batch": {"micro": rows // ranks}}, {"batch.micro": "all rows of a rank"}))


def _model(name: str | None, plan: Plan) -> str:
    found = name or _asked(plan, "model")
    if found is None:
        raise PlanError("the plan does not say which model it is for; give --model")
    return found


def _asked(plan: Plan, key: str) -> str | None:
    value = (plan.found_by or {}).get(key)
    return str(value) if value is not None else None
