"""Does a compiled model compute what the plain one does? Loss and every gradient, side by side, in one run.

report = check(lambda: Qwen3ForCausalLM(config), {"mesh": {"fsdp": 2}}, batch)
assert report.ok, report
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from turbo_compile.api import turbo_compile
from turbo_compile.dtypes import choose_dtypes
from turbo_compile.errors import TurboCompileError
from turbo_compile.parameters import full_tensor
from turbo_compile.plans.plan import Plan, PlanLike, environment
from turbo_compile.runtime import runtime_of

LOSS = "loss"
_VANISHING = 1e-8  # a reference gradient this small is rounding noise: compared absolutely,
_NOISE = 1e-7  # and allowed this much
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor compared with the reference, the worst over all steps and seeds.

    `error` is |ours - reference| / |reference| in the 2-norm; absolute when `vanishing`, where the reference is
    rounding noise. In low precision `eager` is the error of the eager model in that precision, and `ratio` how ours
    compares with it (geometric mean over steps and seeds).
    """

    fqn: str
    error: float
    vanishing: bool = False
    eager: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found. `rows` begin with the loss; `problems` are findings that no tolerance excuses."""

    rows: tuple[Row, ...]
    loss: float
    reference_loss: float
    tolerance: float
    ratio_limit: float
    problems: tuple[str, ...] = ()

    @property
    def worst(self) -> Row:
        """The row that is furthest out."""
        return max(self.rows, key=lambda row: row.error / _NOISE if row.vanishing else row.error / self.tolerance)

    @property
    def ratio(self) -> float | None:
        """In low precision: our distance from the reference over eager's, geometric mean over tensors; else None."""
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        return _geometric_mean(ratios) if ratios else None

    @property
    def ok(self) -> bool:
        if self.problems:
            return False
        if self.ratio is not None:
            return self.ratio <= self.ratio_limit
        return all(self._holds(row) for row in self.rows)

    def table(self, most: int = 40) -> Table:
        """The `most` worst rows, the loss first, for a terminal."""
        title = f"loss {self.loss:.6f}, reference {self.reference_loss:.6f}"
        low = self.ratio is not None
        table = Table("tensor", "error", *(("eager's", "ratio") if low else ()), title=title)
        for column in table.columns[1:]:
            column.justify = "right"
        ranked = sorted(self.rows[1:], key=lambda row: row.ratio or row.error, reverse=True)
        for row in (*self.rows[:1], *ranked[:most]):
            error = f"{row.error:.1e}" + (" abs" if row.vanishing else "")
            eager = f"{row.eager:.1e}" if row.eager is not None else ""
            ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
            table.add_row(
                row.fqn, error, *((eager, ratio) if low else ()), style="" if low or self._holds(row) else "red"
            )
        if len(ranked) > most:
            table.add_row(f"and {len(ranked) - most} more, all smaller", "")
        return table

    def verdict(self) -> str:
        word = "ok" if self.ok else "FAILED"
        if self.problems:
            return f"{word}: {'; '.join(self.problems)}"
        if self.ratio is not None:
            return f"{word}: {self.ratio:.2f} times as far from fp32 as eager is (limit {self.ratio_limit:g})"
        return f"{word}: worst is {self.worst.fqn} with {self.worst.error:.1e} (limit {self.tolerance:g})"

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self.table(), self.verdict())
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    def _holds(self, row: Row) -> bool:
        return row.error <= (_NOISE if row.vanishing else self.tolerance)


