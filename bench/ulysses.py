"""Sequence parallelism: what an attention sends, what a rank saves, and what a step takes.

    torchrun --nproc_per_node 4 bench/ulysses.py --rounds 0     # bytes sent and saved at sp = 1, 2 and 4
    torchrun --nproc_per_node 2 bench/ulysses.py                # the same at sp = 1 and 2, and step times

Bytes sent are those of the messages handed to the process group, a rank's own share left out, beside the formula: q, k,
v and the output of a rank's tokens, of which (P-1)/P leaves it, and the same again in backward. Bytes saved are those
of the distinct storages that forward keeps for backward. Times are medians of paired rounds at equal tokens: of sp, of
fsdp, and of a minimal hand-written Ulysses over transformers' eager model with FSDP2, which computes the same.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import qwen3
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import ModelOutput

from turbo_compile import turbo_compile

VOCABULARY = 2048  # small, so that blocks are most of what is saved
Step = Callable[[], None]


def ours(layers: int, mesh: dict[str, int]) -> nn.Module:
    return turbo_compile(qwen3(layers, vocabulary=VOCABULARY), {"mesh": mesh, "recompute": "none"})


def rows_of(length: int) -> Tensor:
    """The global batch, one row a rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (dist.get_world_size(), length), generator=generator)


# --- what is sent, and what is saved ---------------------------------------------------------------------------------


@contextlib.contextmanager
def messages(of_rank: int) -> Iterator[list[int]]:
    """The bytes that leave a rank of an sp group in each exchange of attention."""
    sent: list[int] = []
    operators = torch.ops._c10d_functional
    exchange = operators.all_to_all_single

    def counted(message: Tensor, received: list[int], shares: list[int], group: str) -> Tensor:
        if message.dim() == 4:  # gradients travel flat
            each = message.nbytes // sum(shares)
            sent.append(each * (sum(shares) - shares[of_rank]))
        return exchange(message, received, shares, group)

    with mock.patch.object(operators, "all_to_all_single", counted):
        yield sent


def formula(config: Any, tokens: int, ranks: int) -> int:
    """Bytes that leave a rank at one attention, forward and backward, for fp32 and a rank's `tokens`."""
    numbers = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    return 2 * 4 * tokens * numbers * (ranks - 1) // ranks


def saved_bytes(loss: Tensor) -> int:
    """What forward keeps for backward, each storage once."""
    bundles = loss.grad_fn.state.bundles.values()
    tensors = [value for bundle in bundles for value in bundle if isinstance(value, Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in (t.untyped_storage() for t in tensors)}.values())


def sizes(layers: int, length: int) -> Table:
    """One row a rank, sp = 1, 2, ... up to the world."""
    world = dist.get_world_size()
    table = Table("sp", title=f"one row of {length} tokens for each rank of the sp group, a rank")
    for name in ("messages", "MiB sent an attention", "formula", "saved MiB", "saved / sp = 1"):
        table.add_column(name, justify="right")
    first = 0
    for ranks in (each for each in range(1, world + 1) if world % each == 0):
        model = ours(layers, {"dp": world // ranks, "sp": ranks})
        ids = rows_of(length)[:1]
        with messages(dist.get_rank() % ranks) as sent:
            loss = model(input_ids=ids, labels=ids).loss
            saved = saved_bytes(loss)
            loss.backward()
        first = first or saved
        expected = formula(model.config, ids.numel() // ranks, ranks)
        table.add_row(
            str(ranks),
            str(len(sent)),
            f"{sum(sent) / layers / 2**20:.3f}",
            f"{expected / 2**20:.3f}",
            f"{saved / 2**20:.1f}",
            f"{saved / first:.3f}",
        )
    return table


# --- Ulysses by hand -------------------------------------------------------------------------------------------------


def exchanged(value: Tensor, split: int, join: int) -> Tensor:
    """`value` cut along `split`, a part to each rank, and what came from each side by side along `join`."""
    ranks = dist.get_world_size()
    message = torch.stack(value.chunk(ranks, dim=split)).flatten(0, 1).contiguous()
    shares = [len(message) // ranks] * ranks
    received = all_to_all_single_autograd(message, shares, shares, dist.group.WORLD)
    return torch.cat(received.chunk(ranks), dim=join)


def ulysses_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """q, k, v [B, H, S / ranks, D] -> the output [B, S / ranks, H, D]."""
    q, k, v = (exchanged(each, 1, 2) for each in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"], enable_gqa=True)
    return exchanged(out.transpose(1, 2), 1, 2), None


class ByHand(nn.Module):
    """transformers' model on a chunk of each row."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = qwen3(layers, vocabulary=VOCABULARY)
        AttentionInterface.register("ulysses", ulysses_attention)
        self.model.set_attn_implementation("ulysses")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def forward(self, input_ids: Tensor, labels: Tensor) -> ModelOutput:
        """Whole rows; the loss is that of this rank's tokens, scaled so that FSDP2's mean is the global one."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        targets = pad(labels[:, 1:], (0, 1), value=-100)
        positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        mine, where, targets = (each.chunk(ranks, dim=1)[rank] for each in (input_ids, positions, targets))
        count = (labels[:, 1:] != -100).sum() / ranks
        return self.model(
            input_ids=mine,
            position_ids=where,
            labels=mine,
            shift_labels=targets.contiguous(),
            num_items_in_batch=count,
        )


# --- time ------------------------------------------------------------------------------------------------------------


def stepper(model: nn.Module, ids: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Step) -> float:
    """Wall time of one step, from all ranks ready to all ranks done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def check_same(models: dict[str, tuple[nn.Module, Tensor]]) -> None:
    """A contender that computes another loss or another gradient is no contender."""
    found = {}
    for name, (model, ids) in models.items():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        loss = loss.detach()
        if isinstance(model, ByHand):
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
            norm = torch.nn.utils.get_total_norm(each.grad for each in model.parameters()).full_tensor()
        else:
            norm = model.clip_grad_norm_(math.inf)
        model.zero_grad()
        found[name] = (float(loss), float(norm))
    for values in found.values():
        if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(values, found["sp"], strict=True)):
            raise SystemExit(f"the contenders differ in loss or gradient norm: {found}")


def times(layers: int, length: int, rounds: int) -> Table:
    world, rows = dist.get_world_size(), rows_of(length)
    models = {
        "sp": (ours(layers, {"sp": world}), rows),
        "fsdp": (ours(layers, {"fsdp": world}), rows[dist.get_rank()][None]),
        "by hand": (ByHand(layers), rows),
    }
    check_same(models)
    steps = {name: stepper(model, ids) for name, (model, ids) in models.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for offset in range(len(names)):
            name = names[(index + offset) % len(names)]
            taken[name].append(seconds(steps[name]))
    table = Table("contender", title=f"{world} rows of {length} tokens over {world} ranks")
    for name in ("s a step", "time / sp"):
        table.add_column(name, justify="right")
    labels = {"sp": f"sp = {world}", "fsdp": f"fsdp = {world}", "by hand": "Ulysses by hand, FSDP2"}
    for name in names:
        ratio = statistics.median(other / own for other, own in zip(taken[name], taken["sp"], strict=True))
        table.add_row(labels[name], f"{statistics.median(taken[name]):.3f}", f"{ratio:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12, help="0: no times")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tables = [sizes(options.layers, options.length)]
    if options.rounds:
        tables.append(times(options.layers, options.length, options.rounds))
    if dist.get_rank() == 0:
        for table in tables:
            Console(width=120).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
