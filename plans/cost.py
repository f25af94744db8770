"""What a model costs, read from its captured program: operations, bytes and saved values of each segment, by B and S.

A `ModelCost` is plain data: it can be kept as JSON, and `sizes(B, S)` evaluates every expression in it at once. How
the numbers are read from a program is in `turbo_compile.plans.reading`; what they take on a cluster in `timeline`.

Under tensor parallelism a block alternates between values every rank holds ("outer": the residual stream) and values
cut over `tp` ("inner": heads, and the wide part of an MLP), so bytes are kept apart by that. `Cut` says what `tp` does
to a matmul: "columns" of its weight, its "rows", or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import sympy

Expr = str  # of B (rows) and S (tokens a row), in sympy's spelling
Cut = Literal["columns", "rows", "none"]
B, S = sympy.symbols("B S", positive=True, integer=True)

# What is kept for backward: by our partitions, or by eager autograd (`eager`), or by autograd over the usual fused
# kernels (`fused`: one each for a norm, an activation, a rotary embedding).
MODES = ("none", "selective", "full", "eager", "fused")


@dataclass(frozen=True, slots=True)
class Matmul:
    """rows x inner @ inner x columns. With `experts`, the rows are spread over so many weights of that shape."""

    rows: Expr
    inner: int
    columns: int
    cut: Cut = "none"
    experts: int = 0
    trained: bool = True  # the weight gets a gradient, so backward is two products
    batch: int = 1  # independent products of this shape


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled dot products over rows of S tokens: `heads` of `width`, values of `value_width`; None: no window."""

    heads: int
    groups: int
    width: int
    value_width: int
    window: int | None = None
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes kept from forward to backward, and what backward computes again, as fractions of the forward's work."""

    outer: Expr
    inner: Expr
    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Bytes read and written by everything but matmuls and attention, and the kernels that takes."""

    outer: Expr
    inner: Expr
    kernels: int


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """One different stretch of the model. `eager` and `fused` are its elementwise work as written, and after fusion.

    `saved` goes by MODES. `transient` is the most that lives inside at once beyond inputs and saved values, forward
    and backward. `dispatched` are the bytes one exchange of routed rows moves. `logits` counts the elements of the
    scores over the vocabulary, if they are made here.
    """

    name: str
    matmuls: tuple[Matmul, ...]
    attentions: tuple[Attention, ...]
    eager: Elementwise
    fused: Elementwise
    saved: Mapping[str, Saved]
    transient: Expr
    output: Expr
    dispatched: Expr = "0"
    logits: Expr = "0"
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Parameters that travel together: elements of dense ones and of routed experts', and how many tensors."""

    name: str
    dense: int
    experts: int
    tensors: int
    trained: int


