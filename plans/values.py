"""What a plan's values may be: small checks that name the key at fault, and an ordered mapping that cannot change."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from turbo_compile.errors import PlanError

V = TypeVar("V")


class FrozenMap(Mapping[str, V]):
    """A mapping that keeps its order, never changes and can be hashed. Order counts in comparisons: later globs win."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        self._items: dict[str, V] = dict(items)

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def check_mapping(key: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{key} must be a mapping, not {value!r}", key=key)
    return value


def check_keys(where: str, keys: Iterable[object], known: Collection[str]) -> None:
    """Refuse the first key that is not `known`; `where` is the dotted place of the mapping, empty for the plan."""
    for key in keys:
        if key not in known:
            place = where or "a plan"
            dotted = f"{where}.{key}" if where else str(key)
            raise PlanError(f"{place} has no key {key!r}{suggest(key, known)}", key=dotted)


def check_name(where: str, name: object) -> str:
    if not isinstance(name, str):
        raise PlanError(f"{where}: a key must be a name, not {name!r}", key=where)
    return name


def check_whole(key: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise PlanError(f"{key} must be {wanted}, not {value!r}", key=key)
    return value


def check_bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{key} must be true or false, not {value!r}", key=key)
    return value


def check_number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise PlanError(f"{key} must be a number of at least 0, not {value!r}", key=key)
    return float(value)


def check_word(key: str, value: object, words: Collection[str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise PlanError(f"{key} cannot be {value!r}{suggest(value, words)}", key=key)
    return value


def suggest(wrong: object, known: Collection[str]) -> str:
    """What would work instead of `wrong`: the nearest known name, then all of them if they are few."""
    if not known:
        return "; there is none"
    near = get_close_matches(str(wrong), known, n=1, cutoff=0.5)
    few = len(known) <= 12
    if near:
        return f"; did you mean {near[0]!r}?" + (f" It can be {listed(known)}" if few else "")
    return f"; it can be {listed(known)}" if few else f"; the nearest are {listed(_nearest(wrong, known))}"


def _nearest(wrong: object, known: Collection[str]) -> list[str]:
    return get_close_matches(str(wrong), known, n=3, cutoff=0.0)


def listed(words: Iterable[object], last: str = "or") -> str:
    """`a, b or c`."""
    *head, tail = [str(word) for word in words]
    return f"{', '.join(head)} {last} {tail}" if head else tail


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
