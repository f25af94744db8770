"""Choose a plan where a model is about to train: rank 0 searches, every rank takes its answer."""

from __future__ import annotations

import logging
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from turbo_compile.costing import cost_of_model
from turbo_compile.dtypes import WORDS
from turbo_compile.errors import RankError, TurboCompileError
from turbo_compile.plans.candidates import said
from turbo_compile.plans.cluster import cluster_of_device, load_cluster
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.search import Request, SearchResult, describe, plan_of, search

_LOG = logging.getLogger("turbo_compile")
_SEQ = 4096  # tokens a row where no example says


def choose_plan(
    model: PreTrainedModel, cluster: str | PathLike[str] | None, example: dict[str, Any] | None, base: Plan
) -> Plan:
    """The fastest plan for all ranks of the process group that the cost model finds, and the same on each.

    A step is one call like `example`, which holds the rows a rank passes alone, or one row of 4096 tokens. `cluster`
    None: the file for the accelerator at hand. What `base` says is kept.

    Raises:
        PlanError: there is no such cluster, or no plan fits.
        RankError: on the other ranks, with the reason of rank 0.
    """
    answer: list[Any] = [None, ""]
    error: TurboCompileError | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = _searched(model, cluster, example, base).to_dict()
        except TurboCompileError as raised:
            error, answer[1] = raised, str(raised)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(answer)
    if error is not None:
        raise error
    if answer[0] is None:
        raise RankError(f"rank 0 found no plan: {answer[1]}")
    return Plan.of(answer[0])


def _searched(
    model: PreTrainedModel, cluster: str | PathLike[str] | None, example: dict[str, Any] | None, base: Plan
) -> Plan:
    found = load_cluster(cluster) if cluster is not None else cluster_of_device(torch.cuda.get_device_name())
    rows, seq = _shape(model, example)
    world = dist.get_world_size()
    cost = cost_of_model(model, WORDS.get(base.dtype.compute, model.dtype))
    request = Request(gpus=world, global_batch=rows * world, seq=seq, fixed=said(base))
    result = search(cost, found, request, base)
    _LOG.warning(_told(result))  # a level that is seen where nobody configured logging
    asked = {"model": cost.name, "cluster": found.name, "memory": request.memory}
    return plan_of(result.best, cost, base, asked)


def _told(result: SearchResult) -> str:
    best = result.best.prediction
    ties = len(result.ties) - 1
    return (
        f"plan: {describe(result.best)}; {best.step_s:.3g} s a step of {result.request.global_batch} rows of "
        f"{result.request.seq} tokens and {best.peak_bytes / 2**30:.3g} GiB predicted on {result.cluster}, best of "
        f"{result.considered:,}" + (f", {ties} within the model's error" if ties else "")
    )


def _shape(model: PreTrainedModel, example: dict[str, Any] | None) -> tuple[int, int]:
    ids = (example or {}).get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 2:
        return ids.shape[0], ids.shape[1]
    return 1, min(_SEQ, getattr(model.config.get_text_config(), "max_position_embeddings", _SEQ) or _SEQ)
