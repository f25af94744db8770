"""How long one operation takes on a cluster: a matmul, attention, elementwise work, a collective.

Physics with few factors: a matmul is waves of tiles over multiprocessors, or the memory it must read; a collective is
bytes over the slowest level it crosses, and a latency that grows with its steps. All times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from turbo_compile.plans.cluster import Accelerator, Cluster
from turbo_compile.plans.cost import Attention, MatmulSize, attention_flops

# Tiles of one matmul kernel (rows, columns) and the share of the best rate each reaches: smaller ones reuse less.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.78), (128, 64, 0.78), (64, 64, 0.62))
_RAMP = 96.0  # of the inner dimension: what filling and draining a tile's pipeline costs
_GROUPED = 0.82  # of a plain matmul's rate: uneven groups, and tiles that straddle their ends
LOOPED = 0.4  # of it, where each expert's rows are picked, multiplied and added back one expert after another
_KERNEL_S = 2e-6  # between two kernels of a stream


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks of a collective: how many share a domain at each level. `stride` is the distance between neighbours."""

    ranks: int
    stride: int = 1


def matmul_s(device: Accelerator, rows: float, inner: float, columns: float, dtype: str) -> float:
    """One product, its operands in memory."""
    if rows <= 0 or inner <= 0 or columns <= 0:
        return 0.0
    return _matmul_s(device, math.ceil(rows), math.ceil(inner), math.ceil(columns), dtype, 1)


@lru_cache(maxsize=65536)
def _matmul_s(device: Accelerator, rows: int, inner: int, columns: int, dtype: str, groups: int) -> float:
    rate = device.peak(dtype) * device.matmul_efficiency / device.units
    best = math.inf
    for tall, wide, share in _TILES:
        tiles = groups * math.ceil(rows / tall) * math.ceil(columns / wide)
        # A last wave that is not full still overlaps a little: half its idle time is lost.
        waves = tiles / device.units
        waves = max(1.0, (waves + math.ceil(waves)) / 2)
        best = min(best, waves * 2.0 * tall * wide * (inner + _RAMP) / (rate * share))
    width = {"fp32": 4, "tf32": 4, "fp64": 8, "fp8": 1, "fp4": 1}.get(dtype, 2)
    moved = groups * width * (rows * inner + inner * columns + rows * columns)
    memory = moved / (device.hbm_bytes_per_s * device.memory_efficiency)
    return max(best, memory) + _KERNEL_S


def grouped_s(device: Accelerator, rows: float, inner: float, columns: float, experts: float, dtype: str) -> float:
    """One grouped product over the experts a rank holds, rows spread evenly."""
    if rows <= 0 or experts <= 0:
        return 0.0
    each = math.ceil(rows / max(experts, 1.0))
    return _matmul_s(device, each, math.ceil(inner), math.ceil(columns), dtype, max(1, round(experts))) / _GROUPED


def product_s(device: Accelerator, m: MatmulSize, tp: int, held: float, dtype: str, which: str) -> float:
    """A matmul of the model, one of `forward`, `input` (its gradient) or `weight` (its gradient); `held` experts."""
    inner = m.inner / tp if m.cut == "rows" else m.inner
    columns = m.columns / tp if m.cut == "columns" else m.columns
    rows = m.rows
    if m.experts:
        if which == "weight":
            each = rows / max(held, 1.0)
            return grouped_s(device, inner * held, each, columns, held, dtype)
        swap = which == "input"
        return grouped_s(device, rows, columns if swap else inner, inner if swap else columns, held, dtype)
    if which == "forward":
        return m.batch * matmul_s(device, rows, inner, columns, dtype)
    if which == "input":
        return m.batch * matmul_s(device, rows, columns, inner, dtype)
    return m.batch * matmul_s(device, inner, rows, columns, dtype)


