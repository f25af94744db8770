"""The plan of a command: a file, the environment and `--set key=value`, the later over the earlier."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from turbo_compile.errors import PlanError
from turbo_compile.plans.plan import Plan, environment
from turbo_compile.plans.source import Source, from_mapping


def read_plan(file: Path | None, settings: Iterable[str] = (), *, base: dict[str, Any] | None = None) -> Plan:
    """The plan that a command line asks for; `base` is what the command prefers where nobody says otherwise.

    Raises:
        PlanError: a file, variable or setting that is wrong.
    """
    return Plan.layers(base, file, environment(), *(_setting(text) for text in settings))


def plan_ranks(plan: Plan, ranks: int | None) -> tuple[Plan, int]:
    """The plan and the ranks to run: a mesh that nobody gave spans the ranks, ranks that nobody gave fill the mesh."""
    world = ranks or launched()
    if world is None:
        return plan, plan.mesh.world
    if not any(plan.origins[f"mesh.{axis}"] != "default" for axis in ("dp", "fsdp", "sp", "ep")):
        plan = Plan.layers(plan, Source({"mesh": {"fsdp": world}}, {"mesh.fsdp": "--ranks"}))
    plan.mesh.check_world(world)
    return plan, world


def read_fixed(texts: Iterable[str]) -> dict[str, Any]:
    """`ep=8,sp=4` as a mapping, from one text or several.

    Raises:
        PlanError: it is not written so, or fixes one thing twice.
    """
    fixed: dict[str, Any] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, written = part.partition("=")
        if not equals or not name or not written:
            raise PlanError(f"--fix {part}: write it as name=value, for example --fix ep=8,sp=4", key="fix")
        if name in fixed:
            raise PlanError(f"--fix {part}: {name} is already fixed to {fixed[name]}", key="fix")
        try:
            fixed[name] = yaml.safe_load(written)
        except yaml.YAMLError:
            raise PlanError(f"--fix {part}: {written!r} is no value", key="fix") from None
    return fixed


def launched() -> int | None:
    """The world size that a launcher such as torchrun gave this process; None without one."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def _setting(text: str) -> Source:
    """`mesh.fsdp=8` as a source of the plan."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise PlanError(f"--set {text}: write it as key=value, for example --set mesh.fsdp=8")
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError as error:
        raise PlanError(f"--set {text}: the value is not YAML ({' '.join(str(error).split())})") from None
    section, _, name = key.partition(".")
    return from_mapping({section: {name: value} if name else value}, f"--set {key}")
