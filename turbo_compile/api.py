"""`turbo_compile(model, plan)`: the whole story."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from turbo_compile.capture import Signature, capture
from turbo_compile.differentiate import differentiate
from turbo_compile.dtypes import Dtypes, choose_dtypes
from turbo_compile.errors import PlanError, TurboCompileError
from turbo_compile.huggingface import block_modules, expert_counts, mask_reader, refuse_own_positions
from turbo_compile.ir.dump import Dump, open_dump
from turbo_compile.ir.mesh import build_axes, ensure_process_group
from turbo_compile.ir.placement import layouts
from turbo_compile.ir.program import StepProgram
from turbo_compile.ir.runner import run
from turbo_compile.lower import BACKENDS, Executable, lower
from turbo_compile.parameters import shard_parameters
from turbo_compile.passes import forward_passes, step_passes
from turbo_compile.planning import choose_plan
from turbo_compile.plans.plan import Plan, PlanLike, check_supported, environment
from turbo_compile.plans.values import divisors, listed
from turbo_compile.ranks import first_rank_first
from turbo_compile.runtime import Runtime, attach, is_compiled
from turbo_compile.structure import Structure


def turbo_compile(
    model: PreTrainedModel,
    plan: PlanLike = "auto",
    *,
    cluster: str | PathLike[str] | None = None,
    example: dict[str, Any] | None = None,
    backend: str = "inductor",
    dump: str | PathLike[str] | None = None,
) -> PreTrainedModel:
    """Compile `model`, in place, to train in parallel under `plan`; returns the same object.

    Every rank calls it with the same model. Each then passes its own rows: `out.loss` is the mean over all valid tokens
    of the global batch, and `out.loss.backward()` leaves every trainable parameter a DTensor gradient.

    Args:
        model: a `PreTrainedModel` with weights on a device, or on meta.
        plan: a `Plan`, a nested dict, the path of a YAML file, or "auto": the plan a search finds for `cluster`, or
            for the accelerator at hand; on a CPU without `cluster`, fsdp over all ranks.
        cluster: the cluster "auto" plans for: a name that comes with the package, or a file that calibrate wrote.
        example: keyword arguments of a first call, to plan and to compile for before training starts.
        backend: "inductor", or "eager" to interpret the program (debugging).
        dump: a directory for the program after every pass.

    Raises:
        PlanError: the plan does not fit the model or the world.
        CaptureError: the model cannot be captured; names its line.
    """
    _check(model, backend)
    device = _device(model)
    ensure_process_group(device)
    if plan == "auto" and (cluster is not None or device.type == "cuda"):
        plan = choose_plan(model, cluster, example, _resolve({}, model))
    plan = _resolve(plan, model)
    axes = build_axes(plan.mesh, device)
    blocks = tuple(block_modules(model))
    step_passes(plan, blocks)  # a range that names no block is an error now, not at the first call
    check_experts(model, plan)
    refuse_own_positions(model)
    dtypes = choose_dtypes(model, plan.dtype)
    shapes = {name: (p.shape, dtypes.master[name]) for name, p in model.named_parameters()}
    placed = layouts(plan, shapes, tuple(expert_counts(model)) if plan.mesh.ep > 1 else ())
    stages = open_dump(dump, plan, axes.rank)

    def build(signature: Signature) -> Executable:
        return lowered(trace(model, plan, signature, dtypes, device, stages))

    def lowered(step: StepProgram) -> Executable:
        made: list[Executable] = []
        first_rank_first(lambda: made.append(lower(step, axes, placed, dtypes.reduce, pending, backend)))
        return made[-1]

    dead = list(model.parameters())
    pending: dict[str, torch.Tensor] = {}
    sharded = shard_parameters(model, axes, placed, dtypes.master)
    runtime = Runtime(model, plan, Structure.of(model), sharded, build, _vocabulary(model), dtypes.reduce, pending)
    runtime.mask_reader = mask_reader(model)
    attach(runtime, dead)
    if example is not None:
        model(**example)
    return model


def trace(
    model: PreTrainedModel, plan: Plan, signature: Signature, dtypes: Dtypes, device: torch.device, dump: Dump | None
) -> StepProgram:
    """What a call of `signature` computes under `plan`, after every pass, before it is lowered: needs no weights.

    `dtypes` are those of the model as it came, before its weights became masters.
    """
    program = capture(model, signature, dtypes.compute, device)
    run(forward_passes(plan), program, dump=dump)
    step = differentiate(program, signature.differentiated)
    run(step_passes(plan, program.blocks), step, dump=dump)
    return step


def _check(model: Any, backend: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TurboCompileError(f"turbo_compile takes a transformers PreTrainedModel, not {type(model).__name__}")
    if is_compiled(model):
        raise TurboCompileError("the model is already compiled; make a new one to compile it under another plan")
    if model.get_output_embeddings() is None:
        raise TurboCompileError(
            f"turbo_compile trains language models, and {type(model).__name__} has no language-model head; "
            "load the checkpoint with AutoModelForCausalLM"
        )
    for name in ("forward", "_loss_function"):
        if name in model.__dict__:
            raise TurboCompileError(
                f"the model has a {name.strip('_')} of its own, which a captured program would not run; "
                "remove it, or compute your loss from the logits"
            )
    if backend not in BACKENDS:
        raise TurboCompileError(f"backend={backend!r} is unknown; it can be {' or '.join(BACKENDS)}")


def check_experts(model: PreTrainedModel, plan: Plan) -> None:
    """Refuse to spread experts that are not there, or not as many as divide.

    Raises:
        PlanError: the message lists the sizes that work.
    """
    if plan.mesh.ep == 1:
        return
    counts = expert_counts(model)
    if not counts:
        raise PlanError(
            f"mesh.ep={plan.mesh.ep}: {type(model).__name__} has no experts behind transformers' experts interface; "
            "ep must be 1",
            key="mesh.ep",
        )
    for fqn, count in counts.items():
        if count % plan.mesh.shard:
            raise PlanError(
                f"mesh.ep={plan.mesh.ep}: the {count} experts of {fqn} lie in shards over fsdp x sp = "
                f"{plan.mesh.shard} ranks, which does not divide them; fsdp x sp can be {listed(divisors(count))}, and "
                "dp multiplies it",
                key="mesh.ep",
            )


def _resolve(plan: PlanLike, model: PreTrainedModel) -> Plan:
    """The plan in force, each over those before: auto and what the model says, a file, the environment, an argument."""
    own: dict[str, Any] = {}
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        own["recompute"] = "full"
    if plan == "auto":
        own["mesh"] = {"fsdp": dist.get_world_size()}
    file = plan if isinstance(plan, (str, PathLike)) and plan != "auto" else None
    argument = None if isinstance(plan, (str, PathLike)) else plan
    resolved = Plan.layers(own, file, environment(), argument)
    check_supported(resolved)
    return resolved


def _device(model: PreTrainedModel) -> torch.device:
    """Where the model trains: where its weights are, or, for weights on meta, this process' accelerator or the CPU."""
    device = next(iter(model.parameters())).device
    if device.type != "meta":
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _vocabulary(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    return int(head.weight.shape[0])
