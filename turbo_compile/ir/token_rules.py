"""What each ATen op may do to values cut by token: a small rule for each kind of op, and a table of which op is which.

A dimension that carries the sequence symbol S is `before` x S x what follows: rows flattened from (B,S) are B x S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
import torch.fx as fx

from turbo_compile.ir.spelling import expression_of


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension `dim`, of `size`, is `before` x S x what follows; `before` is None where all tokens are alike."""

    dim: int
    size: sympy.Expr
    before: sympy.Expr | None


# How a value lies. "own": what a rank's tokens determine, without a row for each: how many rows an expert gets.
State = Cut | Literal["replicate", "partial", "own"]


@dataclass(frozen=True, slots=True)
class Op:
    """A call of an op: its arguments by name, how each tensor it reads lies, and the tensors it gives."""

    node: fx.Node
    symbol: sympy.Expr
    states: Mapping[Any, State]
    results: tuple[torch.Tensor, ...]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(packet_of(self.node), "__name__", self.node.target))

    @property
    def cuts(self) -> dict[Any, Cut]:
        return {node: state for node, state in self.states.items() if isinstance(state, Cut)}

    def cut(self, name: str) -> Cut | None:
        """How a tensor argument is cut, if it is."""
        return self.cuts.get(self.arguments[name])

    def dims(self) -> tuple[int, ...]:
        """The dimensions the op names; all, if it names none."""
        rank = next(iter(self.states)).meta["val"].dim()
        dims = self.arguments.get("dim", self.arguments.get("dims"))
        return tuple(dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank)))

    def number(self) -> str:
        """S may be a size, and sizes come in lists; by itself it is a number that values would depend on."""
        for each in (*self.node.args, *self.node.kwargs.values()):
            value = each.meta.get("val") if isinstance(each, fx.Node) else None
            if carries(value, self.symbol):
                return f"{self.name} computes with %{each.name}, which the number of tokens determines"  # type: ignore[union-attr]
        return ""


Rule = Callable[[Op], str]


# --- the rules: what an op breaks, or nothing ------------------------------------------------------------------------


def keeps(op: Op) -> str:
    """Nothing to ask but what holds for all ops: the result has the rows of what it was made from."""
    return ""


def makes(op: Op) -> str:
    """A constant, the same for every token."""
    return ""


def spreads(op: Op) -> str:
    """`expand`: one row may become every token's."""
    return ""


def slices(op: Op) -> str:
    (source,) = op.states
    whole = list(source.meta["val"].shape) == list(op.results[0].shape)
    return "" if whole else op.number()


def views(op: Op) -> str:
    before = before_view(op, op.results[0])
    if uneven(op.results, op.symbol):
        parts = [sympy.Rational(1, 2)]
    elif before is None:
        parts = []
    else:
        (dim,) = dims_of(op.results[0], op.symbol)
        parts = [before, expression_of(op.results[0].shape[dim]) / op.symbol / before]
    whole = all(part.as_numer_denom()[1] == 1 for part in parts)
    return "" if whole else f"{op.name} regroups tokens: a row of the result has parts of several"


def before_view(op: Op, value: torch.Tensor) -> sympy.Expr | None:
    """A view keeps all that comes before S in the flattened value; some of it may now be dimensions of its own."""
    cut, dims = op.cut("self"), dims_of(value, op.symbol)
    if cut is None or cut.before is None or not dims:
        return None
    outside = op.arguments["self"].meta["val"].shape[: cut.dim]
    return _product(outside) * cut.before / _product(value.shape[: dims[0]])


def along(op: Op) -> str:
    """Sums, scans, sorts: along any dimension but that of the tokens."""
    for cut in op.cuts.values():
        if cut.dim in op.dims():
            return f"{op.name} runs along tokens (dim {cut.dim}), of which a rank holds only some"
    return ""


def overwrites(op: Op) -> str:
    onto, source = op.cut("self"), op.cut("src")
    whole = onto is not None and source is not None and (onto.dim, onto.size) == (source.dim, source.size)
    return "" if whole else along(op)


def pads(op: Op) -> str:
    for node, cut in op.cuts.items():
        last = 2 * (node.meta["val"].dim() - 1 - cut.dim)  # pads come in pairs, from the last dimension on
        if any(pad != 0 for pad in op.arguments["pad"][last : last + 2]):
            return f"{op.name} pads or shifts tokens (dim {cut.dim}), of which a rank holds only some"
    return ""


def multiplies(op: Op) -> str:
    left, right = [each for each in op.node.args if isinstance(each, fx.Node)][-2:]
    for node, inner in ((left, -1), (right, -2)):
        cut = op.cuts.get(node)
        if cut is not None and cut.dim == node.meta["val"].dim() + inner:
            return f"{op.name} sums over tokens (dim {cut.dim} of %{node.name}), of which a rank holds only some"
    return ""


