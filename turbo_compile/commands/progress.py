"""A training run as it goes: a bar on a terminal, a line now and then in a log, nothing on other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

_LINES = 10  # in a log


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: its place (from 1), loss, and tokens a second over all ranks."""

    step: int
    loss: float
    tokens_per_s: float
    peak_bytes: int

    def __str__(self) -> str:
        speed = f"{self.tokens_per_s:,.0f} tokens/s"
        return f"loss {self.loss:.4f}  {speed:>16}  peak {self.peak_bytes / 2**30:.2f} GiB a rank"


class Display(Protocol):
    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None: ...

    def show(self, measured: Measured) -> None: ...


def open_display(steps: int, *, shown: bool) -> Display:
    """What suits the place: `shown` on one rank only."""
    if not shown:
        return _Silent()
    console = Console()
    return _Bar(console, steps) if console.is_terminal else _Lines(console, steps)


class _Bar:
    def __init__(self, console: Console, steps: int) -> None:
        columns = (
            SpinnerColumn(),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=steps)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def show(self, measured: Measured) -> None:
        self.progress.update(self.task, completed=measured.step, description=str(measured))


class _Lines:
    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def show(self, measured: Measured) -> None:
        if measured.step == 1 or measured.step * _LINES // self.steps > (measured.step - 1) * _LINES // self.steps:
            self.say(f"step {measured.step:>{len(str(self.steps))}}/{self.steps}  {measured}")


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def show(self, measured: Measured) -> None:
        pass
