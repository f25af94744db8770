"""How a Triton kernel registers for the two checks that need no GPU.

An `InterpretCase` is run under Triton's interpreter, on shapes that Hypothesis draws, and compared with the reference
in fp64, forward and backward. A `CompileCase` is compiled for GPUs that are not there, and its registers, spills and
shared memory are read. List both in a module of cases, and the module in tests/triton_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from turbo_compile.kernels.tuning import Tuning

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # |ours - reference| / |reference|
ANY_SIZE = st.one_of(st.sampled_from([0, 1, 16, 17]), st.integers(2, 40))  # 16 is the interpreter's tile
SOME_SIZE = st.one_of(st.sampled_from([1, 16, 17]), st.integers(2, 40))


@dataclass(frozen=True)
class InterpretCase:
    """`run(**inputs)` gives a tensor or a tuple of them; `make` the inputs of drawn sizes, floats of them in `dtype`.

    Gradients of all floating inputs are compared too, unless the case is not `differentiable`. `kernels` are the names
    of the Triton functions that must have been launched.
    """

    name: str
    kernels: tuple[str, ...]
    sizes: Mapping[str, st.SearchStrategy[Any]]
    make: Callable[[Drawn], dict[str, Any]]
    run: Callable[..., Any]
    differentiable: bool = True
    examples: int = 12


@dataclass(frozen=True)
class Drawn:
    """One example: sizes as attributes of `of`, and makers of tensors with the strides that were drawn."""

    of: Mapping[str, Any]
    dtype: torch.dtype
    generator: torch.Generator

    def __getattr__(self, name: str) -> Any:
        return self.of[name]

    def floats(self, *shape: int, strides: str = "dense") -> Tensor:
        """Normal numbers; `strides`: dense, wide (rows lie apart) or turned (the last two dimensions swapped)."""
        stored = (*shape[:-1], shape[-1] + 3) if strides == "wide" else shape
        if strides == "turned":
            stored = (*shape[:-2], shape[-1], shape[-2])
        value = torch.randn(stored, generator=self.generator, dtype=torch.float64).to(self.dtype)
        return value[..., : shape[-1]] if strides == "wide" else value.mT if strides == "turned" else value

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, max(high, 1), shape, generator=self.generator)


STRIDES = st.sampled_from(["dense", "wide", "turned"])


@dataclass(frozen=True)
class CompileCase:
    """`types` of the arguments ("*bf16", "i32", "fp32"); constants and launch options as the tuning table has them."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Callable[[Tuning], dict[str, Any]]
    options: Callable[[Tuning], dict[str, int]]
    aligned: tuple[str, ...] = field(default=())  # integers that are multiples of 16 in training; pointers all are
