"""Read plan values from files, the environment and mappings, and remember where each one was written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import yaml
from yaml.reader import ReaderError

from turbo_compile.errors import PlanError
from turbo_compile.plans.values import check_mapping, suggest

_PREFIX = "TURBO_COMPILE_"
_NOT_PLAN = frozenset({"TURBO_COMPILE_CACHE", "TURBO_COMPILE_DUMP"})  # of this package, but no plan values
_DEEPEST = 8  # a plan nests three deep; a file that goes further is no plan, or refers to itself


@dataclass(frozen=True, slots=True)
class Source:
    """Nested plan values from one place, and for each dotted key the words that say where it was written."""

    values: Mapping[str, object]
    origins: Mapping[str, str]


def from_mapping(values: Mapping[str, object], origin: str) -> Source:
    return Source(values, dict.fromkeys(_dotted(values), origin))


def from_file(path: str | PathLike[str]) -> Source:
    """The values of a YAML file, each with its line.

    Raises:
        PlanError: no such file, not YAML, not a mapping, or a key written twice; it names the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(f"cannot read the plan file {path}: {reason}") from None
    values, lines = _parse(text, str(path))
    if values is None:
        return Source({}, {})
    if not isinstance(values, Mapping):
        raise PlanError(f"{path}:1: a plan is a mapping of keys to values, not {values!r}")
    return Source(values, {key: f"{path}:{line}" for key, line in lines.items()})


def from_environment(environ: Mapping[str, str], keys: Collection[str], sections: Collection[str]) -> Source:
    """Values of the variables `TURBO_COMPILE_` + a key of `keys` in capitals, its dots as underscores; parsed as YAML.

    Raises:
        PlanError: a variable of that prefix that is no key, or a value that is not YAML.
    """
    key_of = {_PREFIX + key.upper().replace(".", "_"): key for key in keys}
    sources = []
    # Sorted, so that a whole section (..._MESH) comes before its own keys (..._MESH_FSDP), which then win.
    for variable in sorted(name for name in environ if name.startswith(_PREFIX) and name not in _NOT_PLAN):
        if variable not in key_of:
            raise PlanError(f"the environment variable {variable} names no plan key{suggest(variable, key_of)}")
        section, _, name = key_of[variable].partition(".")
        value, _ = _parse(environ[variable], variable)
        sources.append(from_mapping({section: {name: value} if name else value}, variable))
    return merge(sources, sections)


def merge(sources: Iterable[Source], sections: Collection[str]) -> Source:
    """All `sources` in one, the later over the earlier: key by key inside `sections`, as a whole elsewhere."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for source in sources:
        for key, value in source.values.items():
            if key in sections:
                held, new = _section(key, values.get(key, {}), origins), _section(key, value, source.origins)
                kept = {name: old for name, old in held.items() if name not in new}
                values[key] = {**kept, **new}  # what is written again moves to the end, where later globs win
                replaced = [f"{key}.{name}" for name in new]
            else:
                values[key] = value
                replaced = [str(key)]
            for stale in [at for at in origins if any(at == top or at.startswith(f"{top}.") for top in replaced)]:
                del origins[stale]
        origins.update(source.origins)
    return Source(values, origins)


def located(error: PlanError, origins: Mapping[str, str]) -> PlanError:
    """`error`, with the place in front that its key, or the nearest key around it, was written in."""
    key = error.key
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    origin = origins.get(key, "argument")
    return error if origin == "argument" else PlanError(f"{origin}: {error}", key=error.key)


def _section(key: str, value: object, origins: Mapping[str, str]) -> Mapping[str, object]:
    try:
        return check_mapping(key, value)
    except PlanError as error:
        raise located(error, origins) from None


def _dotted(values: Mapping[str, object], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def _parse(text: str, where: str) -> tuple[object, dict[str, int]]:
    """The value YAML `text` stands for, and the line of each dotted key in it."""
    lines: dict[str, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return (None if node is None else _build(node, "", lines, loader, depth=1)), lines
    except ReaderError as error:
        raise PlanError(f"{where}: not text: character {error.position + 1} is unprintable") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = " (quote a value that begins with *)" if "alias" in str(error) else ""
        raise PlanError(f"{where}{line}: bad YAML: {error.problem}{hint}") from None


def _build(node: yaml.Node, prefix: str, lines: dict[str, int], loader: yaml.SafeLoader, depth: int) -> object:
    """The value of `node`, whose keys lie under the dotted `prefix`; their lines are added to `lines`."""
    if depth > _DEEPEST:
        raise _refusal(node, "nested too deep for a plan")
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        values: dict[object, object] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal(key_node, "a key must be one word")
            key = f"{prefix}{key_node.value}"
            if key in lines:
                raise _refusal(key_node, f"{key} is written twice (first on line {lines[key]})")
            lines[key] = key_node.start_mark.line + 1
            values[_build(key_node, key, lines, loader, depth + 1)] = _build(child, f"{key}.", lines, loader, depth + 1)
        return values
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_build(child, f"{prefix}{index}.", lines, loader, depth + 1) for index, child in enumerate(node.value)]
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # 2020-99-99 looks like a date and is none
        raise _refusal(node, f"{node.value!r}: {error}") from None


def _refusal(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
