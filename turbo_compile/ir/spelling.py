"""How values are spelled in text: short dtypes, sizes in B and S, bytes with a unit; the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch

from turbo_compile.ir.program import Parameter, Program, StepProgram

_DTYPES = {
    torch.bool: "bool",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Spelling:
    """Spells the sizes of one program: B rows, S tokens (S/4 in one of 4 chunks), any other n1, n2 by first use."""

    def __init__(self, program: Program | StepProgram) -> None:
        self.symbols: dict[sympy.Basic, sympy.Expr] = {}
        self.others = 0
        whole, length = program.sequence_symbol, sympy.Symbol("S")
        if program.sliced is not None:
            self._name(program.sequence_symbol, length / program.sliced.ranks)
            whole = program.sliced.whole
        self._name(program.batch_symbol, sympy.Symbol("B"))
        self._name(whole, length)

    def _name(self, symbol: sympy.Expr, name: sympy.Expr) -> None:
        if symbol.is_Symbol:
            self.symbols[symbol] = name

    def size(self, size: Any) -> str:
        """One size, or whatever else a graph computes sizes with."""
        expression = expression_of(size)
        if not isinstance(expression, sympy.Basic):
            return str(expression)
        return str(self._renamed(expression))

    def type(self, value: Any) -> str:
        """`bf16[B, S, 128]` for a tensor, its size for an integer."""
        if isinstance(value, torch.Tensor):
            return f"{dtype_name(value.dtype)}[{', '.join(self.size(dim) for dim in value.shape)}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.type(item) for item in value)})"
        return self.size(value)

    def bytes(self, tensors: Iterable[torch.Tensor]) -> sympy.Expr:
        """The bytes of tensors together, in B and S."""
        total = sympy.Integer(0)
        for tensor in tensors:
            sizes = [self._renamed(sympy.sympify(expression_of(dim))) for dim in tensor.shape]
            total += sympy.Mul(tensor.dtype.itemsize, *sizes)
        return sympy.expand(total)

    def _renamed(self, expression: sympy.Basic) -> Any:
        for symbol in sorted(expression.free_symbols - set(self.symbols), key=str):
            self.others += 1
            self.symbols[symbol] = sympy.Symbol(f"n{self.others}")
        return expression.xreplace(self.symbols)


def expression_of(size: Any) -> Any:
    """The sympy expression behind a symbolic size; anything else as it is. Comparing these adds no guard."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def human_bytes(count: float) -> str:
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def group_size(parameters: Iterable[Parameter]) -> str:
    """`9 params, bf16 137.0 MiB`."""
    members = list(parameters)
    dtypes = "+".join(dict.fromkeys(dtype_name(parameter.dtype) for parameter in members))
    total = human_bytes(sum(parameter.numel * parameter.dtype.itemsize for parameter in members))
    return f"{len(members)} param{'s' * (len(members) != 1)}, {dtypes} {total}"


def gradient_size(parameters: Iterable[Parameter]) -> str:
    """`9 gradients, 71.8 M elements`: their dtype on the wire is the plan's, not the program's."""
    members = list(parameters)
    total = sum(parameter.numel for parameter in members)
    scale, unit = next((pair for pair in ((10**9, " G"), (10**6, " M"), (10**3, " k")) if total >= pair[0]), (1, ""))
    count = f"{total / scale:.1f}{unit}" if unit else f"{total}"
    return f"{len(members)} gradient{'s' * (len(members) != 1)}, {count} elements"


def symbolic_bytes(total: sympy.Expr) -> str:
    """`1.5 KiB/token + 12 B`: bytes that grow with B*S, and what is left, a term each."""
    token = sympy.Symbol("B") * sympy.Symbol("S")
    if total == 0:
        return "0 B"
    terms = sorted((term.as_coeff_Mul()[::-1] for term in sympy.Add.make_args(total)), key=str)
    parts = []
    for rest, count in sorted(terms, key=lambda term: (term[0] != token, term[0] == 1)):
        size = human_bytes(float(count))
        parts.append(size if rest == 1 else f"{size}/token" if rest == token else f"{size} x {rest}")
    return " + ".join(parts)
