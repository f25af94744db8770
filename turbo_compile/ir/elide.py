"""Show what repeats once: lines that recur, their numbers each growing by its own step, become one line that counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_LONGEST = 64  # lines one repetition may have: six blocks of a pattern of local and global attention
_LEAST_REPEATS = 4
_LEAST_SAVED = 6


@dataclass(frozen=True)
class Line:
    """One line of text; `label` says which module's call it is, if it is one."""

    code: str
    comment: str = ""
    label: str = ""

    @cached_property
    def template(self) -> str:
        """The line with its numbers blanked."""
        return re.sub(r"\d+", "0", f"{self.code}#{self.comment}")

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", f"{self.code}#{self.comment}"))


def elide_repeats(lines: Sequence[Line]) -> list[Line]:
    """`lines` with each run of repetitions cut to its first and a count."""
    shown: list[Line] = []
    index = 0
    while index < len(lines):
        period, repeats = _best_run(lines, index)
        shown.extend(lines[index : index + period])
        if repeats > 1:
            left_out = lines[index + period : index + period * repeats]
            these = f"these {period} lines" if period > 1 else "this line"
            shown.append(Line(f"...  {_span(left_out)}{these} again, {repeats - 1} times"))
        index += period * repeats
    return shown


def _best_run(lines: Sequence[Line], index: int) -> tuple[int, int]:
    """The (period, repeats) from `index` that leaves out most; (1, 1) if nothing is worth it."""
    best, saved = (1, 1), _LEAST_SAVED - 1
    for period in range(1, min(_LONGEST, (len(lines) - index) // _LEAST_REPEATS) + 1):
        if lines[index].template != lines[index + period].template:
            continue
        repeats = _repeats(lines, index, period)
        if repeats >= _LEAST_REPEATS and period * (repeats - 1) > saved:
            best, saved = (period, repeats), period * (repeats - 1)
    return best


def _repeats(lines: Sequence[Line], start: int, period: int) -> int:
    """How often the `period` lines at `start` come in a row, each number in arithmetic progression."""
    same = period
    while start + same < len(lines) and _continues(lines, start + same, start, period):
        same += 1
    return same // period


def _continues(lines: Sequence[Line], index: int, start: int, period: int) -> bool:
    line, before = lines[index], lines[index - period]
    if line.template != before.template:
        return False
    if index - 2 * period < start:
        return True
    earlier = lines[index - 2 * period].numbers
    return all(a - b == b - c for a, b, c in zip(line.numbers, before.numbers, earlier, strict=True))


def _span(lines: Sequence[Line]) -> str:
    labels = [line.label for line in lines if line.label] or [line.comment for line in lines if line.comment]
    return f"{labels[0]} to {labels[-1]}: " if labels else ""
