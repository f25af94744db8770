"""Run passes: after each one the program is verified, and written where a dump was asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol

from turbo_compile.errors import InvalidProgram
from turbo_compile.ir.dump import Dump
from turbo_compile.ir.program import Program, StepProgram
from turbo_compile.ir.verify import verify
from turbo_compile.plans.ranges import compress


class Pass(Protocol):
    """A rewrite of a program in place; `exact` says whether the numbers stay the same bits."""

    exact: ClassVar[bool]

    def run(self, program: Any) -> None: ...


def run(passes: Iterable[Any], program: Program | StepProgram, *, dump: Dump | None = None) -> None:
    """Run `passes` in order, each between two verified programs.

    Raises:
        InvalidProgram: names the pass, the node and the rule.
    """
    _settle("capture" if isinstance(program, Program) else "differentiate", program, dump, 0.0)
    for each in passes:
        began = time.perf_counter()
        each.run(program)
        _settle(title(each), program, dump, time.perf_counter() - began)


def title(each: Any) -> str:
    """`Prefetch(depth=1)`: a pass and its options, blocks of one value as a range."""
    options = [f"{field.name}={_option(getattr(each, field.name))}" for field in fields(each)]
    return f"{type(each).__name__}({', '.join(options)})"


def _option(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    chosen = {choice: compress(name for name, each in value.items() if each == choice) for choice in value.values()}
    return f"{{{', '.join(f'{name}: {choice}' for choice, names in chosen.items() for name in names)}}}"


def _settle(stage: str, program: Program | StepProgram, dump: Dump | None, seconds: float) -> None:
    try:
        verify(program)
    except InvalidProgram as error:
        raise InvalidProgram(f"after {stage}: {error}") from None
    if dump is not None:
        dump.stage(stage, program, seconds)
