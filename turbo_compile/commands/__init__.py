"""What the commands do. Names resolve on first use: `--help` and a wrong option answer before torch is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbo_compile.commands.inspecting import inspect_model
    from turbo_compile.commands.launch import on_ranks

__all__ = ["inspect_model", "on_ranks"]

_HOME = {
    "inspect_model": "turbo_compile.commands.inspecting",
    "on_ranks": "turbo_compile.commands.launch",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
