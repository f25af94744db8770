"""What optimizers may do with a compiled model's parameters, checked when they step.

An optimizer made before `turbo_compile` holds dead parameters; one that cannot work on shards, or a step while
gradients wait in `no_sync`, would train something else than asked. Each is an error at the step, before any harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Adafactor, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from turbo_compile.errors import TurboCompileError

_DEAD = "_turbo_compile_dead"  # attributes of the tensors themselves: weak references would forbid `model.to`
_LIVE = "_turbo_compile_live"
_BREAK_ON_SHARDS = {
    Adafactor: "it factors a second moment over rows that live on other ranks",
    Rprop: "it compares signs through an operator that shards do not have",
}
_installed = False


def watch(
    dead: Iterable[Tensor], live: Iterable[Tensor], pending: Callable[[], bool], drop: Callable[[], None]
) -> None:
    """Check every optimizer step against these parameters; an optimizer that zeroes `live` gradients calls `drop`."""
    for tensor in dead:
        setattr(tensor, _DEAD, True)
    for tensor in live:
        setattr(tensor, _LIVE, (pending, drop))
    _install()


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_before_step)
    zero_grad = Optimizer.zero_grad

    def zero_and_drop(self: Optimizer, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        for drop in {drop for parameter in _parameters(self) if (drop := _live(parameter, 1))}:
            drop()

    Optimizer.zero_grad = zero_and_drop  # type: ignore[method-assign]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    name = type(optimizer).__name__
    parameters = list(_parameters(optimizer))
    if any(getattr(p, _DEAD, False) for p in parameters):
        raise TurboCompileError(
            f"this {name} was made before turbo_compile and holds parameters the model no longer has; "
            "make it from model.parameters() after turbo_compile"
        )
    owned = [entry for p in parameters if (entry := _live(p, 0))]
    if not owned:
        return
    for kind, reason in _BREAK_ON_SHARDS.items():
        if isinstance(optimizer, kind):
            raise TurboCompileError(f"{name} does not work on sharded parameters: {reason}; AdamW, Adagrad or Muon do")
    if any(pending() for pending in set(owned)):
        raise TurboCompileError(
            f"{name}.step() while gradients of no_sync are pending: "
            "run the last backward outside no_sync, or zero_grad()"
        )


def _live(parameter: Tensor, part: int) -> Any:
    entry = getattr(parameter, _LIVE, None)
    return entry[part] if entry is not None else None


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
