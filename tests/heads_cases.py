"""The cases of the layouts around Ulysses' exchange."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.triton_support import CompileCase, Drawn, InterpretCase
from turbo_compile.kernels import heads_triton
from turbo_compile.kernels.heads import pack_heads, pack_sequence, unpack_heads, unpack_sequence

_SIZES = {
    "ranks": st.integers(1, 3),
    "B": st.integers(0, 3),
    "S": st.integers(1, 9),
    "heads": st.lists(st.integers(1, 3), min_size=1, max_size=3),  # of each value, a rank
    "widths": st.lists(st.sampled_from([1, 4, 6, 16]), min_size=3, max_size=3),
    "split": st.booleans(),  # values with heads before tokens in memory
}


def _values(of: Drawn, S: int, ranks: int) -> list[Any]:
    """[B, S, H, D] each, laid out as drawn."""
    out = []
    for heads, D in zip(of.heads, of.widths, strict=False):
        H = heads * ranks
        out.append(of.floats(of.B, H, S, D).transpose(1, 2) if of.split else of.floats(of.B, S, H, D))
    return out


def _shapes(of: Drawn) -> list[tuple[int, int]]:
    return list(zip(of.heads, of.widths, strict=False))


def _messages(of: Drawn) -> Any:
    return of.floats(of.ranks, of.B, of.S, sum(heads * D for heads, D in _shapes(of)))


def _spread(name: str, pack: Any) -> Any:
    """Tensors as arguments by name, so that each is cast to fp64 for the reference."""
    return lambda ranks, **values: pack([values[key] for key in sorted(values)], ranks)


def _named(values: list[Any]) -> dict[str, Any]:
    return {f"value{i}": value for i, value in enumerate(values)}


INTERPRETED = [
    InterpretCase(
        "pack_heads",
        ("move_heads_kernel",),
        _SIZES,
        lambda of: {"ranks": of.ranks, **_named(_values(of, of.S, of.ranks))},
        _spread("pack_heads", pack_heads),
        differentiable=False,
    ),
    InterpretCase(
        "unpack_heads",
        (),
        _SIZES,
        lambda of: {"received": _messages(of), "shapes": _shapes(of)},
        lambda received, shapes: tuple(unpack_heads(received, shapes)),
        differentiable=False,
        examples=4,
    ),
    InterpretCase(
        "pack_sequence",
        ("move_heads_kernel",),
        _SIZES,
        lambda of: {"ranks": of.ranks, **_named(_values(of, of.S * of.ranks, 1))},
        _spread("pack_sequence", pack_sequence),
        differentiable=False,
    ),
    InterpretCase(
        "unpack_sequence",
        ("move_heads_kernel",),
        _SIZES,
        lambda of: {"received": _messages(of), "shapes": _shapes(of)},
        lambda received, shapes: tuple(unpack_sequence(received, shapes)),
        differentiable=False,
    ),
]

_TYPES = {"value": "*bf16", "message": "*bf16"} | {
    name: "i32" for name in ("tokens", "sequence", "heads", "share", "first", "width", "value_row", "value_token")
}
_TYPES |= {name: "i32" for name in ("value_head", "message_rank", "message_row")}
_ALIGNED = ("first", "width", "value_row", "value_token", "value_head", "message_rank", "message_row")


def _compiled(name: str, by_heads: bool, packs: bool) -> CompileCase:
    return CompileCase(
        name,
        heads_triton.move_heads_kernel,
        _TYPES,
        lambda of: {
            **{"D": 128, "BY_HEADS": by_heads, "PACKS": packs},
            **{"ROWS": of.heads.rows, "COLS": of.heads.columns},
        },
        lambda of: {"num_warps": of.heads.warps},
        _ALIGNED,
    )


COMPILED = [_compiled("pack_heads", True, True), _compiled("pack_sequence", False, True)]
COMPILED += [_compiled("unpack_sequence", True, False)]
