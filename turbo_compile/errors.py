"""Every error this package raises on purpose, sorted by who moves next."""

from __future__ import annotations


class TurboCompileError(Exception):
    """The base of all errors raised on purpose: catch this one to catch them all."""


class PlanError(TurboCompileError, ValueError):
    """The plan cannot be used as it is: edit it. `key` is the dotted plan key at fault, where one is to blame."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class CaptureError(TurboCompileError):
    """The model cannot be captured as one graph; the message names the line of the model that stopped it."""


class UnsupportedOp(TurboCompileError, NotImplementedError):
    """A rule is missing: an operator, boundary or switch of the model that this version does not know."""


class InvalidProgram(TurboCompileError):
    """A pass left a program that breaks a rule: a bug of this package, which names the pass, the node and the rule."""


class RankError(TurboCompileError):
    """Another rank failed; the message is the reason that rank left behind."""
