"""Random numbers by counting: element i of seed s is always the same number, on every device, in forward and recompute.

A number is a hash of (seed, counter) in plain integer ops, so autograd, tracing and Inductor see ordinary arithmetic,
and eager and compiled code draw the same bits. The hash is two rounds of a 32-bit mixer of the multiply-and-xor-shift
family (constants: C. Wellons, "Prospecting for Hash Functions", 2018), held in int64. A multiplier of 2**31 or more is
written as its negative residue modulo 2**32: products then stay below 2**63, so signed overflow, which the C++ that
Inductor emits leaves undefined, cannot happen.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_Word = TypeVar("_Word", Tensor, int)
_LOW32 = 0xFFFFFFFF
_ODD = 0x1E3779B9  # any odd number of mixed bits: keeps zeros, which the mixer maps to zero, out of it


def _mix(x: _Word) -> _Word:
    """A bijection of 32-bit words (each in an int64) in which each input bit flips about half of the output bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - 2**32)) & _LOW32
    return x ^ (x >> 16)


def fork(seed: Tensor, site: int) -> Tensor:
    """A seed (0-d int64, non-negative) for one use of `seed`: different sites draw independent numbers."""
    low = _mix((seed & _LOW32) ^ _mix((site ^ _ODD) & _LOW32))
    high = _mix(((seed >> 32) & _LOW32) ^ low)
    return (high << 31) ^ low


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Numbers in [0, 1), float32 of 24 bits: one for each counter (int64, any shape) under `seed` (0-d int64)."""
    first = _mix((seed ^ _ODD) & _LOW32)
    second = _mix(((seed >> 32) & _LOW32) ^ first)
    return _draw(first, second, counter)


def dropout(x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """`x` with each element zeroed with probability `p` and the rest scaled by 1/(1-p); differentiable in `x`.

    The mask depends on the element's flattened index, on `seed` (0-d int64, a number that `fork` gave: its bits are
    used as they are, since a compiler repeats for each element what is computed of the seed) and on `site`, which tells
    the uses of one seed apart.
    """
    own = _mix((site ^ _ODD) & _LOW32)
    first, second = (seed & _LOW32) ^ own, ((seed >> 32) + _mix(own ^ _ODD)) & _LOW32
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return torch.where(_draw(first, second, index) >= p, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), 0.0)


def _draw(first: Tensor, second: Tensor, counter: Tensor) -> Tensor:
    word = _mix((counter & _LOW32) ^ first)
    high = (counter >> 32) & _LOW32
    word = _mix((word + high * _ODD + second) & _LOW32)
    return (word >> 8).to(torch.float32) * 2.0**-24
