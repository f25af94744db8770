"""Choose, call by call, what forward saves and what backward computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from turbo_compile.ir.names import calls_of
from turbo_compile.ir.program import StepProgram


@dataclass(frozen=True, slots=True)
class Recompute:
    """Give each block's call the partition its mode names: none, selective or full.

    Before:  %h1, %s0 = block.none(%w0, %h0);  %dw0, %dh0 = block.none.backward(%w0, %s0, %dh1)
    After:   %h1, %s0 = block.full(%w0, %h0);  %dw0, %dh0 = block.full.backward(%w0, %s0, %dh1)
    """

    modes: dict[str, str]
    exact: ClassVar[bool] = False

    def run(self, program: StepProgram) -> None:
        calls = [call for _, graph in program.graphs() for call in calls_of(graph)]
        for call in calls:
            mode = self.modes.get(call.meta["call"].fqn)
            if mode is not None:
                backward = "_backward" if call.meta.get("backward") else ""
                call.target = f"{program.compute(call.meta['joint'], mode).name}{backward}"
        used = {program.compute_of(call).name for call in calls}
        program.computes = {name: compute for name, compute in program.computes.items() if name in used}
