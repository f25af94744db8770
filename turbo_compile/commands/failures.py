"""How a local rank's failure is told to the command that started it."""

from __future__ import annotations


class RankFailed(Exception):
    """A local rank failed. `expected` tells an error of this package, whose message is enough; `details` is where."""

    def __init__(self, rank: int, message: str, details: str, expected: bool) -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details
        self.expected = expected
