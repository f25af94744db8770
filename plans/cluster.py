"""A cluster, as numbers with their sources: what an accelerator reaches, and what each level of its network carries.

    load_cluster("h200")              # one of the shipped files, plans/clusters/*.yaml
    load_cluster("my-cluster.yaml")   # or a file, as `turbo-compile calibrate` writes it

In a file every number stands with where it came from: `hbm_bytes_per_s: {value: 4.8e+12, source: NVIDIA datasheet}`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from turbo_compile.errors import PlanError
from turbo_compile.plans.values import FrozenMap, check_keys, check_mapping, listed, suggest

DIRECTORY = Path(__file__).parent / "clusters"
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. Rates are per second, times in seconds, efficiencies fractions of a peak.

    A matmul runs in waves of tiles over `units` multiprocessors at no more than `matmul_efficiency` of the peak; flash
    attention at no more than `attention_efficiency` forward and `attention_backward_efficiency` backward, nearing them
    as the row grows past `attention_half_length`. `dispatch_s` is what the host needs for one eager operator,
    `launch_s` for one kernel of compiled code.
    """

    name: str
    flop_per_s: Mapping[str, float]  # by dtype, dense
    hbm_bytes: float
    usable_bytes: float  # what an allocator can get: less than hbm_bytes
    hbm_bytes_per_s: float
    units: int
    matmul_efficiency: float
    memory_efficiency: float
    attention_efficiency: float
    attention_backward_efficiency: float
    attention_half_length: float
    dispatch_s: float
    launch_s: float
    context_bytes: float  # of the driver and libraries, outside the allocator

    def peak(self, dtype: str) -> float:
        """Flop per second in `dtype`; the next wider one that the file knows, where it does not know this one."""
        wider = {"fp4": "fp8", "fp8": "bf16", "fp16": "bf16", "bf16": "fp16", "tf32": "fp32", "fp32": "fp64"}
        seen = {dtype}
        while dtype not in self.flop_per_s:
            dtype = wider.get(dtype, "")
            if not dtype or dtype in seen:
                return max(self.flop_per_s.values())
            seen.add(dtype)
        return self.flop_per_s[dtype]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network: `size` ranks reach each other at `bytes_per_s` in each direction, each.

    `efficiency` is the share a large ring collective reaches, `all_to_all_efficiency` that of an exchange; a
    collective starts after `latency_s`, and `step_s` more for each of its steps. The last level has no size.
    """

    name: str
    size: int | None
    bytes_per_s: float
    efficiency: float
    all_to_all_efficiency: float
    latency_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """An accelerator and the levels that connect it, innermost first. `sources`: dotted field -> where it came from.

    `contention` is how much slower compute runs while a collective moves data over the same memory and
    multiprocessors, as a fraction added; `notes` say what a reader of a prediction should know.
    """

    name: str
    accelerator: Accelerator
    levels: tuple[Level, ...]
    contention: float
    notes: str = ""
    sources: Mapping[str, str] = field(default_factory=FrozenMap)

    @property
    def node(self) -> int:
        """Ranks of the innermost level."""
        return self.levels[0].size or 1


# What a number may be, by field: (least, most). Past these it is a slip of the unit.
_BOUNDS: dict[str, tuple[float, float]] = {
    "flop_per_s": (1e8, 1e18),
    "hbm_bytes": (2**28, 2**50),
    "usable_bytes": (2**28, 2**50),
    "hbm_bytes_per_s": (1e8, 1e15),
    "units": (1, 1e5),
    "matmul_efficiency": (0.01, 1.0),
    "memory_efficiency": (0.01, 1.0),
    "attention_efficiency": (0.001, 1.0),
    "attention_backward_efficiency": (0.001, 1.0),
    "attention_half_length": (0.0, 1e6),
    "dispatch_s": (0.0, 0.1),
    "launch_s": (0.0, 0.1),
    "context_bytes": (0.0, 2**40),
    "size": (1, 1e7),
    "bytes_per_s": (1e5, 1e14),
    "efficiency": (0.001, 1.0),
    "all_to_all_efficiency": (0.001, 1.0),
    "latency_s": (0.0, 1.0),
    "step_s": (0.0, 1.0),
    "contention": (0.0, 5.0),
}
_WHOLE = ("units", "size")


def cluster_names() -> tuple[str, ...]:
    """The clusters that come with the package."""
    return tuple(sorted(path.stem for path in DIRECTORY.glob("*.yaml")))


@cache
def _shipped(name: str) -> Cluster:
    return _read(DIRECTORY / f"{name}.yaml")


def load_cluster(name: str | PathLike[str]) -> Cluster:
    """The cluster of a shipped name, or of a file.

    Raises:
        PlanError: there is no such cluster (lists those there are), or a number in the file cannot be (names it).
    """
    if str(name) in cluster_names():
        return _shipped(str(name))
    path = Path(name)
    if not path.is_file():
        known = cluster_names()
        raise PlanError(
            f"there is no cluster {str(name)!r}{suggest(name, known)}; give one of {listed(known)}, or a cluster file",
            key="cluster",
        )
    return _read(path)


def cluster_of_device(device: str) -> Cluster:
    """The shipped cluster of an accelerator by its driver's name for it, as `NVIDIA H100 80GB HBM3`; else `generic`."""
    words = device.lower().replace("-", " ").split()
    for name in sorted(cluster_names(), key=len, reverse=True):  # the more special first
        if all(word in words for word in name.split("-")):
            return _shipped(name)
    warnings.warn(
        f"there is no cluster file for {device!r}: plans are priced as for a generic accelerator; "
        "`turbo-compile calibrate` measures this one, and cluster= takes the file it writes",
        stacklevel=2,
    )
    return _shipped("generic")


