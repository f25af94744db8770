"""Tile sizes of the Triton kernels by device: data, so that nothing is tuned while training runs.

`default` serves any device without a row of its own. The rows were chosen by what fits: no spilled registers, and
shared memory within the device's limit, both read from compiled code (tests/test_triton_compile.py). None has been
timed yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """One program's tile: rows x columns of the result, `inner` of the sum at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PassTile:
    """One program's tile of a kernel that passes over memory once."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """`grouped_mm` says who multiplies half-precision rows: torch's grouped kernel, where it can, or Triton."""

    half: MatmulTile
    single: MatmulTile
    half_outer: MatmulTile
    single_outer: MatmulTile
    rows: PassTile = PassTile(4, 512, 4)
    gate: PassTile = PassTile(4, 256, 4)
    heads: PassTile = PassTile(8, 128, 4)
    grouped_mm: str = "torch"


_NVIDIA = Tuning(
    half=MatmulTile(128, 128, 64, 8, 3),
    single=MatmulTile(64, 64, 32, 4, 2),
    half_outer=MatmulTile(128, 128, 64, 8, 3),
    single_outer=MatmulTile(64, 64, 32, 4, 2),
)
_AMD = Tuning(
    half=MatmulTile(128, 128, 32, 8, 2),
    single=MatmulTile(64, 64, 32, 4, 2),
    half_outer=MatmulTile(128, 128, 32, 8, 2),
    single_outer=MatmulTile(64, 64, 32, 4, 2),
    grouped_mm="triton",
)
_PASS = PassTile(4, 16, 4)
_SMALL = MatmulTile(16, 16, 16, 4, 2)
_INTERPRETED = Tuning(_SMALL, _SMALL, _SMALL, _SMALL, _PASS, _PASS, _PASS, "triton")
TUNING = {
    "default": _NVIDIA,
    "sm_90": _NVIDIA,
    "sm_100": _NVIDIA,
    "gfx942": _AMD,
    "gfx950": _AMD,
    "interpreted": _INTERPRETED,  # small, so that small shapes have several tiles
}
