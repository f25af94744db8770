"""What a search may choose between: meshes, micro-batches and schedules, as far as the engine can run them.

A choice that cannot be is counted under the rule that forbids it, so that an explanation can say why it was not tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turbo_compile.errors import PlanError
from turbo_compile.plans.cost import ModelCost
from turbo_compile.plans.plan import RECOMPUTE, Plan
from turbo_compile.plans.sections import Mesh
from turbo_compile.plans.values import (
    FrozenMap,
    check_bool,
    check_keys,
    check_number,
    check_whole,
    check_word,
    divisors,
    listed,
)

AXES = ("dp", "fsdp", "sp", "ep")
PREFETCH = (0, 1, 2)
RESHARD = (True, False)
KEYS = {axis: f"mesh.{axis}" for axis in AXES} | {  # where a plan has what a search chooses
    "micro": "batch.micro",
    "recompute": "recompute",
    "reshard": "schedule.reshard",
    "prefetch": "schedule.prefetch",
}
FIXABLE = (*AXES, "micro", "recompute", "reshard", "prefetch")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a search: `gpus` ranks, `global_batch` rows of `seq` tokens a step.

    `memory` is the share of what an allocator can get that a plan may reserve. `fixed` holds choices already made:
    dp, fsdp, sp, ep, micro, prefetch (numbers), recompute (a word), reshard (true or false).

    Raises:
        PlanError: a value that cannot be, or a name in `fixed` that is not one of those.
    """

    gpus: int
    global_batch: int
    seq: int
    memory: float = 0.92
    fixed: Mapping[str, Any] = FrozenMap()

    def __post_init__(self) -> None:
        check_whole("gpus", self.gpus, least=1)
        check_whole("global_batch", self.global_batch, least=1)
        check_whole("seq", self.seq, least=1)
        if not 0 < check_number("memory", self.memory) <= 1:
            raise PlanError(f"memory must be a share between 0 and 1, not {self.memory!r}", key="memory")
        check_keys("fix", self.fixed, FIXABLE)
        for name, value in self.fixed.items():
            key = f"fix.{name}"
            if name == "recompute":
                check_word(key, value, RECOMPUTE)
            elif name == "reshard":
                check_bool(key, value)
            else:
                check_whole(key, value, least=0 if name == "prefetch" else 1)
        object.__setattr__(self, "fixed", FrozenMap(self.fixed))


@dataclass(frozen=True, slots=True)
class Choice:
    """A mesh and how its ranks run: everything but which blocks recompute."""

    mesh: Mesh
    micro: int
    accumulation: int
    reshard: bool
    prefetch: int


