"""A plan: every decision of a parallel training run, as data that can be read, saved and compared.

    Plan(mesh={"fsdp": 2}, dtype={"compute": "bf16"})                   # nested dicts, checked key by key
    Plan.of("plan.yaml")                                                # or a file
    Plan.layers(defaults, "plan.yaml", environment(), argument)         # or several sources: the later wins

`plan.origins` says which source each value came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from turbo_compile.errors import PlanError
from turbo_compile.plans.ranges import check_ranged
from turbo_compile.plans.sections import Batch, DType, Experts, Mesh, ParameterRule, Schedule, Sequence
from turbo_compile.plans.source import Source, from_environment, from_file, from_mapping, located, merge
from turbo_compile.plans.values import (
    FrozenMap,
    check_keys,
    check_mapping,
    check_name,
    check_number,
    check_whole,
    check_word,
    listed,
    suggest,
)

# With the sections, so that one import serves whoever writes a plan in code.
__all__ = [
    "Batch",
    "DType",
    "Experts",
    "Mesh",
    "ParameterRule",
    "Plan",
    "Schedule",
    "Sequence",
    "check_supported",
    "environment",
]

RECOMPUTE = ("none", "selective", "full")
FUSIONS = (
    "attention",
    "linear_cross_entropy",
    "grouped_experts",
    "expert_exchange",
    "attention_exchange",
    "merged_linears",
)
FUSED = ("linear_cross_entropy", "grouped_experts")  # those that have a pass

PlanLike: TypeAlias = "Plan | Mapping[str, Any] | str | PathLike[str]"
S = TypeVar("S")


@dataclass(frozen=True, slots=True, init=False)
class Plan:
    """Every decision. The constructor takes these fields by name, sections as nested dicts or as their classes.

    Raises:
        PlanError: an unknown key, or a value that cannot be; it names the key, its place and what would work.
    """

    mesh: Mesh = Mesh()
    batch: Batch = Batch()
    dtype: DType = DType()
    parameters: Mapping[str, ParameterRule] = FrozenMap()  # module-path glob -> rule; of several that match, the last
    replicate_below: int = 0  # bytes: smaller parameters are Replicate
    recompute: str | Mapping[str, str] = "none"  # one word, or block FQN or inclusive range of them -> word
    schedule: Schedule = Schedule()
    experts: Experts = Experts()
    sequence: Sequence = Sequence()
    fuse: str | tuple[str, ...] = "auto"
    expected: Mapping[str, float] | None = None  # what the search predicted: step_s, peak_gib, exposed_comm_s
    found_by: Mapping[str, Any] | None = None  # what the search was asked: model, cluster, memory, fix
    origins: Mapping[str, str] = field(init=False, compare=False, repr=False)  # dotted key -> where it came from

    def __init__(self, **values: Any) -> None:
        check_keys("", values, _DEFAULTS)
        for name, default in _DEFAULTS.items():
            object.__setattr__(self, name, _READERS[name](name, values.get(name, default)))
        _check_batch(self.batch, self.mesh)
        given = from_mapping(_plain(values), "argument")
        object.__setattr__(self, "origins", _origins(self, given))

    @classmethod
    def of(cls, value: PlanLike) -> Plan:
        """A plan from a plan, a nested dict or the path of a YAML file."""
        return value if isinstance(value, Plan) else cls.layers(_source(value))

    @classmethod
    def layers(cls, *sources: PlanLike | Source | None) -> Plan:
        """One plan from several sources, each over those before it; what none of them says is the default.

        Sections and `parameters` merge key by key; any other value replaces the whole. A `Plan` gives the values that
        were written when it was made, not its defaults. None is no source.
        """
        merged = merge([_source(source) for source in sources if source is not None], _MERGED)
        try:
            check_keys("", merged.values, _DEFAULTS)
            plan = cls(**merged.values)
        except PlanError as error:
            raise located(error, merged.origins) from None
        object.__setattr__(plan, "origins", _origins(plan, merged))
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Every value, defaults included, as plain nested data; `found_by` only if a search found the plan."""
        values = {name: _data(getattr(self, name)) for name in _DEFAULTS}
        if self.found_by is None:
            del values["found_by"]
        return values

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120)

    def save(self, path: str | PathLike[str]) -> None:
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


def environment(environ: Mapping[str, str] | None = None) -> Source:
    """The layer that `TURBO_COMPILE_MESH_FSDP=2` and its like make."""
    return from_environment(os.environ if environ is None else environ, _KEYS, _MERGED)


def check_supported(plan: Plan) -> None:
    """Refuse what a plan can say and this version cannot do yet."""
    if plan.experts.capacity != "exact":
        raise PlanError("experts.capacity: this version supports only exact", key="experts.capacity")
    for name in () if plan.fuse == "auto" else plan.fuse:
        if name not in FUSIONS:
            raise PlanError(f"fuse lists {name!r}{suggest(name, FUSIONS)}", key="fuse")
        if name not in FUSED:
            raise PlanError(f"fuse lists {name!r}: this version supports only {listed(FUSED, 'and')}", key="fuse")
    for glob, rule in plan.parameters.items():
        if rule.dim not in (None, 0):
            key = f"parameters.{glob}.placement"
            raise PlanError(f"{key}={rule.placement}: this version supports only Shard(0) and Replicate", key=key)