def save_cluster(cluster: Cluster, path: str | PathLike[str]) -> None:
    """Write `cluster` as a file that `load_cluster` reads back equal."""
    text = yaml.safe_dump(_data(cluster), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    Path(path).write_text(text, encoding="utf-8")


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Cluster:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise PlanError(f"cluster file {path} cannot be read: {error}", key="cluster") from None
    sources: dict[str, str] = {}
    try:
        return _cluster(data, sources)
    except PlanError as error:
        raise PlanError(f"cluster file {path}: {error}", key=error.key) from None


def _cluster(data: object, sources: dict[str, str]) -> Cluster:
    given = _section("", data, ("name", "accelerator", "levels", "contention"), ("notes",))
    device = _section("accelerator", given["accelerator"], [each.name for each in fields(Accelerator)])
    values: dict[str, Any] = {"name": _text("accelerator.name", device["name"])}
    for key in device:
        if key == "flop_per_s":
            peaks = check_mapping("accelerator.flop_per_s", device[key])
            check_keys("accelerator.flop_per_s", peaks, DTYPES)
            if not peaks:
                raise PlanError("accelerator.flop_per_s names no dtype", key="accelerator.flop_per_s")
            numbers = {dtype: _number(f"accelerator.{key}.{dtype}", key, peaks[dtype], sources) for dtype in peaks}
            values[key] = FrozenMap(numbers)
        elif key != "name":
            values[key] = _number(f"accelerator.{key}", key, device[key], sources)
    if values["usable_bytes"] > values["hbm_bytes"]:
        raise PlanError(
            f"accelerator.usable_bytes={values['usable_bytes']:g} is more than hbm_bytes={values['hbm_bytes']:g}",
            key="accelerator.usable_bytes",
        )
    contention = _number("contention", "contention", given["contention"], sources)
    levels = _levels(given["levels"], sources)
    notes = _text("notes", given.get("notes", ""))
    return Cluster(_text("name", given["name"]), Accelerator(**values), levels, contention, notes, FrozenMap(sources))


def _levels(data: object, sources: dict[str, str]) -> tuple[Level, ...]:
    if not isinstance(data, list) or not data:
        raise PlanError("levels must be a list of network levels, innermost first", key="levels")
    levels = []
    for index, each in enumerate(data):
        where = f"levels.{index}"
        given = _section(where, each, [each.name for each in fields(Level)])
        values: dict[str, Any] = {"name": _text(f"{where}.name", given["name"])}
        for key in given:
            if key == "size" and given[key] is None:
                values[key] = None
            elif key != "name":
                values[key] = _number(f"{where}.{key}", key, given[key], sources)
        levels.append(Level(**values))
    for inner, outer in itertools.pairwise(levels):
        if inner.size is None or (outer.size is not None and outer.size <= inner.size):
            raise PlanError(f"levels: {outer.name} must hold more ranks than {inner.name} inside it", key="levels")
    if levels[-1].size is not None:
        raise PlanError(f"levels: the last, {levels[-1].name}, must have size null: it holds the rest", key="levels")
    return tuple(levels)


def _section(where: str, data: object, needed: Any, optional: tuple[str, ...] = ()) -> Mapping[str, Any]:
    given = check_mapping(where or "a cluster", data)
    check_keys(where or "a cluster", given, (*needed, *optional))
    if missing := [key for key in needed if key not in given]:
        dotted = f"{where}.{missing[0]}" if where else missing[0]
        raise PlanError(f"{dotted} is missing", key=dotted)
    return given


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{where} must be text, not {value!r}", key=where)
    return value


def _number(where: str, name: str, data: object, sources: dict[str, str]) -> float | int:
    given = _section(where, data, ("value", "source"))
    value = given["value"]
    if isinstance(value, str):
        raise PlanError(f"{where} must be a number, not {value!r}; YAML wants 9.9e+14, with point and sign", key=where)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise PlanError(f"{where} must be a number, not {value!r}", key=where)
    least, most = _BOUNDS[name]
    if not least <= value <= most:
        raise PlanError(f"{where}={value:g} cannot be: it must lie between {least:g} and {most:g}", key=where)
    if name in _WHOLE and value != int(value):
        raise PlanError(f"{where}={value:g} must be a whole number", key=where)
    sources[where] = _text(f"{where}.source", given["source"])
    return int(value) if name in _WHOLE else float(value)


# --- writing ----------------------------------------------------------------------------------------------------------


def _data(cluster: Cluster) -> dict[str, Any]:
    def number(where: str, value: float) -> dict[str, Any]:
        return {"value": value, "source": cluster.sources.get(where, "not stated")}

    device: dict[str, Any] = {}
    for each in fields(Accelerator):
        value = getattr(cluster.accelerator, each.name)
        where = f"accelerator.{each.name}"
        if each.name == "name":
            device[each.name] = value
        elif each.name == "flop_per_s":
            device[each.name] = {dtype: number(f"{where}.{dtype}", peak) for dtype, peak in value.items()}
        else:
            device[each.name] = number(where, value)
    levels = []
    for index, level in enumerate(cluster.levels):
        entry: dict[str, Any] = {}
        for each in fields(Level):
            value = getattr(level, each.name)
            plain = each.name == "name" or value is None
            entry[each.name] = value if plain else number(f"levels.{index}.{each.name}", value)
        levels.append(entry)
    contention = number("contention", cluster.contention)
    data = {"name": cluster.name, "accelerator": device, "levels": levels, "contention": contention}
    return data | ({"notes": cluster.notes} if cluster.notes else {})
