"""`turbo-compile train`: text in, a Hugging Face checkpoint out, the loss shown on the way."""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils import logging

from turbo_compile.api import turbo_compile
from turbo_compile.commands.corpus import Corpus, byte_tokenizer, pack, pad, read_documents
from turbo_compile.commands.launch import local_device
from turbo_compile.commands.models import DATA, build_model, find_model, load_tokenizer
from turbo_compile.commands.options import TrainOptions
from turbo_compile.commands.progress import Measured, open_display
from turbo_compile.errors import PlanError, TurboCompileError
from turbo_compile.testing import deal

_CLIP = 1.0
_TEXT = "pride_and_prejudice.txt"


@dataclass(frozen=True, slots=True)
class Trained:
    """How a run went: `tokens_per_s` over all ranks, median of the steps."""

    first_loss: float
    last_loss: float
    tokens_per_s: float
    compile_s: float
    peak_bytes: int
    checkpoint: Path


def train_model(options: TrainOptions) -> Trained:
    """What one rank does; every rank calls it with the same options."""
    _make_directory(options.output)
    logging.disable_progress_bar()  # transformers' own, which would break ours
    device = local_device()
    source = find_model(options.model)
    tokenizer = load_tokenizer(source) or byte_tokenizer()
    feed = _Feed(_corpus(options, tokenizer, source.config.get_text_config().vocab_size), options, device)
    torch.manual_seed(options.seed)
    model = build_model(source).to(device).train()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    with open_display(options.steps, shown=_first_rank()) as display:
        display.say(f"compiling {source.name}, {millions:.1f} million parameters, for {options.plan.mesh.world} ranks")
        began = time.perf_counter()
        model = turbo_compile(model, options.plan, backend=options.backend, example=feed.example())
        compile_s = time.perf_counter() - began
        seen = [_shown(each, display) for each in _steps(model, feed, options)]
        display.say(f"writing {options.output}")
        model.save_pretrained(options.output)
        if _first_rank():
            tokenizer.save_pretrained(options.output)
    speed = statistics.median(each.tokens_per_s for each in seen)
    return Trained(seen[0].loss, seen[-1].loss, speed, compile_s, seen[-1].peak_bytes, options.output)


def _steps(model: Any, feed: _Feed, options: TrainOptions) -> Iterator[Measured]:
    """AdamW with a linear warm-up over a tenth of the steps and gradients clipped at 1."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, options.steps // 10)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    for step in range(options.steps):
        began = time.perf_counter()
        batch = feed.batch(step)
        loss = _accumulate(model, feed.micro_batches(batch))
        model.clip_grad_norm_(_CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if not math.isfinite(loss):
            raise TurboCompileError(f"the loss is {loss} at step {step + 1}; a smaller --lr may help")
        seconds = time.perf_counter() - began
        yield Measured(step + 1, loss, _tokens(batch) / seconds, _peak_bytes(feed.device))


def _accumulate(model: Any, micro_batches: list[dict[str, Any]]) -> float:
    """The loss of one step, its gradients left in the parameters, reduced once."""
    total = 0.0
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(**batch).loss
            loss.backward()
        total += float(loss.detach())
    return total


class _Feed:
    """This rank's part of each step's batch, in micro-batches of the size the plan says."""

    def __init__(self, corpus: Corpus, options: TrainOptions, device: torch.device) -> None:
        self.corpus = corpus
        self.options = options
        self.device = device
        mesh, rank = options.plan.mesh, dist.get_rank() if dist.is_initialized() else 0
        self.ranks = mesh.dp * mesh.fsdp
        self.index = rank // mesh.sp
        self.rows = self._micro_rows()
        self.example()  # what does not fit is said now, not after compilation

    def _micro_rows(self) -> int:
        batch, micro = self.options.batch, self.options.plan.batch.micro
        if batch % (self.ranks * (micro or 1)):
            rows = f"micro x dp x fsdp = {micro} x {self.ranks}" if micro else f"dp x fsdp = {self.ranks}"
            raise PlanError(f"--batch {batch} is not a multiple of {rows}", key="batch.micro")
        return micro or batch // self.ranks

    def batch(self, step: int) -> dict[str, Tensor]:
        """All ranks' rows together."""
        return self.corpus.batch(step, self.options.batch, self.options.seed)

    def micro_batches(self, whole: dict[str, Tensor]) -> list[dict[str, Any]]:
        mine = {key: value.to(self.device) for key, value in deal(whole, self.index, self.ranks).items()}
        count = self.options.batch // self.ranks // self.rows
        if count == 1:
            return [mine]
        tokens = int((whole["labels"][:, 1:] != -100).sum())
        parts = zip(*(value.chunk(count) for value in mine.values()), strict=True)
        return [{**dict(zip(mine, part, strict=True)), "num_items_in_batch": tokens} for part in parts]

    def example(self) -> dict[str, Any]:
        return self.micro_batches(self.batch(0))[0]


def _corpus(options: TrainOptions, tokenizer: Any, vocabulary: int) -> Corpus:
    documents = read_documents(options.data or Path(str(DATA / _TEXT)))
    make = pack if options.pack else pad
    return make(documents, tokenizer, vocabulary, options.seq)


def _tokens(batch: dict[str, Tensor]) -> int:
    """How many tokens a batch has, padding left out."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TurboCompileError(f"cannot write to --output {path}: {error.strerror}") from None


def _shown(measured: Measured, display: Any) -> Measured:
    display.show(measured)
    return measured


def _first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _peak_bytes(device: torch.device) -> int:
    """The most this rank ever held: on an accelerator of tensors, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