def meshes(model: ModelCost, request: Request, refused: Counter[str]) -> Iterator[Mesh]:
    """Every mesh of the ranks that the engine can run, each once, in order of sp, then dp, then ep.

    Raises:
        PlanError: `fixed` contradicts itself, the ranks or the model, or the batch divides over no mesh.
    """
    _check_fixed(model, request)
    heads, fixed = _heads(model), request.fixed
    for sp in divisors(request.gpus):
        if fixed.get("sp", sp) != sp:
            continue
        if sp > 1 and any(count % sp for count in heads) and "sp" not in fixed:
            refused[f"sp does not divide the {listed(sorted(heads), 'and')} heads of attention"] += 1
            continue
        if request.seq % sp:
            refused[f"sp does not divide the sequence of {request.seq}"] += 1
            continue
        for dp in divisors(request.gpus // sp):
            fsdp = request.gpus // sp // dp
            if fixed.get("dp", dp) != dp or fixed.get("fsdp", fsdp) != fsdp:
                continue
            if request.global_batch % (dp * fsdp):
                refused["dp x fsdp does not divide the global batch"] += 1
                continue
            for ep in divisors(fsdp * sp) if model.experts else (1,):
                if fixed.get("ep", ep) != ep:
                    continue
                if ep > 1 and model.experts % (fsdp * sp):
                    refused[f"with ep, fsdp x sp must divide the {model.experts} experts"] += 1
                    continue
                yield Mesh(dp=dp, fsdp=fsdp, sp=sp, ep=ep)


def choices(mesh: Mesh, request: Request) -> Iterator[Choice]:
    """Every way to run a mesh: the largest micro-batch last."""
    fixed = request.fixed
    rows = request.global_batch // (mesh.dp * mesh.fsdp)
    for micro in divisors(rows):
        if fixed.get("micro", micro) != micro:
            continue
        for reshard in RESHARD if mesh.shard > 1 else RESHARD[:1]:
            if fixed.get("reshard", reshard) != reshard:
                continue
            for prefetch in (fixed["prefetch"],) if "prefetch" in fixed else PREFETCH if mesh.shard > 1 else (1,):
                yield Choice(mesh, micro, rows // micro, reshard, prefetch)


def modes(request: Request) -> tuple[str, ...]:
    """What a block may keep, from the most to the least."""
    return (request.fixed["recompute"],) if "recompute" in request.fixed else RECOMPUTE


def said(plan: Plan) -> dict[str, Any]:
    """What a search would choose and `plan` already says.

    Raises:
        PlanError: it says so block by block, which a search cannot keep.
    """
    values = {
        "dp": plan.mesh.dp,
        "fsdp": plan.mesh.fsdp,
        "sp": plan.mesh.sp,
        "ep": plan.mesh.ep,
        "micro": plan.batch.micro,
        "recompute": plan.recompute,
        "reshard": plan.schedule.reshard,
        "prefetch": plan.schedule.prefetch,
    }
    found = {name: value for name, value in values.items() if plan.origins[KEYS[name]] != "default"}
    for name in ("recompute", "reshard"):
        if isinstance(found.get(name), Mapping):
            raise PlanError(f"{KEYS[name]} by range cannot be fixed in a search; write one word for all blocks")
    return found


def _heads(model: ModelCost) -> set[int]:
    return {each.heads for segment in model.segments.values() for each in segment.attentions}


def _check_fixed(model: ModelCost, request: Request) -> None:
    """Say what contradicts, where one or two values are to blame."""
    fixed, gpus = request.fixed, request.gpus
    product = 1
    for axis in ("dp", "fsdp", "sp"):
        product *= fixed.get(axis, 1)
    named = " x ".join(f"{axis}={fixed[axis]}" for axis in ("dp", "fsdp", "sp") if axis in fixed)
    if gpus % product:
        raise _contradiction(f"{named}: {product} does not divide {gpus} GPUs; it can be {_near(gpus, product)}")
    if all(axis in fixed for axis in ("dp", "fsdp", "sp")) and product != gpus:
        raise _contradiction(f"{named} multiplies to {product}, but there are {gpus} GPUs; leave one of them out")
    sp, ep, micro = fixed.get("sp", 1), fixed.get("ep", 1), fixed.get("micro", 1)
    heads = min(_heads(model), default=1)
    if sp > heads:
        raise _contradiction(f"sp={sp}: {model.name} has {heads} heads of attention, the most sp can be")
    if request.seq % sp:
        raise _contradiction(f"sp={sp} does not divide the sequence of {request.seq} tokens")
    if ep > 1 and not model.experts:
        raise _contradiction(f"ep={ep}: {model.name} has no experts; ep must be 1")
    if ep > 1 and model.experts % ep:
        works = listed(divisors(model.experts))
        raise _contradiction(f"ep={ep} does not divide the {model.experts} experts of {model.name}; ep can be {works}")
    shard = fixed.get("fsdp", 1) * sp
    if "fsdp" in fixed and "sp" in fixed and shard % ep:
        raise _contradiction(f"ep={ep} does not divide fsdp x sp = {shard}; ep can be {listed(divisors(shard))}")
    if request.global_batch % micro:
        raise _contradiction(f"micro={micro} does not divide the global batch of {request.global_batch} rows")


def _contradiction(what: str) -> PlanError:
    return PlanError(f"--fix {what}", key="fix")


def _near(number: int, wanted: int) -> str:
    """The divisors of `number` around `wanted`."""
    works = sorted(divisors(number), key=lambda size: abs(size - wanted))[:6]
    return listed(sorted(works))
