"""What the commands do. Names resolve on first use: `--help` and a wrong option answer before torch is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbo_compile.commands.inspecting import inspect_model
    from turbo_compile.commands.launch import on_ranks
    from turbo_compile.commands.predicting import explain_plan, predict_plan
    from turbo_compile.commands.report import report
    from turbo_compile.commands.searching import search_model
    from turbo_compile.commands.tables import as_json, print_cluster, print_plan, print_search

__all__ = [
    "as_json",
    "explain_plan",
    "inspect_model",
    "on_ranks",
    "predict_plan",
    "print_cluster",
    "print_plan",
    "print_search",
    "report",
    "search_model",
]

_HOME = {
    "as_json": "turbo_compile.commands.tables",
    "explain_plan": "turbo_compile.commands.predicting",
    "inspect_model": "turbo_compile.commands.inspecting",
    "on_ranks": "turbo_compile.commands.launch",
    "predict_plan": "turbo_compile.commands.predicting",
    "print_cluster": "turbo_compile.commands.tables",
    "print_plan": "turbo_compile.commands.tables",
    "print_search": "turbo_compile.commands.tables",
    "report": "turbo_compile.commands.report",
    "search_model": "turbo_compile.commands.searching",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