def looks_up(op: Op) -> str:
    """Tokens look rows of a table up, and are not looked up themselves."""
    table = op.cut("weight" if "weight" in op.arguments else "self")
    return "" if table is None or table.dim not in op.dims() else f"{op.name} picks tokens (dim {table.dim})"


def indexes(op: Op) -> str:
    table, indices = op.cut("self"), op.arguments["indices"]
    if any(each in op.cuts and each.meta["val"].dtype == torch.bool for each in indices):
        return f"{op.name} selects tokens by a mask"
    picked = table is not None and table.dim < len(indices) and indices[table.dim] is not None
    return f"{op.name} picks tokens (dim {table.dim})" if picked and table is not None else ""


def pairs(op: Op) -> str:
    """`gather`, `scatter`: within a token's row, or each token from a table that all have."""
    index = op.cut("index")
    if packet_of(op.node) is aten.gather and op.cut("self") is None and index is not None and index.dim in op.dims():
        return ""
    apart = len(op.cuts) == len(op.states) and len({cut.dim for cut in op.cuts.values()}) == 1
    return along(op) if apart else f"{op.name} takes values from one token to another"


def counts(op: Op) -> str:
    """Positions start anew on each rank. Only random numbers may be drawn by them: each rank has a seed of its own."""
    return "" if _is_counter(op.node) else f"{op.name} numbers tokens by their place; a rank's first is not token 0"


def _is_counter(node: fx.Node) -> bool:
    """Whether it is read as `counter_random` reads a counter: as two words of 32 bits, and both of them."""
    words = {(aten.bitwise_and.Scalar, 0xFFFFFFFF), (aten.__rshift__.Scalar, 32)}
    reads = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if rule_of(user) is views:
                waiting.append(user)
            else:
                reads.add((user.target, *user.args[1:]))
    return reads == words


# --- which op has which ----------------------------------------------------------------------------------------------

aten: Any = torch.ops.aten
_NAMES: tuple[tuple[Rule, str], ...] = (
    (keeps, "alias detach permute transpose t squeeze unsqueeze split split_with_sizes unbind select stack repeat"),
    (keeps, "copy _to_copy fill masked_fill view_as_real view_as_complex complex polar lift_fresh_copy"),
    (
        makes,
        "full zeros ones empty empty_strided empty_permuted scalar_tensor full_like zeros_like ones_like empty_like",
    ),
    (makes, "new_full new_zeros new_ones new_empty"),
    (spreads, "expand"),
    (views, "view _unsafe_view reshape"),
    (slices, "slice"),
    (along, "sum mean prod amax amin max min argmax argmin any all var var_mean std logsumexp linalg_vector_norm"),
    (along, "_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk kthvalue flip roll cat"),
    (overwrites, "slice_scatter select_scatter"),
    (pads, "constant_pad_nd"),
    (multiplies, "mm bmm addmm baddbmm"),
    (looks_up, "embedding index_select"),
    (indexes, "index"),
    (pairs, "gather scatter scatter_add scatter_reduce"),
    (counts, "arange"),
)
_RULES: dict[Any, Rule] = {getattr(aten, name): rule for rule, names in _NAMES for name in names.split()}
_RULES |= {torch.ops.prims.iota: counts, torch.ops.prims.rev: along}


def rule_of(node: fx.Node) -> Rule | None:
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return _RULES.get(packet_of(node), keeps if pointwise else None)


def packet_of(node: fx.Node) -> Any:
    """An op whatever its overload; None for what is no op."""
    return getattr(node.target, "overloadpacket", None)


# --- shapes ----------------------------------------------------------------------------------------------------------


def uneven(values: Iterable[torch.Tensor], symbol: sympy.Expr) -> str:
    """What is wrong with shapes: at most one dimension of a value is cut, and S divides it."""
    for value in values:
        dims = dims_of(value, symbol)
        if len(dims) > 1:
            return f"is tokens x tokens (dims {', '.join(map(str, dims))}), and a rank holds only some of either"
        for dim in dims:
            size = expression_of(value.shape[dim])
            if carries(size / symbol, symbol):
                return f"has {size} rows (dim {dim}), no multiple of the {symbol} tokens, so no rank's share is known"
    return ""


def dims_of(value: Any, symbol: sympy.Expr) -> list[int]:
    """The dimensions of a tensor that carry S; none for anything else."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [dim for dim, size in enumerate(shape) if carries(size, symbol)]


def carries(size: Any, symbol: sympy.Expr) -> bool:
    expression = expression_of(size)
    return isinstance(expression, sympy.Basic) and symbol in expression.free_symbols


def _product(sizes: Iterable[Any]) -> sympy.Expr:
    return sympy.Mul(*[expression_of(size) for size in sizes])
