"""The cases of a mixture's experts: rows on their way, the activation, products by group, and all of it together."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.triton_support import ANY_SIZE, SOME_SIZE, STRIDES, CompileCase, Drawn, InterpretCase
from turbo_compile.boundaries.experts import combine, dispatch
from turbo_compile.kernels import gate_triton, grouped_mm_triton, rows_triton
from turbo_compile.kernels.gate import ACTIVATIONS, Gate, activate, activate_backward
from turbo_compile.kernels.grouped_experts import gated_mm, gathered_mm, grouped_experts, route
from turbo_compile.kernels.grouped_mm import grouped_mm, grouped_sum
from turbo_compile.kernels.rows import put, sort_by_expert, take
from turbo_compile.kernels.tuning import MatmulTile, Tuning

_TOKENS = {"T": ANY_SIZE, "K": st.integers(1, 3), "E": st.integers(1, 5), "H": SOME_SIZE, "strides": STRIDES}
_ROWS = {"N": ANY_SIZE, "E": st.integers(1, 5), "H": SOME_SIZE, "I": SOME_SIZE, "strides": STRIDES}
_LAYOUT = {"turned": st.booleans(), "biased": st.booleans()}


@st.composite
def _gates(draw: Any, limits: tuple[float | None, ...] = (None, 0.7)) -> Gate:
    activation = draw(st.sampled_from(ACTIVATIONS))
    alpha = draw(st.sampled_from([1.0, 1.702])) if activation == "silu" else 1.0
    limit = draw(st.sampled_from(limits))
    if not draw(st.booleans()):
        return Gate(activation, gated=False, alpha=alpha, limit=limit)
    return Gate(activation, True, draw(st.booleans()), alpha, limit, draw(st.sampled_from([0.0, 1.0])))


def _index(of: Drawn) -> torch.Tensor:
    """Expert numbers [T, K], some experts left without a token."""
    return of.integers(of.E, of.T, of.K).clamp(max=max(0, of.E - 2))


def _ends(of: Drawn) -> torch.Tensor:
    return of.integers(of.E, of.N).bincount(minlength=of.E).cumsum(0).to(torch.int32)


def _weight(of: Drawn, inner: int, outer: int) -> torch.Tensor:
    return of.floats(of.E, inner, outer, strides="turned" if of.turned else "dense") / inner**0.5


def _bias(of: Drawn, outer: int) -> torch.Tensor | None:
    return of.floats(of.E, outer) if of.biased else None


def _mixture(of: Drawn) -> dict[str, Any]:
    width = of.I * (1 + of.gate.gated)
    return {
        "hidden": of.floats(of.T, of.H, strides=of.strides),
        "index": _index(of),
        "weights": of.floats(of.T, of.K),
        "up": _weight(of, of.H, width),
        "down": _weight(of, of.I, of.H),
        "up_bias": _bias(of, width),
        "down_bias": _bias(of, of.H),
        "gate": of.gate,
    }


INTERPRETED = [
    InterpretCase(
        "dispatch",
        ("spread_kernel", "collect_kernel"),
        _TOKENS,
        lambda of: {"hidden": of.floats(of.T, of.H, strides=of.strides), "index": _index(of), "E": of.E},
        lambda hidden, index, E: dispatch(hidden, index, E)[0],
    ),
    InterpretCase(
        "combine",
        ("collect_kernel", "uncollect_kernel"),
        _TOKENS,
        lambda of: {
            "rows": of.floats(of.T * of.K, of.H, strides=of.strides),
            "order": sort_by_expert(_index(of), of.E)[0],
            "weights": of.floats(of.T, of.K),
        },
        combine,
    ),
    InterpretCase(
        "take",
        ("take_kernel",),
        _ROWS | {"spare": st.integers(0, 2), "divisor": st.integers(1, 3)},
        lambda of: {
            "x": of.floats(of.H, of.I, strides=of.strides),
            "index": of.integers(of.H * of.divisor, of.N),
            "spare": of.spare,
            "divisor": of.divisor,
        },
        take,
        differentiable=False,
    ),
    InterpretCase(
        "put",
        ("put_kernel",),
        _ROWS | {"spare": st.integers(0, 2)},
        lambda of: {
            "x": of.floats(of.N + of.spare, of.H, strides=of.strides),
            "index": torch.randperm(of.N, generator=of.generator),
        },
        put,
        differentiable=False,
    ),
    InterpretCase(
        "activate",
        ("gate_kernel",),
        _ROWS | {"gate": _gates()},
        lambda of: {"gate": of.gate, "pre": of.floats(of.N, of.I * (1 + of.gate.gated), strides=of.strides)},
        activate,
        differentiable=False,
        examples=24,
    ),
    InterpretCase(
        "activate_backward",
        ("gate_backward_kernel",),
        _ROWS | {"gate": _gates(), "weighted": st.booleans()},
        lambda of: {
            "gate": of.gate,
            "grad": of.floats(of.N, of.I),
            "pre": of.floats(of.N, of.I * (1 + of.gate.gated), strides=of.strides),
            "order": torch.randperm(of.N, generator=of.generator) if of.weighted else None,
            "weights": of.floats(of.N, 1) if of.weighted else None,
        },
        lambda **inputs: tuple(each for each in activate_backward(**inputs) if each is not None),
        differentiable=False,
        examples=24,
    ),
    InterpretCase(
        "grouped_mm",
        ("grouped_mm_kernel", "grouped_outer_kernel"),
        _ROWS | _LAYOUT,
        lambda of: {
            "x": of.floats(of.N, of.H, strides=of.strides),
            "w": _weight(of, of.H, of.I),
            "offsets": _ends(of),
            "bias": _bias(of, of.I),
        },
        grouped_mm,
    ),
    InterpretCase(
        "grouped_sum",
        ("grouped_sum_kernel",),
        _ROWS,
        lambda of: {"x": of.floats(of.N, of.H, strides=of.strides), "offsets": _ends(of)},
        grouped_sum,
        differentiable=False,
    ),
    InterpretCase(
        "gathered_mm",
        ("grouped_mm_kernel", "grouped_outer_kernel", "collect_kernel"),
        _TOKENS | _LAYOUT | {"I": SOME_SIZE},
        lambda of: {
            "hidden": of.floats(of.T, of.H, strides=of.strides),
            "index": _index(of),
            "w": _weight(of, of.H, of.I),
            "bias": _bias(of, of.I),
        },
        lambda hidden, index, w, bias: gathered_mm(hidden, *route(index, w.shape[0]), w, bias, index.shape[1]),
    ),
    InterpretCase(
        "gated_mm",
        ("gate_kernel", "gate_backward_kernel", "grouped_mm_kernel", "grouped_outer_kernel"),
        _ROWS | _LAYOUT | {"gate": _gates()},
        lambda of: {
            "pre": of.floats(of.N, of.I * (1 + of.gate.gated), strides=of.strides),
            "w": _weight(of, of.I, of.H),
            "offsets": _ends(of),
            "bias": _bias(of, of.H),
            "gate": of.gate,
        },
        lambda pre, w, offsets, bias, gate: gated_mm(pre, w, offsets, bias, *gate.spelled()),
    ),
    InterpretCase(
        "grouped_experts",
        ("grouped_mm_kernel", "grouped_outer_kernel", "gate_backward_kernel", "collect_kernel"),
        # Without limits: a value that rounding moves across one has another gradient.
        _TOKENS | _LAYOUT | {"I": SOME_SIZE, "gate": _gates((None,))},
        _mixture,
        grouped_experts,
        examples=16,
    ),
]


# --- compiled --------------------------------------------------------------------------------------------------------


def _tile(tile: MatmulTile) -> dict[str, int]:
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner}


def _half(of: Tuning) -> dict[str, int]:
    return {"num_warps": of.half.warps, "num_stages": of.half.stages}


def _single(of: Tuning) -> dict[str, int]:
    return {"num_warps": of.single.warps, "num_stages": of.single.stages}


def _half_outer(of: Tuning) -> dict[str, int]:
    return {"num_warps": of.half_outer.warps, "num_stages": of.half_outer.stages}


def _rows_tile(of: Tuning) -> dict[str, int]:
    return {"ROWS": of.rows.rows, "COLS": of.rows.columns}


def _rows_options(of: Tuning) -> dict[str, int]:
    return {"num_warps": of.rows.warps}


def _gate_options(of: Tuning) -> dict[str, int]:
    return {"num_warps": of.gate.warps}


def _gate_constants(activation: str, interleaved: bool, limited: bool) -> Any:
    return lambda of: {
        "ACTIVATION": activation,
        "GATED": True,
        "INTERLEAVED": interleaved,
        "LIMITED": limited,
        "ROWS": of.gate.rows,
        "COLS": of.gate.columns,
    }


def _weighted(constants: Any) -> Any:
    return lambda of: constants(of) | {"WEIGHTED": True}


def _mm(dtype: str) -> dict[str, str]:
    return {
        **{"x": f"*{dtype}", "index": "*i64", "w": f"*{dtype}", "bias": f"*{dtype}", "offsets": "*i32"},
        **{"out": f"*{dtype}", "groups": "i32", "inner": "i32", "outer": "i32", "x_stride": "i32"},
        **{"w_group": "i32", "w_inner": "i32", "w_outer": "i32"},
    }


_WIDTHS = ("width", "stride", "grad_stride", "rows_stride", "half", "inner", "outer", "x_stride", "y_stride")
_MM = {"TAKEN": True, "DIVISOR": 8, "BIASED": True, "PROGRAMS": 132}
_OUTER = {"X_TAKEN": True, "X_DIVISOR": 8, "Y_TAKEN": False, "Y_DIVISOR": 1}
_SPREAD = {"x": "*bf16", "positions": "*i64", "out": "*bf16", "tokens": "i32", "width": "i32", "stride": "i32"}
_COLLECT = {"rows": "*bf16", "positions": "*i64", "weights": "*fp32", "out": "*bf16"}
_UNCOLLECT = {"grad": "*bf16", "rows": "*bf16", "order": "*i64", "weights": "*fp32", "grad_rows": "*bf16"}
_SIZES = {"tokens": "i32", "count": "i32", "width": "i32", "stride": "i32"}
_GATE = {"pre": "*bf16", "out": "*bf16", "count": "i32", "half": "i32", "stride": "i32"}
_GATE |= {"alpha": "fp32", "limit": "fp32", "shift": "fp32"}
_GATE_BACKWARD = _GATE | {"grad": "*bf16", "order": "*i64", "weights": "*fp32", "grad_pre": "*bf16"}
_OUTER_TYPES = {"x": "*bf16", "x_index": "*i64", "y": "*bf16", "y_index": "*bf16", "offsets": "*i32", "out": "*bf16"}
_OUTER_TYPES |= {name: "i32" for name in ("inner", "outer", "x_stride", "y_stride")}
_OUTER_TYPES |= {name: "i32" for name in ("out_group", "out_inner", "out_outer")}

COMPILED = [
    CompileCase(
        "spread",
        rows_triton.spread_kernel,
        _SPREAD,
        lambda of: {"TOP_K": 8, **_rows_tile(of)},
        _rows_options,
        _WIDTHS,
    ),
    CompileCase(
        "collect",
        rows_triton.collect_kernel,
        _COLLECT | _SIZES,
        lambda of: {"TOP_K": 8, "WEIGHTED": True, **_rows_tile(of)},
        _rows_options,
        _WIDTHS,
    ),
    CompileCase(
        "uncollect",
        rows_triton.uncollect_kernel,
        _UNCOLLECT | _SIZES | {"grad_weights": "*fp32", "grad_stride": "i32", "rows_stride": "i32"},
        lambda of: {"TOP_K": 8, **_rows_tile(of)},
        _rows_options,
        _WIDTHS,
    ),
    CompileCase(
        "take",
        rows_triton.take_kernel,
        _SPREAD | {"index": "*i64", "taken": "i32", "count": "i32"},
        lambda of: {"DIVISOR": 8, **_rows_tile(of)},
        _rows_options,
        _WIDTHS,
    ),
    CompileCase(
        "put", rows_triton.put_kernel, _SPREAD | {"index": "*i64", "count": "i32"}, _rows_tile, _rows_options, _WIDTHS
    ),
    CompileCase(
        "activate, SwiGLU",
        gate_triton.gate_kernel,
        _GATE,
        _gate_constants("silu", False, False),
        _gate_options,
        _WIDTHS,
    ),
    CompileCase(
        "activate_backward, SwiGLU",
        gate_triton.gate_backward_kernel,
        _GATE_BACKWARD | {"grad_weights": "*fp32"},
        _weighted(_gate_constants("silu", False, False)),
        _gate_options,
        _WIDTHS,
    ),
    CompileCase(
        "activate_backward, interleaved and limited",
        gate_triton.gate_backward_kernel,
        _GATE_BACKWARD | {"grad_weights": "*fp32"},
        _weighted(_gate_constants("silu", True, True)),
        _gate_options,
        _WIDTHS,
    ),
    CompileCase(
        "grouped_mm, bf16",
        grouped_mm_triton.grouped_mm_kernel,
        _mm("bf16"),
        lambda of: {**_MM, "w_inner": 1, **_tile(of.half)},
        _half,
        (*_WIDTHS, "w_group", "w_outer"),
    ),
    CompileCase(
        "grouped_mm, fp32",
        grouped_mm_triton.grouped_mm_kernel,
        _mm("fp32"),
        lambda of: {**_MM, "w_inner": 1, **_tile(of.single)},
        _single,
        (*_WIDTHS, "w_group", "w_outer"),
    ),
    CompileCase(
        "grouped_outer, bf16",
        grouped_mm_triton.grouped_outer_kernel,
        _OUTER_TYPES,
        lambda of: {**_OUTER, "out_outer": 1, **_tile(of.half_outer)},
        _half_outer,
        (*_WIDTHS, "out_group", "out_inner"),
    ),
    CompileCase(
        "grouped_sum",
        grouped_mm_triton.grouped_sum_kernel,
        _SPREAD | {"offsets": "*i32"},
        lambda of: {"ROWS": of.rows.rows, "COLUMNS": of.rows.columns},
        _rows_options,
        _WIDTHS,
    ),
]
