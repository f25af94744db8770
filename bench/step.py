"""A training step on two ranks, side by side in one run: turbo_compile, FSDP2, and FSDP2 with compiled blocks.

    torchrun --nproc_per_node 2 bench/step.py [--layers 8] [--rounds 12]

Prints, for two token counts, the median ratio of paired rounds (peer's seconds over ours: above 1, ours is faster), the
peak of live tensor bytes in a warmed-up step by the profiler's allocation events, and how much the resident set grew.
Every contender runs one step a round, in an order that rotates, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
from models import qwen3
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from turbo_compile import turbo_compile

SHAPES = ((1, 256), (2, 512))
COLUMNS = ("tokens a rank", "s a step", "time / ours", "peak live MiB", "peak / ours", "resident growth MiB")

Step = Callable[[torch.Tensor], None]


def ours(layers: int, recompute: str = "none") -> nn.Module:
    plan = {"mesh": {"fsdp": dist.get_world_size()}, "recompute": recompute}
    return turbo_compile(qwen3(layers), plan)


def fsdp2(layers: int, compiled: bool) -> nn.Module:
    model = qwen3(layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        if compiled:
            layer.compile(dynamic=True)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stepper(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(ids: torch.Tensor) -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Step, ids: torch.Tensor) -> float:
    """Wall time of one step, from all ranks ready to all ranks done."""
    dist.barrier()
    start = time.perf_counter()
    step(ids)
    dist.barrier()
    return time.perf_counter() - start


def peak_bytes(step: Step, ids: torch.Tensor) -> tuple[int, int]:
    """The highest sum of allocations minus frees within one step, and how much the resident set grew."""
    before = psutil.Process().memory_info().rss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(ids)
    after = psutil.Process().memory_info().rss
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {
        "turbo_compile": stepper(ours(options.layers)),
        "FSDP2": stepper(fsdp2(options.layers, False)),
        "FSDP2, compiled blocks": stepper(fsdp2(options.layers, True)),
    }
    table = Table(title=f"{options.layers} layers of 512, fp32, 2 ranks")
    table.add_column("contender")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for rows, length in SHAPES:
        ids = torch.randint(0, 8192, (rows, length), generator=torch.Generator().manual_seed(dist.get_rank()))
        measure(table, contenders, ids, options.rounds)
    if dist.get_rank() == 0:
        Console(width=140).print(table)
    dist.destroy_process_group()


def measure(table: Table, contenders: dict[str, Step], ids: torch.Tensor, rounds: int) -> None:
    for step in contenders.values():
        for _ in range(3):
            step(ids)
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for offset in range(len(names)):
            name = names[(index + offset) % len(names)]
            times[name].append(seconds(contenders[name], ids))
    peaks = {name: peak_bytes(step, ids) for name, step in contenders.items()}
    mine = times["turbo_compile"]
    for name in names:
        ratio = statistics.median(theirs / own for theirs, own in zip(times[name], mine, strict=True))
        peak, growth = peaks[name]
        table.add_row(
            name,
            str(ids.numel()),
            f"{statistics.median(times[name]):.3f}",
            f"{ratio:.2f}",
            f"{peak / 2**20:.1f}",
            f"{peak / peaks['turbo_compile'][0]:.2f}",
            f"{growth / 2**20:.0f}",
        )


if __name__ == "__main__":
    main()
