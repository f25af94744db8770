"""Compile an unmodified Hugging Face model and a plan into the same model, trained in parallel.

    model = turbo_compile(model, plan)
    loss = model(**batch).loss; loss.backward(); optimizer.step()

Names resolve on first use, so that importing an inner module never pulls in transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbo_compile.api import turbo_compile
    from turbo_compile.errors import CaptureError, InvalidProgram, PlanError, TurboCompileError, UnsupportedOp
    from turbo_compile.plans.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "InvalidProgram",
    "Plan",
    "PlanError",
    "TurboCompileError",
    "UnsupportedOp",
    "turbo_compile",
]

_HOME = {
    "CaptureError": "turbo_compile.errors",
    "InvalidProgram": "turbo_compile.errors",
    "Plan": "turbo_compile.plans.plan",
    "PlanError": "turbo_compile.errors",
    "TurboCompileError": "turbo_compile.errors",
    "UnsupportedOp": "turbo_compile.errors",
    "turbo_compile": "turbo_compile.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next use costs a dictionary look-up
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