def flash_s(
    device: Accelerator, each: Attention, rows: float, length: float, share: float, backward: bool, factor: float
) -> float:
    """Flash attention of `rows` rows of `length` tokens, `share` of the heads (or of the queries) on this rank."""
    flops = attention_flops(each, rows, length) * share * (2.5 if backward else 1.0)
    best = device.attention_backward_efficiency if backward else device.attention_efficiency
    narrow = min(1.0, (each.width + each.value_width) / 256) ** 0.5  # short heads leave tensor cores waiting
    reach = min(length, each.window) if each.window else length
    efficiency = best * factor * narrow * reach / (reach + device.attention_half_length)
    return flops / (device.peak("bf16") * max(efficiency, 1e-4)) + _KERNEL_S * (3 if backward else 1)


def scores_s(
    device: Accelerator, each: Attention, rows: float, length: float, share: float, backward: bool, passes: float
) -> float:
    """Attention that writes its scores: two batched products, and `passes` reads or writes of the scores."""
    heads = rows * each.heads * share
    products = 2 if backward else 1
    compute = heads * (
        _batched_s(device, length, each.width, length) + _batched_s(device, length, length, each.value_width)
    )
    elements = heads * length * length
    moved = elements * 2.0 * passes * (1.5 if backward else 1.0)
    return compute * products + moved / (device.hbm_bytes_per_s * device.memory_efficiency) + 4 * _KERNEL_S


def _batched_s(device: Accelerator, rows: float, inner: float, columns: float) -> float:
    """One of many independent products that fill the device together: no waves are lost, short inner sizes hurt."""
    flops = 2.0 * rows * inner * columns
    moved = 2.0 * (rows * inner + inner * columns + rows * columns)
    rate = (
        device.peak("bf16")
        * device.matmul_efficiency
        * min(inner, columns, 1024.0)
        / (min(inner, columns, 1024.0) + _RAMP)
    )
    return max(flops / rate, moved / (device.hbm_bytes_per_s * device.memory_efficiency))


def memory_s(device: Accelerator, moved: float) -> float:
    """Reading and writing so many bytes."""
    return moved / (device.hbm_bytes_per_s * device.memory_efficiency)


# --- collectives ------------------------------------------------------------------------------------------------------


def collective_s(cluster: Cluster, op: str, moved: float, ring: Ring) -> float:
    """`op` over the ranks of `ring`: all_gather, reduce_scatter, all_reduce, all_to_all, send.

    `moved` is the whole buffer: what each rank ends up with after an all_gather, holds before a reduce_scatter, or
    exchanges in an all_to_all.
    """
    if ring.ranks <= 1 or moved <= 0:
        return 0.0
    return _collective_s(cluster_key(cluster), op, float(moved), ring.ranks, ring.stride)


_KEYS: dict[int, Cluster] = {}


def cluster_key(cluster: Cluster) -> int:
    """A short name for a cluster in caches; it keeps the cluster alive."""
    _KEYS.setdefault(id(cluster), cluster)
    return id(cluster)


@lru_cache(maxsize=65536)
def _collective_s(key: int, op: str, moved: float, ranks: int, stride: int) -> float:
    cluster = _KEYS[key]
    slowest = 0.0
    latency = cluster.levels[0].latency_s
    inside = 1  # ranks of the group within the level before
    for level in cluster.levels:
        size = ranks if level.size is None else min(ranks, max(1, level.size // stride))
        if size <= inside:
            continue
        parts = math.ceil(size / inside)
        latency = max(latency, level.latency_s)
        steps = min(parts - 1, 4 * math.ceil(math.log2(parts)))
        if op == "all_to_all":
            share = (size - inside) / ranks
            slowest = max(slowest, moved * share / (level.bytes_per_s * level.all_to_all_efficiency))
            latency += level.step_s * steps
        elif op == "send":
            return level.latency_s + moved / (level.bytes_per_s * level.efficiency)
        else:
            # Every domain inside takes in the rest through all the links of its members.
            wire = moved * (parts - 1) / parts / inside if inside > 1 else moved * (size - 1) / size
            times = 2.0 if op == "all_reduce" else 1.0
            slowest = max(slowest, times * wire / (level.bytes_per_s * level.efficiency))
            latency += times * level.step_s * steps
        inside = size
        if inside >= ranks:
            break
    return latency + slowest
