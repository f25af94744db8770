"""The cluster of a published run: a shipped file, changed where the row says that its machines differ."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from turbo_compile.plans.cluster import Cluster, Level, load_cluster
from turbo_compile.plans.values import FrozenMap

_GIB = 2.0**30
# What a row calls its device -> the file to start from, and what differs on the device and on its inner link.
_DEVICES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    # China export variants: the same chip with NVLink cut to 400 GB/s in both directions (public export rules).
    (r"H800", "h100", {}, {"bytes_per_s": 200e9}),
    (r"^A800", "a100", {}, {"bytes_per_s": 200e9}),
    (r"H20\b", "h200", {"flop_per_s": 148e12, "usable_bytes": 95 * _GIB, "hbm_bytes_per_s": 4.0e12, "units": 78}, {}),
    # torchtitan's documentation: its H100s have 96 GB of HBM2e and are limited to 500 W.
    (r"H100.*(95|96|Grand Teton)", "h100-96gb", {}, {}),
    (r"GH200", "h100", {}, {}),
    (r"H100.*PCIe", "h100", {"flop_per_s": 756e12, "hbm_bytes_per_s": 2.0e12, "units": 114}, {"bytes_per_s": 55e9}),
    (r"H100", "h100", {}, {}),
    (r"H200", "h200", {}, {}),
    (r"GB300", "gb200-nvl72", {"usable_bytes": 277 * _GIB, "hbm_bytes": 288 * _GIB}, {}),
    (r"GB200", "gb200-nvl72", {}, {}),
    (r"B300", "b200", {"usable_bytes": 277 * _GIB, "hbm_bytes": 288 * _GIB}, {}),
    (r"B200", "b200", {}, {}),
    (r"A100.*40", "a100-40gb", {}, {}),
    (r"A100.*PCIe", "a100", {}, {"bytes_per_s": 31e9}),
    (r"A100|A800", "a100", {}, {}),
    (r"MI300", "mi300x", {}, {}),
    (r"MI35\d", "mi355x", {}, {}),
    (
        r"MI250",
        "mi300x",
        {"flop_per_s": 191.5e12, "usable_bytes": 63 * _GIB, "hbm_bytes_per_s": 1.6e12, "units": 110},
        {},
    ),
    (r"910C|CloudMatrix", "ascend910", {}, {}),
    (
        r"910B|Ascend",
        "ascend910",
        {"flop_per_s": 353e12, "usable_bytes": 60.3 * _GIB, "hbm_bytes_per_s": 1.6e12, "units": 24},
        {"size": 8, "bytes_per_s": 196e9},
    ),
    (
        r"V100",
        "a100",
        {"flop_per_s": 125e12, "usable_bytes": 31.7 * _GIB, "hbm_bytes_per_s": 0.9e12, "units": 80},
        {"bytes_per_s": 150e9},
    ),
    (
        r"4090",
        "a100",
        {"flop_per_s": 165e12, "usable_bytes": 23.6 * _GIB, "hbm_bytes_per_s": 1.0e12, "units": 128},
        {"bytes_per_s": 25e9},
    ),
    (
        r"L40S",
        "a100",
        {"flop_per_s": 362e12, "usable_bytes": 44.4 * _GIB, "hbm_bytes_per_s": 0.86e12, "units": 142},
        {"bytes_per_s": 25e9},
    ),
)


def cluster_of(row: Mapping[str, str]) -> Cluster:
    """The cluster a row ran on; an unknown device gets the generic file, with a warning."""
    node = int(row["gpus_per_node"] or 0)
    interconnect = row["interconnect"]
    if not interconnect and row["dataset"] == "deepcompile":
        interconnect = "IB 72 Gb/s"  # what its gathers reached: fitted, as its network is not stated
    return _cluster(row["hardware"], interconnect, node)


@cache
def _cluster(hardware: str, interconnect: str, node: int) -> Cluster:
    for pattern, name, device, link in _DEVICES:
        if re.search(pattern, hardware):
            cluster = _changed(load_cluster(name), device, link)
            break
    else:
        warnings.warn(f"no cluster file describes {hardware!r}; predicted as a generic accelerator", stacklevel=3)
        cluster = load_cluster("generic")
    levels = list(cluster.levels)
    if node and levels[0].size and node != levels[0].size and "NVL72" not in hardware and "GB" not in hardware:
        levels[0] = replace(levels[0], size=node)
    if rate := _network(interconnect, node or levels[0].size or 8):
        levels[-1] = replace(levels[-1], bytes_per_s=rate)
    return replace(cluster, levels=tuple(levels))


def _changed(cluster: Cluster, device: Mapping[str, Any], link: Mapping[str, Any]) -> Cluster:
    accelerator, inner = cluster.accelerator, cluster.levels[0]
    changed = dict(device)
    if "flop_per_s" in changed:
        peak = changed["flop_per_s"]
        changed["flop_per_s"] = FrozenMap({"bf16": peak, "fp16": peak})
    if "usable_bytes" in changed:
        changed.setdefault("hbm_bytes", max(changed["usable_bytes"], accelerator.hbm_bytes))
    levels: tuple[Level, ...] = (replace(inner, **link), *cluster.levels[1:])
    return replace(cluster, accelerator=replace(accelerator, **changed), levels=levels)


def _network(interconnect: str, node: int) -> float | None:
    """Bytes per second a rank, where a row states the network of a node or of a port."""
    if found := re.search(r"(\d+)\s*Gb(?:ps|/s)\s*/\s*node", interconnect):
        return float(found[1]) * 1e9 / 8 / node
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", interconnect):
        return float(found[1]) * float(found[2]) * 1e9 / 8 / node
    if found := re.search(r"(?:IB|InfiniBand|RoCE|CX-7|HDR|NDR)\D{0,12}(\d+)\s*Gb(?:ps|/s)", interconnect):
        return float(found[1]) * 1e9 / 8  # of a port, one a device
    if found := re.search(r"(\d+)\s*Gb(?:ps|/s)\s*RDMA", interconnect):
        return float(found[1]) * 1e9 / 8 / node
    return None
