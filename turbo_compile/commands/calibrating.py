"""`turbo-compile calibrate`: measure this machine and write what the planner needs to know of it as a cluster file."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from turbo_compile.commands.launch import local_device
from turbo_compile.commands.measuring import Attention, Effort, Exchange, Matmul, Measurements, measure
from turbo_compile.commands.options import CalibrateOptions
from turbo_compile.errors import TurboCompileError
from turbo_compile.plans.cluster import Accelerator, Cluster, Level, save_cluster
from turbo_compile.plans.values import FrozenMap

_NETWORK = Level("network", None, 1e9, 1.0, 1.0, 2e-5, 5e-6)  # of one rank, which has none to measure
_ASSUMED = "assumed: one rank has no network to measure; run it with --ranks or under torchrun"
_RING = ("all_gather", "all_gather", "reduce_scatter")  # what a sharded step does: two gathers, one reduction


def calibrate(options: CalibrateOptions) -> Cluster:
    """What one rank does; rank 0 writes the file.

    Raises:
        TurboCompileError: the file cannot be written.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        _check_writable(options.output)
    device = local_device()
    dtypes = options.dtypes or (("bf16", "fp32") if device.type == "cuda" else ("fp32",))
    say: Callable[[str], None] = (lambda what: print(f"measuring {what}", flush=True)) if first else (lambda what: None)
    found = measure(device, dtypes, Effort.of(device, options.quick), say)
    cluster = fit(found, options.output.stem, datetime.date.today().isoformat())
    if first:
        save_cluster(cluster, options.output)
    return cluster


def fit(found: Measurements, name: str, date: str) -> Cluster:
    """The numbers of a cluster file that explain `found`; each says which measurement it came from."""
    where = f"measured by turbo-compile calibrate, {date}: {found.device}, {found.ranks} ranks"
    sources: dict[str, str] = {}

    def said(key: str, value: float, how: str) -> float:
        sources[key] = f"{where}; {how}"
        return value

    peaks = {}
    for dtype in dict.fromkeys(each.dtype for each in found.matmuls):
        best = max(each.flop_per_s for each in found.matmuls if each.dtype == dtype)
        peaks[dtype] = said(f"accelerator.flop_per_s.{dtype}", best, "the fastest matmul")
    main = next(iter(peaks))
    reached = _typical([each for each in found.matmuls if each.dtype == main]) / peaks[main]
    forward, half = _attention([each for each in found.attentions if each.dtype == main and not each.backward])
    backward, _ = _attention([each for each in found.attentions if each.dtype == main and each.backward])

    def share(rate: float) -> float:
        return min(max(rate / peaks[main], 0.001), 1.0)

    device = Accelerator(
        name=found.device,
        flop_per_s=FrozenMap(peaks),
        hbm_bytes=said("accelerator.hbm_bytes", found.memory_bytes, "of one rank"),
        usable_bytes=said("accelerator.usable_bytes", found.usable_bytes, "free when measured"),
        hbm_bytes_per_s=said("accelerator.hbm_bytes_per_s", found.bytes_per_s, "a large tensor read and written"),
        units=int(said("accelerator.units", found.units, "multiprocessors; a rank of a CPU is one")),
        matmul_efficiency=said("accelerator.matmul_efficiency", reached, "median of large matmuls over the fastest"),
        memory_efficiency=said("accelerator.memory_efficiency", 1.0, "hbm_bytes_per_s is as reached"),
        attention_efficiency=said("accelerator.attention_efficiency", share(forward), "causal, the longest rows"),
        attention_backward_efficiency=said("accelerator.attention_backward_efficiency", share(backward), "likewise"),
        attention_half_length=said("accelerator.attention_half_length", half, "where attention is half as fast"),
        dispatch_s=said("accelerator.dispatch_s", found.dispatch_s, "a tiny operation under autograd"),
        launch_s=said("accelerator.launch_s", found.launch_s, "a tiny operation"),
        context_bytes=said("accelerator.context_bytes", found.context_bytes, "held outside tensors"),
    )
    levels = _levels(found.exchanges, said)
    contention = said("contention", found.contention, "matmuls while a gather runs")
    if not found.exchanges:
        sources |= {
            f"levels.0.{key}": _ASSUMED
            for key in ("bytes_per_s", "efficiency", "all_to_all_efficiency", "latency_s", "step_s")
        }
    return Cluster(name, device, levels, contention, f"{found.ranks} ranks of {found.device}", FrozenMap(sources))


