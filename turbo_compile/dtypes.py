"""Which dtype each parameter is held, used and reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from turbo_compile.huggingface import compute_dtypes
from turbo_compile.plans.sections import DType

WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """By FQN: `compute` as gathered and used, `master` as held and trained. Gradients are summed in `reduce`."""

    compute: dict[str, torch.dtype]
    master: dict[str, torch.dtype]
    reduce: torch.dtype


def choose_dtypes(model: PreTrainedModel, words: DType) -> Dtypes:
    """The dtypes a plan's words mean for `model`: `model` is the dtype its weights came in."""
    came = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    compute = compute_dtypes(model, WORDS.get(words.compute))
    master = {
        name: WORDS[words.master] if words.master in WORDS and dtype.is_floating_point else dtype
        for name, dtype in came.items()
    }
    double = any(dtype == torch.float64 for dtype in (*compute.values(), *master.values()))
    automatic = torch.float64 if double else torch.float32
    return Dtypes(compute, master, WORDS.get(words.reduce, automatic))