def check(
    model_factory: Callable[[], PreTrainedModel],
    plan: PlanLike,
    batch: Mapping[str, Any],
    *,
    backend: str = "eager",
    steps: int = 1,
    lr: float = 0.01,
    seeds: Sequence[int] = (0,),
    tolerance: float = 1e-5,
    ratio_limit: float = 1.25,
    dump: str | PathLike[str] | None = None,
) -> Report:
    """Train the model of `model_factory` as it is and compiled under `plan`, and compare loss and every gradient.

    Every rank calls it, with the same arguments: `batch` is the global one. The reference is the plain model on all
    rows, eager, in this process; the compiled model gets this rank's rows.

    Args:
        model_factory: makes the model, the same one each time under the same seed; dropout must be off, since the
            compiled model draws other masks.
        batch: keyword arguments of the model, with labels; the rows of each tensor are dealt out over dp x fsdp.
        steps: how many forwards and backwards on the batch, an SGD step of `lr` between.
        seeds: weights are made and compared for each; the model is compiled once.
        tolerance: the largest relative error of a loss or gradient.
        ratio_limit: for a plan that computes in bf16 or fp16, which no tolerance judges: how much further than the
            eager model in that dtype the gradients may be from the fp32 reference, geometric mean over tensors.

    Raises:
        TurboCompileError: the batch cannot be dealt out, or the factory makes another model each time.
    """
    if "labels" not in batch and "shift_labels" not in batch:
        raise TurboCompileError("check compares a loss: give the batch labels")
    comparison = _Comparison()
    plain = _without_idle_mask(batch)
    compiled = None
    for seed in seeds:
        reference, product, eager = _models(model_factory, plan, seed)
        if compiled is None:
            compiled = turbo_compile(product, plan, backend=backend, dump=dump)
        else:
            compiled.load_state_dict(product.state_dict())
        axes = runtime_of(compiled).axes
        rows = deal(batch, axes.rank // axes.sizes["sp"], axes.sizes["dp"] * axes.sizes["fsdp"])
        for step in range(steps):
            if step:
                for model in (reference, compiled, eager):
                    _descend(model, lr)
            ours, theirs = _measure(compiled, rows), _measure(reference, plain)
            comparison.add(ours, theirs, _measure(eager, plain) if eager is not None else None)
    return comparison.report(tolerance, ratio_limit)


def deal(batch: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """Part `index` of `count` of a global batch: a contiguous slice of its rows.

    Raises:
        TurboCompileError: the rows do not divide.
    """
    total = len(batch["input_ids"])
    if total % count:
        raise TurboCompileError(f"a batch of {total} rows does not divide over dp x fsdp = {count} ranks")
    if count > 1 and (flat := [key for key in batch if key.startswith("cu_seq_lens")]):
        raise TurboCompileError(f"{flat[0]} runs over all rows and cannot be dealt out; restart position_ids instead")
    share = total // count
    mine = slice(index * share, (index + 1) * share)
    return {
        key: value[mine] if isinstance(value, Tensor) and value.dim() and len(value) == total else value
        for key, value in batch.items()
    }


# --- one measurement -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measured:
    loss: Tensor
    gradients: dict[str, Tensor | None]


def _measure(model: PreTrainedModel, batch: Mapping[str, Any]) -> _Measured:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = {fqn: None if p.grad is None else full_tensor(p.grad) for fqn, p in model.named_parameters()}
    return _Measured(loss.detach(), gradients)


def _descend(model: PreTrainedModel | None, lr: float) -> None:
    if model is not None:
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr).step()


def _models(
    factory: Callable[[], PreTrainedModel], plan: PlanLike, seed: int
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel | None]:
    """The reference, the model to compile, and in low precision the eager model in the dtypes the plan computes in."""
    reference, product = _make(factory, seed), _make(factory, seed)
    pairs = zip(reference.named_parameters(), product.parameters(), strict=True)
    if different := [fqn for (fqn, p), q in pairs if not torch.equal(p, q)]:
        raise TurboCompileError(
            f"model_factory makes another {different[0]} each time; it must depend on the seed alone"
        )
    words = Plan.layers(environment(), None if plan == "auto" else plan).dtype
    compute = choose_dtypes(reference, words).compute
    if not any(dtype in _LOW for dtype in compute.values()):
        return reference, product, None
    eager = _make(factory, seed)
    for fqn, parameter in eager.named_parameters():
        parameter.data = parameter.data.to(compute[fqn])
    return reference.float(), product, eager


def _make(factory: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return factory().train()


def _without_idle_mask(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without an attention mask of ones, which would make transformers forget where documents end."""
    mask = batch.get("attention_mask")
    idle = isinstance(mask, Tensor) and bool(mask.all())
    return {key: value for key, value in batch.items() if not (idle and key == "attention_mask")}


# --- many measurements -----------------------------------------------------------------------------------------------


class _Comparison:
    """The errors found so far, by tensor, and the problems."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.losses: list[tuple[float, float]] = []
        self.problems: dict[str, None] = {}

    def add(self, ours: _Measured, reference: _Measured, eager: _Measured | None) -> None:
        self.losses.append((float(ours.loss), float(reference.loss)))
        everyone = _from_all_ranks(ours.loss)
        if any(loss != everyone[0] for loss in everyone):
            self._problem(f"ranks report different losses: {', '.join(f'{loss:.6f}' for loss in everyone)}")
        self._compare(LOSS, ours.loss, reference.loss, eager.loss if eager is not None else None)
        for fqn, theirs in reference.gradients.items():
            mine = ours.gradients.get(fqn)
            if mine is None or theirs is None:
                if mine is not None:
                    self._problem(f"{fqn} has a gradient, in the reference it has none")
                elif theirs is not None:
                    self._problem(f"{fqn} has no gradient, in the reference it has one")
                continue
            self._compare(fqn, mine, theirs, eager.gradients[fqn] if eager is not None else None)

    def _compare(self, fqn: str, ours: Tensor, reference: Tensor, eager: Tensor | None) -> None:
        if not bool(ours.isfinite().all()):
            self._problem(f"{fqn} is not finite")
        norm = float(reference.double().norm())
        vanishing = norm < _VANISHING
        scale = 1.0 if vanishing else norm
        error = _distance(ours, reference) / scale
        theirs = ratio = None
        if eager is not None:
            theirs = _distance(eager, reference) / scale
            if not vanishing and fqn != LOSS and error > 0 and theirs > 0:
                ratio = error / theirs
        self.rows.setdefault(fqn, []).append(Row(fqn, error, vanishing, theirs, ratio))

    def _problem(self, text: str) -> None:
        self.problems[text] = None

    def report(self, tolerance: float, ratio_limit: float) -> Report:
        loss, reference_loss = self.losses[-1]
        rows = tuple(_merged(found) for found in self.rows.values())
        return Report(rows, loss, reference_loss, tolerance, ratio_limit, tuple(self.problems))


def _merged(rows: Sequence[Row]) -> Row:
    worst = max(rows, key=lambda row: row.error)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return Row(worst.fqn, worst.error, worst.vanishing, worst.eager, _geometric_mean(ratios) if ratios else None)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def _from_all_ranks(value: Tensor) -> list[float]:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return [float(each) for each in everyone]


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
