"""Runs the kernels' cases in a process of its own: `python -m tests.triton_runner interpret` or `compile`.

The two cannot share a process: TRITON_INTERPRET changes what `triton.jit` makes. Prints one line of JSON a case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from tests import expert_cases, heads_cases
from tests.triton_support import TOLERANCE, CompileCase, Drawn, InterpretCase
from turbo_compile.kernels.tuning import TUNING

MODULES = (expert_cases, heads_cases)  # each with INTERPRETED and COMPILED

# Bytes of shared memory one program may have: CUDA C++ Programming Guide, compute capabilities 9.0 and 10.0 (227 KiB);
# CDNA 3 ISA, 64 KiB of LDS.
TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[2:]
    if sys.argv[1] == "interpret":
        _multiply_bfloat16_rightly()
        cases = [case for module in MODULES for case in module.INTERPRETED if not chosen or case.name in chosen]
        for case in cases:
            print(json.dumps({"case": case.name, "error": _failure(lambda case=case: interpret(case))}), flush=True)
    else:
        for case in [case for module in MODULES for case in module.COMPILED if not chosen or case.name in chosen]:
            for target in TARGETS:
                found: dict[str, Any] = {}
                error = _failure(lambda case=case, target=target, found=found: found.update(resources(case, target)))
                print(json.dumps({"case": case.name, "target": target, "error": error, **found}), flush=True)


def _failure(run: Any) -> str:
    try:
        run()
    except BaseException:
        return traceback.format_exc()
    return ""


# --- under the interpreter -------------------------------------------------------------------------------------------


def interpret(case: InterpretCase) -> None:
    launched: set[str] = set()
    drawn = st.fixed_dictionaries(
        {**case.sizes, "dtype": st.sampled_from(list(TOLERANCE)), "seed": st.integers(0, 2**31)}
    )

    @settings(
        max_examples=case.examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # a first failure says enough, and shrinking it under the interpreter takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def check(of: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(of["seed"])
        inputs = case.make(Drawn(of, of["dtype"], generator))
        with _recorded(launched):
            ours = _results(case, inputs, generator.clone_state())
        theirs = _results(case, {name: _double(value) for name, value in inputs.items()}, generator.clone_state())
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == (of["dtype"] if theirs[name].is_floating_point() else theirs[name].dtype), name
            assert value.shape == theirs[name].shape, name
            off = float((value.double() - theirs[name].double()).norm())
            bound = TOLERANCE[of["dtype"]] * float(theirs[name].double().norm()) + 1e-12
            assert off <= bound, f"{name} is off by {off:.3g}, and may be by {bound:.3g}"

    check()
    missing = set(case.kernels) - launched
    assert not missing, f"never launched {sorted(missing)}, only {sorted(launched)}"


def _results(case: InterpretCase, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Outputs by place, and gradients by input, for tangents that are the same in every dtype."""
    leaves = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if case.differentiable:
        inputs = {**inputs, **{n: v.detach().requires_grad_() for n, v in leaves.items()}}
    out = case.run(**inputs)
    outputs = {f"output {i}": each for i, each in enumerate(out if isinstance(out, tuple) else (out,))}
    if not case.differentiable:
        return outputs
    drawn = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in outputs.values()]
    tangents = [each.bfloat16().to(out.dtype) for each, out in zip(drawn, outputs.values(), strict=True)]
    names = list(leaves)
    found = torch.autograd.grad(list(outputs.values()), [inputs[name] for name in names], tangents)
    gradients = {f"gradient of {name}": each for name, each in zip(names, found, strict=True)}
    return {name: each.detach() for name, each in (outputs | gradients).items()}


def _double(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


class _recorded:
    """Notes which Triton functions are launched."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def __enter__(self) -> None:
        self.before = before = interpreter.GridExecutor.__call__

        def call(executor: Any, *arguments: Any, **keywords: Any) -> Any:
            self.names.add(executor.fn.__name__)
            return before(executor, *arguments, **keywords)

        interpreter.GridExecutor.__call__ = call

    def __exit__(self, *_: Any) -> None:
        interpreter.GridExecutor.__call__ = self.before


def _multiply_bfloat16_rightly() -> None:
    """The interpreter's dot multiplies the bits of bf16 numbers as if they were integers (Triton 3.7 to 3.9)."""
    before = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return before(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


# --- compiled, not run -----------------------------------------------------------------------------------------------


def resources(case: CompileCase, target: str) -> dict[str, int]:
    """Registers, spilled registers (or bytes) and shared memory of one program; raises where they do not fit."""
    gpu, limit = TARGETS[target]
    constants = case.constants(TUNING[target])
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in constants else case.types[name] for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in case.aligned]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=gpu, options=case.options(TUNING[target]))
    read = _read_nvidia if gpu.backend == "cuda" else _read_amd
    found = {**read(compiled.asm), "shared": compiled.metadata.shared}
    assert found["spills"] == 0, f"spills {found}"
    assert found["shared"] <= limit, f"{found['shared']} bytes of shared memory, and the device has {limit}"
    return found


def _read_nvidia(asm: Any) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    words = dict(word.split(":")[:2] for word in text.split() if word.count(":") == 1 and not word.endswith(":"))
    return {"registers": int(words["REG"]), "spills": int(words["STACK"]) + int(words["LOCAL"])}


def _read_amd(asm: Any) -> dict[str, int]:
    lines = [line.split(":") for line in asm["amdgcn"].splitlines() if line.count(":") == 1]
    facts = {name.strip(): value.strip() for name, value in lines}
    spills = int(facts[".vgpr_spill_count"]) + int(facts[".sgpr_spill_count"])
    return {"registers": int(facts[".vgpr_count"]), "spills": spills}


if __name__ == "__main__":
    main()
