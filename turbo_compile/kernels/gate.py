"""The activation between an expert's two products, and its backward with the activation computed again.

    out [N, I] = activate(gate, pre [N, 2I])          # act(min(x, limit)) * (clamp(y, -limit, limit) + shift)
    out [N, I] = activate(gate, pre [N, I])           # without a gate: act(min(x, limit))
    grad_pre, out, _ = activate_backward(gate, grad [N, I], pre)
    grad_pre, out, grad_weights = activate_backward(gate, grad, pre, order, weights)    # rows of `out` were weighted

x and y are the halves of `pre`, or, interleaved, its even and odd columns. Everything is computed in fp32 (fp64 for
fp64) and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_compile.kernels.device import HAS_TRITON, launch, takes_kernel, tuning
from turbo_compile.kernels.rows import accumulate_dtype, inverse

if HAS_TRITON:
    from turbo_compile.kernels import gate_triton

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True, slots=True)
class Gate:
    """Which activation: `alpha` scales what the sigmoid of `silu` sees; None is no limit."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def spelled(self) -> tuple[str, bool, bool, float, float | None, float]:
        """As the arguments of an op."""
        return self.activation, self.gated, self.interleaved, self.alpha, self.limit, self.shift


def activate(gate: Gate, pre: Tensor) -> Tensor:
    if not takes_kernel(pre):
        dtype = accumulate_dtype(pre)
        x, y = _halves(gate, pre.to(dtype))
        value, _ = _activation(gate, _limited(gate, x))
        return _product(gate, value, y).to(pre.dtype)
    pre = pre if pre.stride(1) == 1 else pre.contiguous()
    out = pre.new_empty((pre.shape[0], pre.shape[1] // (1 + gate.gated)))
    tile = tuning(pre).gate
    grid = (-(-out.shape[0] // tile.rows), -(-out.shape[1] // tile.columns))
    if out.numel():
        launch(gate_triton.gate_kernel, pre)[grid](
            *(pre, out, out.shape[0], out.shape[1], pre.stride(0)),
            *(gate.alpha, gate.limit or 0.0, gate.shift),
            ACTIVATION=gate.activation,
            GATED=gate.gated,
            INTERLEAVED=gate.interleaved,
            LIMITED=gate.limit is not None,
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return out


def activate_backward(
    gate: Gate, grad: Tensor, pre: Tensor, order: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`weights` [T, K] has row n's factor at `order[n]` of its T*K numbers."""
    if not takes_kernel(pre) or (weights is not None and weights.dtype == torch.float64):
        return _activate_backward(gate, grad, pre, order, weights)
    pre = pre if pre.stride(1) == 1 else pre.contiguous()
    grad_pre, out = pre.new_empty(pre.shape), pre.new_empty(grad.shape)
    grad_weights = None if weights is None else weights.new_empty(weights.shape)
    tile = tuning(pre).gate
    if out.numel():
        launch(gate_triton.gate_backward_kernel, pre)[(-(-out.shape[0] // tile.rows),)](
            *(grad.contiguous(), pre),
            *(pre if order is None else order, pre if weights is None else weights.contiguous()),
            *(grad_pre, out, pre if grad_weights is None else grad_weights),
            *(out.shape[0], out.shape[1], pre.stride(0)),
            *(gate.alpha, gate.limit or 0.0, gate.shift),
            ACTIVATION=gate.activation,
            GATED=gate.gated,
            INTERLEAVED=gate.interleaved,
            LIMITED=gate.limit is not None,
            WEIGHTED=weights is not None,
            ROWS=tile.rows,
            COLS=tile.columns,
            num_warps=tile.warps,
        )
    return grad_pre, out, grad_weights


# --- the reference ---------------------------------------------------------------------------------------------------


def _activate_backward(
    gate: Gate, grad: Tensor, pre: Tensor, order: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = accumulate_dtype(pre, weights)
    x, y = _halves(gate, pre.to(dtype))
    value, slope = _activation(gate, _limited(gate, x))
    out, given, grad_weights = _product(gate, value, y), grad.to(dtype), None
    if weights is not None and order is not None:
        grad_weights = (given * out).sum(1)[inverse(order)].view(weights.shape).to(weights.dtype)
        weight = weights.to(dtype).flatten()[order].unsqueeze(1)
        out, given = out * weight, given * weight
    if gate.limit is not None:
        slope = slope.masked_fill(x > gate.limit, 0.0)
    if y is None:
        return (given * slope).to(pre.dtype), out.to(pre.dtype), grad_weights
    grad_x, grad_y = given * (_clamped(gate, y) + gate.shift) * slope, given * value
    if gate.limit is not None:
        grad_y = grad_y.masked_fill(y.abs() > gate.limit, 0.0)
    both = torch.stack([grad_x, grad_y], 2).flatten(1) if gate.interleaved else torch.cat([grad_x, grad_y], 1)
    return both.to(pre.dtype), out.to(pre.dtype), grad_weights


def _halves(gate: Gate, pre: Tensor) -> tuple[Tensor, Tensor | None]:
    if not gate.gated:
        return pre, None
    if gate.interleaved:
        return pre[:, ::2], pre[:, 1::2]
    half = pre.shape[1] // 2
    return pre[:, :half], pre[:, half:]


def _limited(gate: Gate, x: Tensor | None) -> Tensor:
    assert x is not None
    return x if gate.limit is None else x.clamp(max=gate.limit)


def _clamped(gate: Gate, y: Tensor) -> Tensor:
    return y if gate.limit is None else y.clamp(-gate.limit, gate.limit)


def _product(gate: Gate, value: Tensor, y: Tensor | None) -> Tensor:
    return value if y is None else value * (_clamped(gate, y) + gate.shift)


def _activation(gate: Gate, x: Tensor) -> tuple[Tensor, Tensor]:
    """act(x) and its derivative."""
    if gate.activation == "silu":
        s = torch.sigmoid(gate.alpha * x)
        return x * s, s + gate.alpha * x * s * (1 - s)
    if gate.activation == "gelu":
        half = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * half, half + x * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    if gate.activation == "gelu_tanh":
        bend = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        slope = 0.5 * x * (1 - bend * bend) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return F.gelu(x, approximate="tanh"), 0.5 * (1 + bend) + slope
    value = F.relu(x)
    return (value, (x > 0).to(x.dtype)) if gate.activation == "relu" else (value * value, 2 * value)
