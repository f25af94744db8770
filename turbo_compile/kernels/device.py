"""Where a kernel runs: Triton on a GPU, the plain-torch reference anywhere else.

if takes_kernel(x):     # CUDA with Triton, or any device under TRITON_INTERPRET=1
    ...                 # launch
else:
    ...                 # the reference: what the kernel must compute
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from turbo_compile.kernels.tuning import TUNING, Tuning

__all__ = ["HAS_TRITON", "INTERPRETED", "kernel_op", "launch", "programs", "takes_kernel", "tuning"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import triton
    from torch.library import triton_op as kernel_op

    INTERPRETED = bool(triton.knobs.runtime.interpret)
else:
    from torch.library import custom_op as kernel_op  # type: ignore[assignment]  # the reference is all there is

    INTERPRETED = False

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INTERPRETED_PROGRAMS = 3  # of a persistent kernel: enough that tiles are dealt out, in turn


def takes_kernel(x: Tensor) -> bool:
    """Whether an op on `x` launches its Triton kernel; if not, it runs the reference. fp64 has no kernels."""
    return HAS_TRITON and (x.device.type == "cuda" or INTERPRETED) and x.dtype in _DTYPES


def launch(kernel: Any, x: Tensor) -> Any:
    """`kernel`, to be started on `x` and its like; while a compiler traces, as a node that the compiler understands."""
    return kernel if type(x) in (Tensor, torch.nn.Parameter) else torch.library.wrap_triton(kernel)


def tuning(x: Tensor) -> Tuning:
    """Tile sizes for the device of `x`."""
    return TUNING[_family(x.device.index or 0) if x.device.type == "cuda" else "interpreted"]


def programs(x: Tensor) -> int:
    """How many programs a persistent kernel starts: one a multiprocessor."""
    return _multiprocessors(x.device.index or 0) if x.device.type == "cuda" else _INTERPRETED_PROGRAMS


@functools.cache
def _family(index: int) -> str:
    """The row of the tuning table: `sm_90` and its like, `gfx942` and its like, or the default."""
    properties = torch.cuda.get_device_properties(index)
    name = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return name if name in TUNING else ("gfx942" if torch.version.hip else "default")


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
