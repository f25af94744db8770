"""The real mesh: process groups by axis name, over all ranks or over a world on paper."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from turbo_compile.plans.sections import Mesh


@dataclass(frozen=True, slots=True)
class Axes:
    """Process groups and coordinates by axis. `parameters` is the mesh that parameters are DTensors on.

    `shard` is fsdp x sp flattened; `world` is every rank. Rank order is dp, fsdp, sp, fastest last.
    """

    parameters: DeviceMesh
    device: torch.device
    sizes: dict[str, int]
    coordinates: dict[str, int]
    groups: dict[str, dist.ProcessGroup]

    @property
    def rank(self) -> int:
        return self.coordinates["world"]

    @property
    def replicated(self) -> bool:
        """Whether parameters have a second copy on another rank (HSDP)."""
        return self.sizes["dp"] > 1


def build_axes(mesh: Mesh, device: torch.device) -> Axes:
    """The axes of `mesh` over the initialised process group.

    Raises:
        PlanError: the sizes do not multiply to the world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh.check_world(world)
    if mesh.dp == 1:
        parameters = init_device_mesh(device.type, (mesh.shard,), mesh_dim_names=("shard",))
    else:
        parameters = init_device_mesh(device.type, (mesh.dp, mesh.shard), mesh_dim_names=("dp", "shard"))
    everyone = dist.group.WORLD
    assert everyone is not None
    groups = {"world": everyone, "shard": parameters.get_group("shard")}
    if mesh.dp > 1:
        groups["dp"] = parameters.get_group("dp")
    if mesh.sp > 1:
        chunks = init_device_mesh(device.type, (world // mesh.sp, mesh.sp), mesh_dim_names=("rows", "sp"))
        groups["sp"] = chunks.get_group("sp")
    if mesh.ep > 1:
        experts = init_device_mesh(device.type, (mesh.dp, mesh.edp, mesh.ep), mesh_dim_names=("dp", "edp", "ep"))
        groups |= {"edp": experts.get_group("edp"), "ep": experts.get_group("ep")}
    return Axes(
        parameters=parameters,
        device=device,
        sizes={
            "world": world,
            "dp": mesh.dp,
            "shard": mesh.shard,
            "fsdp": mesh.fsdp,
            "sp": mesh.sp,
            "ep": mesh.ep,
            "edp": mesh.edp,
        },
        coordinates={
            "world": rank,
            "dp": rank // mesh.shard,
            "shard": rank % mesh.shard,
            "fsdp": rank % mesh.shard // mesh.sp,
            "sp": rank % mesh.sp,
            "ep": rank % mesh.ep,
            "edp": rank % mesh.shard // mesh.ep,
        },
        groups=groups,
    )


def ensure_process_group(device: torch.device) -> None:
    """Initialise the process group if nobody has: from a launcher's environment, or a world of this process alone."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
