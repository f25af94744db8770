"""What the commands are told, as values that travel to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbo_compile.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """With a `cluster`, the page in `output` shows the predicted step too."""

    model: str
    plan: Plan
    output: Path | None
    cluster: str | None


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """`rows` of `seq` random tokens, on `seeds` different sets of random weights."""

    model: str | None
    plan: Plan
    backend: str
    tiny: bool
    rows: int
    seq: int
    seeds: int


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`batch` rows of `seq` tokens a step, over all ranks. `data` None: the text that comes with the package.

    `pack` joins documents in a row; else each has rows of its own, padded.
    """

    model: str | None
    data: Path | None
    plan: Plan
    backend: str
    steps: int
    lr: float
    batch: int
    seq: int
    pack: bool
    output: Path
    seed: int


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """`dtypes` empty: bf16 and fp32 on an accelerator, fp32 on a CPU. `quick`: fewer sizes and rounds."""

    output: Path
    dtypes: tuple[str, ...]
    quick: bool


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`base` holds what is not searched. `fixed` are choices already made. None: as the plan says."""

    model: str
    cluster: str | None
    gpus: int | None
    global_batch: int | None
    seq: int | None
    memory: float
    fixed: Mapping[str, Any]
    base: Plan


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """One plan to price. None: as the plan says."""

    model: str | None
    cluster: str | None
    gpus: int | None
    global_batch: int | None
    seq: int | None
    plan: Plan
