"""How fast this machine is: matmul, attention, memory, launches, the optimizer and collectives, timed on every rank.

All ranks measure each thing at the same time, as training would: local ranks of a CPU share its cores and its memory.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from turbo_compile.boundaries.attention import FLOPS, attention

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_c10d = torch.ops._c10d_functional
_LEAST_S = 2e-3  # a timing shorter than this is repeated inside
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True)
class Matmul:
    m: int
    n: int
    k: int
    dtype: str
    seconds: float

    @property
    def flop_per_s(self) -> float:
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal, forward or backward, of one row; `flops` counts a causal row as half a full one."""

    seq: int
    heads: int
    width: int
    dtype: str
    backward: bool
    seconds: float
    flops: float

    @property
    def flop_per_s(self) -> float:
        return self.flops / self.seconds


@dataclass(frozen=True, slots=True)
class Exchange:
    """`size_bytes` is the whole tensor: what all_gather gives, what the others take. `ranks` take part, in `level`."""

    op: str
    level: str
    ranks: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    device: str
    ranks: int
    local_ranks: int
    memory_bytes: int
    usable_bytes: int
    matmuls: tuple[Matmul, ...]
    attentions: tuple[Attention, ...]
    bytes_per_s: float
    launch_s: float
    dispatch_s: float
    units: int
    context_bytes: int
    contention: float
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """What is tried, and how often: `quick` is about half a minute on two cores of a CPU."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    moved_bytes: int
    messages: tuple[int, ...]
    rounds: int

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Effort:
        if device.type == "cpu":
            messages = tuple(2**power for power in range(10, 25 if quick else 27, 2))
            sizes: tuple[int, ...] = (32, 64, 128, 256, 512) if quick else (32, 64, 128, 256, 512, 1024, 2048)
            return cls(sizes, (64, 256, 1024) if quick else (64, 256, 1024, 4096), 2**26, messages, 5 if quick else 15)
        messages = tuple(2**power for power in range(12, 29 if quick else 31, 2))
        sizes = (256, 512, 1024, 2048, 4096, 8192) if quick else (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        lengths = (512, 2048, 8192) if quick else (512, 1024, 2048, 4096, 8192, 16384, 32768)
        return cls(sizes, lengths, 2**30, messages, 7 if quick else 20)


def measure(device: torch.device, dtypes: tuple[str, ...], effort: Effort, say: Callable[[str], None]) -> Measurements:
    """Every rank calls it; each gets the same answer, the median over ranks of the median over rounds."""
    timer = _Timer(device, effort.rounds)
    say("matmul")
    matmuls = tuple(each for word in dtypes for each in _matmuls(timer, effort.sizes, word))
    say("attention")
    attentions = tuple(each for word in dtypes for each in _attentions(timer, effort.lengths, word))
    say("memory")
    speed = _memory(timer, effort.moved_bytes)
    launch, dispatch = _launch(timer), _dispatch(timer)
    say("collectives")
    exchanges = tuple(_exchanges(timer, effort.messages))
    contention = _contention(timer, max(effort.sizes), max(effort.messages)) if exchanges else 0.0
    total, free = _memory_bytes(device)
    return Measurements(
        device=_device_name(device),
        ranks=_world(),
        local_ranks=_local_ranks(),
        memory_bytes=total,
        usable_bytes=free,
        matmuls=matmuls,
        attentions=attentions,
        bytes_per_s=speed,
        launch_s=launch,
        dispatch_s=dispatch,
        units=torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1,
        context_bytes=_context_bytes(device),
        contention=contention,
        exchanges=exchanges,
    )


class _Timer:
    """Seconds of one call: the median over rounds, then over ranks, all of which start together."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def __call__(self, work: Callable[[], object]) -> float:
        repeats = self.agreed(max(1, round(_LEAST_S / max(min(self._once(work, 1), self._once(work, 1)), 1e-9))))
        seconds = sorted(self._once(work, repeats) / repeats for _ in range(self.rounds))
        return self._median(seconds[len(seconds) // 2])

    def _once(self, work: Callable[[], object], repeats: int) -> float:
        if _world() > 1:
            dist.barrier()
        self._finish()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        self._finish()
        return time.perf_counter() - began

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agreed(self, repeats: int) -> int:
        """As many on each rank, or a collective would wait for one that never comes."""
        if _world() == 1:
            return repeats
        told = torch.tensor([min(repeats, 1000)], device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return int(told)

    def _median(self, seconds: float) -> float:
        if _world() == 1:
            return seconds
        told = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        every = [torch.empty_like(told) for _ in range(_world())]
        dist.all_gather(every, told)
        return float(torch.cat(every).sort().values[_world() // 2])


def _matmuls(timer: _Timer, sizes: tuple[int, ...], word: str) -> Iterator[Matmul]:
    dtype = _DTYPES[word]
    largest = max(sizes)
    shapes = [(size, size, size) for size in sizes]
    shapes += [(size, largest, largest) for size in sizes[:-1]]  # few rows of a large weight
    shapes += [(largest, largest, size) for size in sizes[:-1]]  # gradients of weights: many outputs, few tokens
    for m, n, k in shapes:
        a = torch.randn(m, k, dtype=dtype, device=timer.device)
        b = torch.randn(n, k, dtype=dtype, device=timer.device).T
        out = torch.empty(m, n, dtype=dtype, device=timer.device)
        yield Matmul(m, n, k, word, timer(lambda a=a, b=b, out=out: torch.mm(a, b, out=out)))  # type: ignore[misc]


def _attentions(timer: _Timer, lengths: tuple[int, ...], word: str) -> Iterator[Attention]:
    heads, width = (4, 64) if timer.device.type == "cpu" else (16, 128)
    for seq in lengths:
        q, k, v = (
            torch.randn(1, heads, seq, width, dtype=_DTYPES[word], device=timer.device, requires_grad=True)
            for _ in range(3)
        )
        layout = torch.zeros(1, seq, dtype=torch.int32, device=timer.device)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, layout: Tensor = layout) -> Tensor:
            out, _ = attention(q, k, v, layout, None, None, q.shape[3] ** -0.5, True, None, None, 0.0)
            found: Tensor = out
            return found

        def both(forward: Callable[[], Tensor] = forward, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            out = forward()
            torch.autograd.grad(out, (q, k, v), out)

        one, two = timer(forward), timer(both)
        flops = float(FLOPS(1, seq, heads, width, width))
        yield Attention(seq, heads, width, word, False, one, flops)
        yield Attention(seq, heads, width, word, True, max(two - one, one), 2.5 * flops)


def _memory(timer: _Timer, moved: int) -> float:
    """Bytes read and written a second by an operation that computes nothing worth mentioning."""
    source = torch.ones(moved // 8, dtype=torch.float32, device=timer.device)
    target = torch.empty_like(source)
    return moved / timer(lambda: torch.mul(source, 2.0, out=target))


def _launch(timer: _Timer) -> float:
    """Seconds between two operations so small that only starting them counts."""
    one = torch.ones(8, device=timer.device)

    def some() -> None:
        for _ in range(100):
            one.mul_(1.0)

    return timer(some) / 100


def _dispatch(timer: _Timer) -> float:
    """Seconds the host needs for an operation under autograd, forward."""
    one = torch.ones(8, device=timer.device, requires_grad=True)

    def some() -> None:
        value = one
        for _ in range(100):
            value = value * 1.0

    return timer(some) / 100


def _contention(timer: _Timer, size: int, message: int) -> float:
    """How much longer matmuls take while a gather runs beside them, as a fraction added; 1: they take turns."""
    everyone = dist.group.WORLD
    assert everyone is not None
    ranks = _world()
    shard = torch.ones(max(message // 4 // ranks, 1), device=timer.device)
    a = torch.randn(size, size, device=timer.device)

    def gather() -> Tensor:
        started: Tensor = _c10d.all_gather_into_tensor(shard, ranks, everyone.group_name)
        return started

    alone = timer(lambda: _c10d.wait_tensor(gather()))
    one = timer(lambda: torch.mm(a, a))
    count = timer.agreed(max(1, round(alone / one)))

    def matmuls() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both() -> None:
        started = gather()
        matmuls()
        _c10d.wait_tensor(started)

    computing, together = timer(matmuls), timer(both)
    return min(max((together - max(alone, computing)) / min(alone, computing), 0.0), 1.0)


def _exchanges(timer: _Timer, sizes: tuple[int, ...]) -> Iterator[Exchange]:
    """Each collective by size, within a node if there is more than one, and over all ranks."""
    for level, group, ranks in _levels():
        for op in _OPS:
            for size in sizes:
                yield Exchange(op, level, ranks, size, timer(_exchange(op, size, ranks, group, timer.device)))


def _levels() -> Iterator[tuple[str, dist.ProcessGroup, int]]:
    world, local = _world(), _local_ranks()
    if world == 1:
        return
    everyone = dist.group.WORLD
    assert everyone is not None
    if 1 < local < world and world % local == 0:
        inside, _ = dist.new_subgroups(group_size=local)
        yield "node", inside, local
        yield "network", everyone, world
    else:
        yield "node", everyone, world


def _exchange(op: str, size: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], Tensor]:
    """As a compiled step does it: gathers in place, and on gloo reductions as an exchange and a sum."""
    part = max(size // 4 // ranks, 1)
    whole, shard = torch.ones(part * ranks, device=device), torch.ones(part, device=device)
    even, name = [part] * ranks, group.group_name

    def exchanged() -> Tensor:
        sent: Tensor = _c10d.wait_tensor(_c10d.all_to_all_single(whole, even, even, name))
        return sent

    def done() -> Tensor:
        match op:
            case "all_gather":
                (started,) = _c10d.all_gather_into_tensor_coalesced([shard], ranks, name)
            case "reduce_scatter" if device.type == "cpu":
                return exchanged().view(ranks, part).sum(0)
            case "reduce_scatter":
                started = _c10d.reduce_scatter_tensor(whole, "sum", ranks, name)
            case "all_reduce":
                started = _c10d.all_reduce(whole, "sum", name)
            case _:
                return exchanged()
        result: Tensor = _c10d.wait_tensor(started)
        return result

    return done


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _local_ranks() -> int:
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", _world())), _world())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _context_bytes(device: torch.device) -> int:
    """What a process holds on the device besides tensors. On a CPU it is not counted: it is the process itself."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _memory_bytes(device: torch.device) -> tuple[int, int]:
    """What the device has, and what of it a process may take; of a CPU, each local rank's share."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total), int(free)
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page // _local_ranks() for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return total, free
