"""The sections of a plan: frozen dataclasses that hold only values that can be, in the order a file has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from turbo_compile.errors import PlanError
from turbo_compile.plans.ranges import check_ranged
from turbo_compile.plans.values import check_bool, check_whole, check_word, divisors, listed, suggest

FLOATS = ("bf16", "fp16", "fp32", "fp64")
AXES = ("shard", "ep", "edp")  # what a parameter can be sharded over; shard is fsdp x sp


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the mesh axes. Rank order is dp, fsdp, sp, fastest last; ep folds over contiguous ranks of fsdp x sp."""

    dp: int = 1
    fsdp: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "fsdp", "sp", "ep"):
            check_whole(f"mesh.{axis}", getattr(self, axis), least=1)
        if self.shard % self.ep:
            works = listed(divisors(self.shard))
            raise PlanError(
                f"mesh.ep={self.ep} does not divide fsdp x sp = {self.shard}; ep can be {works}", key="mesh.ep"
            )

    @property
    def world(self) -> int:
        return self.dp * self.fsdp * self.sp

    @property
    def shard(self) -> int:
        """Ranks that dense parameters are sharded over."""
        return self.fsdp * self.sp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts, and shard them among themselves."""
        return self.shard // self.ep

    def check_world(self, ranks: int) -> None:
        """Refuse a mesh that does not span exactly `ranks` ranks, saying which sizes would."""
        if self.world == ranks:
            return
        sizes = f"dp={self.dp} x fsdp={self.fsdp} x sp={self.sp}"
        raise PlanError(
            f"the mesh {sizes} multiplies to {self.world}, but the world has {ranks} ranks; "
            f"{listed(self._sizes_for(ranks))} would work, or starting {self.world} ranks",
            key="mesh",
        )

    def _sizes_for(self, ranks: int) -> list[str]:
        """Changes that make the mesh span `ranks`: of one size if one is enough."""
        works = []
        for axis in ("fsdp", "dp", "sp"):
            rest = self.world // getattr(self, axis)
            shard = self.shard if axis == "dp" else ranks // self.dp
            if ranks % rest == 0 and shard % self.ep == 0:
                works.append(f"{axis}={ranks // rest}")
        ep = "" if ranks % self.ep == 0 else ", ep=1"
        return works or [f"fsdp={ranks} with dp=1, sp=1{ep}"]


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch the plan is for, in rows and tokens; None: what the caller passes. `global_` is `global` in files."""

    global_: int | None = None
    micro: int | None = None
    seq: int | None = None
    shapes: str = "dynamic"

    def __post_init__(self) -> None:
        for name, value in (("global", self.global_), ("micro", self.micro), ("seq", self.seq)):
            if value is not None:
                check_whole(f"batch.{name}", value, least=1)
        check_word("batch.shapes", self.shapes, ("dynamic", "static"))


@dataclass(frozen=True, slots=True)
class DType:
    """dtype words. `model`: the one the weights came in. `auto`: fp32, or fp64 for an fp64 model."""

    compute: str = "model"
    reduce: str = "auto"
    master: str = "model"

    def __post_init__(self) -> None:
        check_word("dtype.compute", self.compute, ("model", *FLOATS))
        check_word("dtype.reduce", self.reduce, ("auto", *FLOATS))
        check_word("dtype.master", self.master, ("model", *FLOATS))


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """How the parameters of the modules a glob matches lie on a mesh axis."""

    placement: str = "Shard(0)"
    axis: str = "shard"

    def __post_init__(self) -> None:
        parse_placement(self.placement)
        check_word("axis", self.axis, AXES)

    @property
    def dim(self) -> int | None:
        """The tensor dimension that is sharded; None: replicated."""
        return parse_placement(self.placement)


@dataclass(frozen=True, slots=True)
class Schedule:
    """When parameters are gathered and freed. `reshard`: free after forward, for all blocks or by range.

    `overlap`: a shared expert computes while rows travel to the others.
    """

    reshard: bool | Mapping[str, bool] = True
    prefetch: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "reshard", check_ranged("schedule.reshard", self.reshard, check_bool))
        check_whole("schedule.prefetch", self.prefetch, least=0)
        check_bool("schedule.overlap", self.overlap)


@dataclass(frozen=True, slots=True)
class Experts:
    """`exact`: sizes read to the host once a layer. `bounded`: a known bound as the size; nothing is dropped."""

    capacity: str = "exact"

    def __post_init__(self) -> None:
        check_word("experts.capacity", self.capacity, ("exact", "bounded"))


@dataclass(frozen=True, slots=True)
class Sequence:
    """Where sequence parallelism cuts: at the model's entry, or where media join the text."""

    boundary: str = "auto"

    def __post_init__(self) -> None:
        check_word("sequence.boundary", self.boundary, ("auto", "model_entry", "media_fusion"))


def parse_placement(word: object) -> int | None:
    """The tensor dimension of `Shard(0)`; None for `Replicate`."""
    match = re.fullmatch(r"Replicate|Shard\((\d+)\)", word) if isinstance(word, str) else None
    if not match:
        hint = suggest(word, ("Shard(0)", "Replicate"))
        raise PlanError(f"placement cannot be {word!r}{hint}", key="placement")
    return None if match[1] is None else int(match[1])
