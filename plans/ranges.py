"""Names of blocks and modules in a plan: inclusive ranges such as `model.layers.0-31`, and globs over module paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from turbo_compile.errors import PlanError
from turbo_compile.plans.values import FrozenMap, check_name, listed, suggest

T = TypeVar("T")

_RANGE = re.compile(r"(?P<stem>.*\.)(?P<first>\d+)-(?P<last>\d+)")
_INDEXED = re.compile(r"(?P<stem>.*\.)(?P<index>\d+)")


def check_ranged(key: str, value: object, check: Callable[[str, object], T]) -> T | FrozenMap[T]:
    """One value for all blocks, or a mapping from blocks or ranges of them to values."""
    if not isinstance(value, Mapping):
        return check(key, value)
    if not value:
        raise PlanError(f"{key} is an empty mapping; write one value for all blocks", key=key)
    for block in value:
        _check_range(check_name(key, block), key)
    return FrozenMap({block: check(f"{key}.{block}", each) for block, each in value.items()})


def resolve_ranges(
    spec: T | Mapping[str, T], names: Sequence[str], default: T | None = None, what: str = "recompute"
) -> dict[str, T]:
    """The value of each block in `names` (FQNs, in the model's order).

    `spec` is one value for all, or a mapping from a block's name or an inclusive range of them to a value. A block that
    no key covers gets `default`; where that is None, as where two keys cover one block, the plan is wrong.

    Raises:
        PlanError: a name the model does not have, a range that runs backwards, a gap or an overlap.
    """
    if not isinstance(spec, Mapping):
        return dict.fromkeys(names, spec)
    owner: dict[str, str] = {}
    for key in spec:
        for name in _expand(key, names, what):
            if name in owner:
                shared = listed(compress(sorted(_covered(owner[name], names) & _covered(key, names), key=names.index)))
                raise PlanError(f"{what}: {owner[name]} and {key} both cover {shared}; each block takes one", key=what)
            owner[name] = key
    missing = [name for name in names if name not in owner]
    if missing and default is None:
        raise PlanError(
            f"{what} says nothing of {listed(compress(missing), 'and')}; every block needs a value", key=what
        )
    return {name: spec[owner[name]] if name in owner else default for name in names}  # type: ignore[misc]


def match_globs(rules: Mapping[str, T], names: Iterable[str], what: str = "parameters") -> dict[str, T]:
    """The rule of each module path in `names` that a glob matches. Of several, the last wins; `*` crosses dots.

    Raises:
        PlanError: a glob that matches none of `names`.
    """
    found: dict[str, T] = {}
    paths = list(names)
    for glob, rule in rules.items():
        matched = [path for path in paths if fnmatchcase(path, glob)]
        if not matched:
            raise PlanError(f"{what}: {glob!r} matches no module{suggest(glob, paths)}", key=f"{what}.{glob}")
        found.update(dict.fromkeys(matched, rule))
    return found


def compress(names: Iterable[str]) -> list[str]:
    """`names` with neighbours joined: `a.0, a.1, a.2, b` becomes `a.0-2, b`."""
    runs: list[tuple[str, int, int] | str] = []
    for name in names:
        match = _INDEXED.fullmatch(name)
        if not match:
            runs.append(name)
            continue
        stem, index = match["stem"], int(match["index"])
        last = runs[-1] if runs else ""
        if isinstance(last, tuple) and last[0] == stem and last[2] == index - 1:
            runs[-1] = (stem, last[1], index)
        else:
            runs.append((stem, index, index))
    return [run if isinstance(run, str) else _spell(*run) for run in runs]


def _check_range(key: str, what: str) -> None:
    """Refuse a range that runs backwards. Anything else may be a block's name: only the model can tell."""
    match = _RANGE.fullmatch(key)
    if match and int(match["first"]) > int(match["last"]):
        better = f"{match['stem']}{match['last']}-{match['first']}"
        raise PlanError(f"{what}: the range {key} runs backwards; write {better}", key=f"{what}.{key}")


def _spell(stem: str, first: int, last: int) -> str:
    return f"{stem}{first}" if first == last else f"{stem}{first}-{last}"


def _expand(key: str, names: Sequence[str], what: str) -> list[str]:
    """The blocks `key` names, all of which the model must have."""
    _check_range(key, what)
    covered = _covered(key, names)
    match = _RANGE.fullmatch(key)
    wanted = int(match["last"]) - int(match["first"]) + 1 if match and key not in names else 1
    if len(covered) < wanted:
        has = f"its blocks are {listed(compress(names), 'and')}" if names else "it has no blocks"
        raise PlanError(f"{what}: the model has no {_absent(key, covered)}; {has}", key=f"{what}.{key}")
    return [name for name in names if name in covered]


def _covered(key: str, names: Sequence[str]) -> set[str]:
    match = _RANGE.fullmatch(key)
    if key in names or not match:
        return {key} & set(names)
    first, last = int(match["first"]), int(match["last"])
    indexed = {name: _INDEXED.fullmatch(name) for name in names}
    return {
        name for name, at in indexed.items() if at and at["stem"] == match["stem"] and first <= int(at["index"]) <= last
    }


def _absent(key: str, covered: set[str]) -> str:
    """The part of `key` that the model does not have, spelled out only as far as a person would read."""
    match = _RANGE.fullmatch(key)
    if not match or not covered:
        return key
    held = {int(name.removeprefix(match["stem"])) for name in covered}
    beyond = max(held) + 1
    inside = [f"{match['stem']}{index}" for index in range(int(match["first"]), beyond) if index not in held]
    after = [_spell(match["stem"], beyond, int(match["last"]))] if beyond <= int(match["last"]) else []
    return listed([*compress(inside), *after])