def _section(kind: type[S]) -> Callable[[str, object], S]:
    """The reader of one section: an instance of `kind`, or a mapping of its fields."""
    field_of = {_spelled(each.name): each.name for each in fields(kind)}  # type: ignore[arg-type]

    def read(key: str, value: object) -> S:
        if isinstance(value, kind):
            return value
        given = check_mapping(key, value)
        check_keys(key, given, field_of)
        return kind(**{field_of[name]: each for name, each in given.items()})

    return read


def _parameters(key: str, value: object) -> FrozenMap[ParameterRule]:
    rules = {}
    for glob, rule in check_mapping(key, value).items():
        where = f"{key}.{check_name(key, glob)}"
        try:
            rules[glob] = _read_rule(where, rule)
        except PlanError as error:
            if error.key.startswith(where):
                raise
            raise PlanError(f"{where}: {error}", key=f"{where}.{error.key}") from None
    return FrozenMap(rules)


def _recompute(key: str, value: object) -> str | FrozenMap[str]:
    return check_ranged(key, value, lambda at, word: check_word(at, word, RECOMPUTE))


def _fuse(key: str, value: object) -> str | tuple[str, ...]:
    if value == "auto":
        return "auto"
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise PlanError(f"{key} must be auto or a list of fusion names, not {value!r}", key=key)
    if twice := {name for name in value if value.count(name) > 1}:
        raise PlanError(f"{key} lists {listed(sorted(twice), 'and')} more than once", key=key)
    return tuple(value)


def _expected(key: str, value: object) -> FrozenMap[float] | None:
    if value is None:
        return None
    numbers = check_mapping(key, value)
    return FrozenMap({check_name(key, name): check_number(f"{key}.{name}", each) for name, each in numbers.items()})


def _found_by(key: str, value: object) -> FrozenMap[Any] | None:
    if value is None:
        return None
    asked = check_mapping(key, value)
    check_keys(key, asked, ("model", "cluster", "memory", "fix"))
    return FrozenMap(asked)


def _check_batch(batch: Batch, mesh: Mesh) -> None:
    if batch.global_ is None or batch.micro is None:
        return
    rows = batch.micro * mesh.dp * mesh.fsdp
    if batch.global_ % rows:
        shape = f"micro x dp x fsdp = {batch.micro} x {mesh.dp} x {mesh.fsdp} = {rows}"
        raise PlanError(
            f"batch.global={batch.global_} is not a multiple of {shape}, the rows of one call", key="batch.global"
        )


def _source(value: object) -> Source:
    match value:
        case Source():
            return value
        case Plan():
            return _written(value)
        case Mapping():
            return from_mapping(_plain(value), "argument")
        case str() | PathLike():
            return from_file(value)
    raise PlanError(f"a plan is a Plan, a dict or the path of a YAML file, not {value!r}")


def _written(plan: Plan) -> Source:
    """What was written when `plan` was made, without the defaults."""
    values: dict[str, Any] = {}
    for name, value in plan.to_dict().items():
        if name in _MERGED and value:
            given = {key: each for key, each in value.items() if plan.origins[f"{name}.{key}"] != "default"}
            values |= {name: given} if given else {}
        elif plan.origins[name] != "default":
            values[name] = value
    return Source(values, {key: origin for key, origin in plan.origins.items() if origin != "default"})


def _plain(value: Any) -> Any:
    """`value` with sections as mappings of what differs from their defaults: a section's class knows no more."""
    if isinstance(value, _CLASSES):
        written = [each for each in fields(value) if getattr(value, each.name) != each.default]
        return {_spelled(each.name): _plain(getattr(value, each.name)) for each in written}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _data(value: Any) -> Any:
    if isinstance(value, _CLASSES):
        return {_spelled(each.name): _data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _data(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _origins(plan: Plan, source: Source) -> FrozenMap[str]:
    return FrozenMap({key: source.origins.get(key, "default") for key in _leaves(plan)})


def _leaves(plan: Plan) -> list[str]:
    """The dotted keys a value of `plan` can come from."""
    keys = []
    for name, value in plan.to_dict().items():
        keys += [f"{name}.{key}" for key in value] if name in _MERGED and value else [name]
    return keys


def _spelled(name: str) -> str:
    return name.rstrip("_")  # global_, since `global` is a keyword


_CLASSES = (Mesh, Batch, DType, ParameterRule, Schedule, Experts, Sequence)
_DEFAULTS = {each.name: each.default for each in fields(Plan) if each.init}
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "mesh": _section(Mesh),
    "batch": _section(Batch),
    "dtype": _section(DType),
    "parameters": _parameters,
    "replicate_below": lambda key, value: check_whole(key, value, least=0),
    "recompute": _recompute,
    "schedule": _section(Schedule),
    "experts": _section(Experts),
    "sequence": _section(Sequence),
    "fuse": _fuse,
    "expected": _expected,
    "found_by": _found_by,
}
_read_rule = _section(ParameterRule)
_MERGED = frozenset({"mesh", "batch", "dtype", "parameters", "schedule", "experts", "sequence"})
_KEYS = [*_DEFAULTS, *(key for key in _leaves(Plan()) if "." in key)]