def _typical(matmuls: Sequence[Matmul]) -> float:
    """Flop per second of the upper half by size, in the middle: what a large matmul of any shape can count on."""
    ordered = sorted(matmuls, key=lambda each: each.m * each.n * each.k)
    rates = sorted(each.flop_per_s for each in ordered[len(ordered) // 2 :])
    return rates[len(rates) // 2]


def _attention(found: Sequence[Attention]) -> tuple[float, float]:
    """(flop per second that long rows near, the length at which half of it is reached).

    time = flops / rate * (1 + half / length): a straight line in 1 / length of time over flops, fitted by least squares
    of relative errors. The rate is at most a quarter above the best one seen: further is noise.
    """
    slope, base = _line([(1 / each.seq, each.seconds / each.flops, each.flop_per_s) for each in found])
    best = max(each.flop_per_s for each in found)
    rate = min(1 / base, 1.25 * best) if base > 0 and slope > 0 else best
    halves = sorted(max(each.seq * (rate / each.flop_per_s - 1), 0.0) for each in found)
    return rate, halves[len(halves) // 2]


def _levels(found: Iterable[Exchange], said: Callable[[str, float, str], float]) -> tuple[Level, ...]:
    """time = latency + steps * step_s + bytes / rate, for each level; one that holds all ranks is the last."""
    every = list(found)
    names = list(dict.fromkeys(each.level for each in every))
    if not names:
        return (_NETWORK,)
    levels = []
    for index, name in enumerate(names):
        own = [each for each in every if each.level == name]
        ranks = own[0].ranks
        starts, rates = {}, {}
        for op in dict.fromkeys(each.op for each in own):
            starts[op], rates[op] = _start_and_rate([each for each in own if each.op == op])
        best = max(rates.values())
        ring = len(_RING) / sum(1 / rates[op] for op in _RING)
        start = sum(starts[op] for op in _RING) / len(_RING)
        key = f"levels.{index}"
        last = index == len(names) - 1
        levels.append(
            Level(
                name=name,
                size=None if last else int(said(f"{key}.size", ranks, "local ranks")),
                bytes_per_s=said(f"{key}.bytes_per_s", best, f"the fastest collective of {ranks} ranks"),
                efficiency=said(f"{key}.efficiency", ring / best, "two gathers and a reduction"),
                all_to_all_efficiency=said(f"{key}.all_to_all_efficiency", rates["all_to_all"] / best, "all_to_all"),
                latency_s=said(f"{key}.latency_s", start / 2, "half of what small collectives take"),
                step_s=said(f"{key}.step_s", start / 2 / (ranks - 1), "the other half, a step"),
            )
        )
    return tuple(levels)


def _start_and_rate(found: Sequence[Exchange]) -> tuple[float, float]:
    """Seconds before bytes move, and bytes a second that then cross a rank's link, by the line through the sizes."""
    rounds = 2 if found[0].op == "all_reduce" else 1
    points = [(rounds * each.size_bytes * (each.ranks - 1) / each.ranks, each.seconds) for each in found]
    slope, base = _line([(x, y, 1 / y) for x, y in points])
    largest = max(points)
    rate = 1 / slope if slope > 0 else largest[0] / largest[1]
    return max(base, min(y for _, y in points) / 2), max(rate, largest[0] / largest[1])


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(slope, intercept) of the weighted least squares line through (x, y, weight of the error)."""
    total = sum(w * w for _, _, w in points)
    x0 = sum(w * w * x for x, _, w in points) / total
    y0 = sum(w * w * y for _, y, w in points) / total
    spread = sum(w * w * (x - x0) ** 2 for x, _, w in points)
    slope = sum(w * w * (x - x0) * (y - y0) for x, y, w in points) / spread if spread else 0.0
    return slope, y0 - slope * x0


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise TurboCompileError(f"cannot write {path}: give a file in a folder that exists")
