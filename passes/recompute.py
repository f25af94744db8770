"""Choose, call by call, what forward saves and what backward computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        for _, graph in program.graphs():
            for call in graph.nodes:
                if call.op != "call_module" or call.meta["call"].fqn not in self.modes:
                    continue
                compute = program.compute(call.meta["joint"], self.modes[call.meta["call"].fqn])
                backward = "_backward" if call.meta.get("backward") else ""
                call.target = f"{compute.name}{backward}"
        used = {str(node.target).removesuffix("_backward") for _, g in program.graphs() for node in g.nodes if node.op == "call_module"}
        program.computes = {name: compute for name, compute in program.computes.items() if name in used}
