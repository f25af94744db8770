"""`turbo-compile check`: a model and a plan, compared with the plain model on random tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from turbo_compile.commands.launch import local_device
from turbo_compile.commands.models import Source, build_model, build_on_meta, find_model, tiny, without_dropout
from turbo_compile.commands.options import CheckOptions
from turbo_compile.errors import TurboCompileError
from turbo_compile.testing import Report, check

_MOST = 2 * 10**9  # parameters: beyond it two models, fp32, with gradients do not fit a small machine


def check_model(options: CheckOptions) -> Report:
    """What one rank does; every rank returns the same report."""
    source = _source(options)
    device = local_device()

    def factory() -> PreTrainedModel:
        return build_model(source, torch.float32).to(device)

    batch = random_batch(source.config.get_text_config().vocab_size, options.rows, options.seq, device)
    return check(factory, options.plan, batch, backend=options.backend, seeds=range(options.seeds))


def random_batch(vocabulary: int, rows: int, seq: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows of random tokens; each row has fewer valid labels than the one before, so that ranks are unequal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (rows, seq), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row * seq // (2 * rows)] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def _source(options: CheckOptions) -> Source:
    source = find_model(options.model)
    if options.tiny:
        return replace(source, config=tiny(source.config), weights=None)
    count = sum(p.numel() for p in build_on_meta(source).parameters())
    if count > _MOST:
        raise TurboCompileError(
            f"{source.name} has {count / 1e9:.1f} billion parameters, too many to compare on each rank; "
            "--tiny checks the same architecture at toy size"
        )
    return replace(source, config=without_dropout(source.config))