@dataclass(frozen=True, slots=True)
class CallCost:
    """One use of a segment: the module it stands for, and the groups it reads. `block`: a decoder block."""

    fqn: str
    segment: str
    groups: tuple[str, ...]
    block: bool


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A whole model. `experts` and `top_k` are 0 where every parameter is used for every token."""

    name: str
    segments: Mapping[str, SegmentCost]
    groups: Mapping[str, GroupCost]
    calls: tuple[CallCost, ...]
    hidden: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    element_bytes: int = 2  # of the compute dtype the program was captured in

    @property
    def parameters(self) -> int:
        return sum(group.dense + group.experts for group in self.groups.values())

    @property
    def active_parameters(self) -> int:
        """Those one token passes through."""
        routed = sum(group.experts for group in self.groups.values())
        share = self.top_k / self.experts if self.experts else 0.0
        return sum(group.dense for group in self.groups.values()) + int(routed * share)

    @property
    def expert_parameters(self) -> int:
        return sum(group.experts for group in self.groups.values())

    @property
    def blocks(self) -> tuple[CallCost, ...]:
        return tuple(call for call in self.calls if call.block)

    def group_of(self, call: CallCost) -> GroupCost:
        """Everything a call gathers, as one."""
        found = [self.groups[name] for name in call.groups]
        return GroupCost(
            call.fqn,
            sum(group.dense for group in found),
            sum(group.experts for group in found),
            sum(group.tensors for group in found),
            sum(group.trained for group in found),
        )

    def sizes(self, rows: float, length: float) -> Mapping[str, SegmentSizes]:
        """Every expression at B=rows, S=length, by segment. Cached: a search asks for few different shapes."""
        return _sizes(_table(self), rows, length)

    def matmul_flops(self, rows: float, length: float) -> float:
        """Of one forward."""
        sizes = self.sizes(rows, length)
        return sum(
            2.0 * m.rows * m.inner * m.columns * m.batch for call in self.calls for m in sizes[call.segment].matmuls
        )

    def attention_flops(self, rows: float, length: float) -> float:
        """Of one forward, causal rows as half."""
        total = 0.0
        for call in self.calls:
            for each in self.segments[call.segment].attentions:
                total += attention_flops(each, rows, length)
        return total

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelCost:
        data = json.loads(text)
        segments = {name: _segment(each) for name, each in data.pop("segments").items()}
        groups = {name: GroupCost(**each) for name, each in data.pop("groups").items()}
        calls = tuple(CallCost(**(each | {"groups": tuple(each["groups"])})) for each in data.pop("calls"))
        return cls(segments=segments, groups=groups, calls=calls, **data)


@dataclass(frozen=True, slots=True)
class MatmulSize:
    """A `Matmul` at given B and S."""

    rows: float
    inner: int
    columns: int
    cut: Cut
    experts: int
    trained: bool
    batch: int


@dataclass(frozen=True, slots=True)
class SavedSize:
    outer: float
    inner: float
    matmul: float
    attention: float
    elementwise: float


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """A `SegmentCost` at given B and S: bytes and elements as numbers."""

    matmuls: tuple[MatmulSize, ...]
    attentions: tuple[Attention, ...]
    eager: tuple[float, float, int]
    fused: tuple[float, float, int]
    saved: Mapping[str, SavedSize]
    transient: float
    output: float
    dispatched: float
    logits: float


def attention_flops(attention: Attention, rows: float, length: float, causal_half: bool = True) -> float:
    """Forward multiply-adds counted as 2; backward is 2.5 times this. A causal row is half of a full one."""
    if attention.window is not None and attention.window < length:
        pairs = attention.window * length - attention.window**2 / 2
    else:
        pairs = length * length / (2 if attention.causal and causal_half else 1)
    return 2.0 * rows * attention.heads * pairs * (attention.width + attention.value_width)


class _Table:
    """Every expression of a model as one compiled function of B and S."""

    __slots__ = ("evaluate", "model")

    def __init__(self, model: ModelCost) -> None:
        self.model = model
        expressions = [expression for segment in model.segments.values() for expression in _expressions(segment)]
        parsed = [sympy.sympify(expression, locals={"B": B, "S": S}) for expression in expressions]
        self.evaluate = sympy.lambdify((B, S), parsed, modules="math", cse=True)


_TABLES: dict[int, _Table] = {}  # keeps its models alive, so an id is never reused


def _table(model: ModelCost) -> _Table:
    """Compiled once a model. By identity: a model holds mappings, and hashing it would cost more than the lookup."""
    found = _TABLES.get(id(model))
    if found is None or found.model is not model:
        found = _TABLES[id(model)] = _Table(model)
    return found


@lru_cache(maxsize=4096)
def _sizes(table: _Table, rows: float, length: float) -> Mapping[str, SegmentSizes]:
    values = iter(table.evaluate(rows, length))
    return {name: _sized(segment, values) for name, segment in table.model.segments.items()}


def _expressions(segment: SegmentCost) -> list[Expr]:
    """In the order `_sized` takes them."""
    found = [each.rows for each in segment.matmuls]
    for work in (segment.eager, segment.fused):
        found += [work.outer, work.inner]
    for mode in MODES:
        found += [segment.saved[mode].outer, segment.saved[mode].inner]
    return [*found, segment.transient, segment.output, segment.dispatched, segment.logits]


def _sized(segment: SegmentCost, values: Any) -> SegmentSizes:
    matmuls = tuple(
        MatmulSize(float(next(values)), m.inner, m.columns, m.cut, m.experts, m.trained, m.batch)
        for m in segment.matmuls
    )
    work = [(float(next(values)), float(next(values)), each.kernels) for each in (segment.eager, segment.fused)]
    saved = {}
    for mode in MODES:
        kept = segment.saved[mode]
        saved[mode] = SavedSize(float(next(values)), float(next(values)), kept.matmul, kept.attention, kept.elementwise)
    rest = [float(next(values)) for _ in range(4)]
    return SegmentSizes(matmuls, segment.attentions, work[0], work[1], saved, *rest)


def _segment(data: dict[str, Any]) -> SegmentCost:
    data["matmuls"] = tuple(Matmul(**each) for each in data["matmuls"])
    data["attentions"] = tuple(Attention(**each) for each in data["attentions"])
    data["eager"], data["fused"] = Elementwise(**data["eager"]), Elementwise(**data["fused"])
    data["saved"] = {mode: Saved(**each) for mode, each in data["saved"].items()}
    return SegmentCost(**data)
