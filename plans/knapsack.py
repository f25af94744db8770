"""Which blocks keep what: the fastest mix of recomputation that fits, exactly.

Blocks of a kind are alike, so a mix is how many of each kind take each mode; a frontier keeps, of all mixes, those that
no other beats in both seconds and bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Kind:
    """`count` blocks that are alike; by mode, the seconds one takes and the bytes it keeps."""

    count: int
    modes: Mapping[str, tuple[float, float]]


Mix = tuple[tuple[int, ...], ...]  # for each kind, how many blocks take each of its modes, in the order of the modes


@dataclass(frozen=True, slots=True)
class Frontier:
    """The mixes worth having, by bytes; more bytes always mean fewer seconds."""

    bytes_: tuple[float, ...]
    seconds: tuple[float, ...]
    mixes: tuple[Mix, ...]

    def best(self, budget: float) -> Mix | None:
        """The fastest mix of at most `budget` bytes."""
        place = bisect_right(self.bytes_, budget)
        return self.mixes[place - 1] if place else None


def frontier(kinds: Iterable[Kind]) -> Frontier:
    """Of all mixes of `kinds`. Exact: kinds are joined pair by pair, and a mix that is beaten stays beaten."""
    points: list[tuple[float, float, Mix]] = [(0.0, 0.0, ())]
    for kind in kinds:
        own = _undominated((held, seconds, (counts,)) for held, seconds, counts in _of_kind(kind))
        joined = ((a + c, b + d, mix + more) for (a, b, mix), (c, d, more) in product(points, own))
        points = _undominated(joined)
    held, seconds, mixes = zip(*points, strict=True)
    return Frontier(held, seconds, mixes)


def _of_kind(kind: Kind) -> Iterable[tuple[float, float, tuple[int, ...]]]:
    options = list(kind.modes.values())
    for counts in _parts(kind.count, len(options)):
        held = sum(count * each[1] for count, each in zip(counts, options, strict=True))
        seconds = sum(count * each[0] for count, each in zip(counts, options, strict=True))
        yield held, seconds, counts


def _parts(total: int, places: int) -> Iterable[tuple[int, ...]]:
    """Every way to write `total` as a sum over `places`."""
    if places == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for rest in _parts(total - first, places - 1):
            yield (first, *rest)


def _undominated(points: Iterable[tuple[float, float, Mix]]) -> list[tuple[float, float, Mix]]:
    """Sorted by bytes; of points with the same numbers the first in the order of mixes, so that runs agree."""
    kept: list[tuple[float, float, Mix]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
