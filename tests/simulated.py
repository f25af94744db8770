"""Many ranks in one process, a thread each: the real program, lowered for each rank, its messages handed over in memory.

It costs a capture and no processes, so it reaches worlds of 8 and 16 that a small machine cannot start.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.parity import Batch
from turbo_compile import exchange
from turbo_compile.api import trace
from turbo_compile.batch import Batch as Read
from turbo_compile.batch import read_batch
from turbo_compile.boundaries.sequence import MODEL_ENTRY
from turbo_compile.capture import Signature
from turbo_compile.dtypes import choose_dtypes
from turbo_compile.ir.mesh import Axes
from turbo_compile.ir.placement import Layout, layouts
from turbo_compile.ir.program import source
from turbo_compile.lower import Executable, lower
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.sections import Mesh

_CPU = torch.device("cpu")


def simulate(model: Any, plan: Plan, batch: Batch, router: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The loss each rank of `plan.mesh` sees of the global `batch`, and every whole gradient."""
    dtypes = choose_dtypes(model, plan.dtype)
    weights = {fqn: p.detach() for fqn, p in model.named_parameters()}
    signature = Signature(True, False, True, True, router, trainable=frozenset(weights))
    step = trace(model, plan, signature, dtypes, _CPU, None)
    placed = layouts(plan, {fqn: (p.shape, p.dtype) for fqn, p in weights.items()})
    world, network = plan.mesh.dp * plan.mesh.shard, _Network()
    reads = [_rows(batch, model, plan.mesh, rank) for rank in range(world)]
    fields = _fields(reads, plan.mesh)

    def one(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        axes = _axes(plan.mesh, rank)
        executable = lower(step, axes, placed, dtypes.reduce, {}, "eager")
        shards = {fqn: p[slice(*placed[fqn].rows(axes.coordinates["shard"]))] for fqn, p in weights.items()}
        return network.as_rank(rank, lambda: _step(executable, model, shards, fields[rank]))

    with mock.patch.object(exchange, "_c10d", network), ThreadPoolExecutor(world) as pool:
        results = list(pool.map(one, range(world)))
    losses = [float(loss) for loss, _ in results]
    return losses, {fqn: _whole(placed[fqn], plan.mesh, [g[fqn] for _, g in results]) for fqn in results[0][1]}


def _step(
    executable: Executable, model: Any, shards: dict[str, Tensor], fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of one rank: the loss, and its part of each gradient."""
    program = executable.program

    def group(names: tuple[str, ...]) -> tuple[Tensor, ...]:
        return tuple(shards[fqn] for fqn in names)

    given = []
    for node in executable.inputs:
        found = source(node)
        if found.kind == "batch":
            given.append(fields[found.names[0]])
        else:
            given.append(model.get_buffer(found.names[0]) if found.kind == "buffer" else group(found.names))
    with torch.no_grad():
        results, bundles, kept = executable.forward(*given)
        saved, rest = dict(zip(executable.bundle_names, bundles, strict=True)), iter(kept)
        ones = {name: torch.ones_like(value) for name, value in zip(program.outputs, results, strict=True)}
        back: list[Any] = []
        for node in executable.backward_inputs:
            found = source(node)
            match found.kind:
                case "saved":
                    back.append(saved[found.names[0]])
                case "kept":
                    back.append([next(rest)])
                case "tangent":
                    back.append([ones[found.names[0]]])
                case _:
                    back.append(group(found.names))
        assert executable.backward is not None
        gradients = executable.backward(*back)
    names = [fqn for each in program.gradient_groups for fqn in each]
    return results[0], dict(zip(names, (g for each in gradients for g in each), strict=True))


def _rows(batch: Batch, model: Any, mesh: Mesh, rank: int) -> Read:
    """The rows of the global batch that rank `rank` passes."""
    parts, part = mesh.dp * mesh.fsdp, rank // mesh.sp
    own = {key: v.tensor_split(parts)[part] if isinstance(v, Tensor) and v.dim() else v for key, v in batch.items()}
    return read_batch(own, model.config, _CPU, model.config.vocab_size)


def _fields(reads: list[Read], mesh: Mesh) -> list[dict[str, Tensor]]:
    own = [read.cut(MODEL_ENTRY, rank % mesh.sp, mesh.sp) for rank, read in enumerate(reads)]
    common = {
        "denominator": torch.tensor(float(sum(each.tokens for each in own))),
        "longest": torch.tensor(max(each.longest for each in own)),
        "seed": torch.tensor(0),
    }
    return [each.fields | common for each in own]


def _axes(mesh: Mesh, rank: int) -> Axes:
    """The axes of rank `rank`, on paper: a group's name holds its ranks."""
    strides = {
        "world": (mesh.dp * mesh.shard, 1),
        "dp": (mesh.dp, mesh.shard),
        "shard": (mesh.shard, 1),
        "fsdp": (mesh.fsdp, mesh.sp),
        "sp": (mesh.sp, 1),
        "ep": (mesh.ep, 1),
        "edp": (mesh.edp, mesh.ep),
    }
    coordinates = {axis: rank // stride % size for axis, (size, stride) in strides.items()}
    groups = {}
    for axis, (size, stride) in strides.items():
        first = rank - coordinates[axis] * stride
        groups[axis] = SimpleNamespace(group_name=" ".join(str(first + i * stride) for i in range(size)))
    sizes = {axis: size for axis, (size, _) in strides.items()}
    return Axes(None, _CPU, sizes, coordinates, groups)  # type: ignore[arg-type]


def _whole(layout: Layout, mesh: Mesh, parts: list[Tensor]) -> Tensor:
    """A gradient from the parts of all ranks; what several ranks hold must be equal."""
    copies = [parts[d * mesh.shard : (d + 1) * mesh.shard] for d in range(mesh.dp)]
    joined = [torch.cat(each) for each in copies] if layout.sharded else parts
    assert all(torch.equal(each, joined[0]) for each in joined)
    return joined[0]


@dataclass
class _Group:
    barrier: threading.Barrier
    slots: dict[int, Any] = field(default_factory=dict)


class _Network:
    """The collectives that programs are lowered to, between threads."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.lock = threading.Lock()
        self.groups: dict[str, _Group] = {}

    def as_rank(self, rank: int, work: Any) -> Any:
        self.here.rank = rank
        try:
            return work()
        except BaseException:
            for group in self.groups.values():
                group.barrier.abort()  # the others wait for nobody
            raise

    def _exchange(self, name: str, value: Any) -> tuple[int, list[Any]]:
        """Every rank's value, in rank order, and this rank's place in the group."""
        ranks = [int(rank) for rank in name.split()]
        with self.lock:
            group = self.groups.setdefault(name, _Group(threading.Barrier(len(ranks), timeout=60)))
        group.slots[self.here.rank] = value
        group.barrier.wait()
        everyone = [group.slots[rank] for rank in ranks]
        group.barrier.wait()
        return ranks.index(self.here.rank), everyone

    def all_gather_into_tensor_coalesced(self, tensors: list[Tensor], size: int, name: str) -> list[Tensor]:
        _, everyone = self._exchange(name, tensors)
        assert len(everyone) == size
        return [torch.cat(parts) for parts in zip(*everyone, strict=True)]

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Tensor:
        assert op == "sum"
        return torch.stack(self._exchange(name, tensor)[1]).sum(0)

    def all_reduce_coalesced(self, tensors: list[Tensor], op: str, name: str) -> list[Tensor]:
        return [self.all_reduce(tensor, op, name) for tensor in tensors]

    def all_to_all_single(self, tensor: Tensor, received: list[int], sent: list[int], name: str) -> Tensor:
        place, everyone = self._exchange(name, tensor.split(sent))
        parts = [theirs[place] for theirs in everyone]
        assert [part.shape[0] for part in parts] == received
        return torch.cat(parts)

    def wait_tensor(self, tensor: Tensor) -> Tensor:
        return tensor
