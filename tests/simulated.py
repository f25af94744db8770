"""Many ranks in one process, a thread each: the real program, lowered for each, its messages handed over in memory.

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

from tests.parity import Batch, eager_documents, eager_step, gradient_error
from turbo_compile import exchange
from turbo_compile.api import trace
from turbo_compile.batch import Batch as Read
from turbo_compile.batch import read_batch
from turbo_compile.boundaries.sequence import MODEL_ENTRY
from turbo_compile.capture import Signature
from turbo_compile.dtypes import choose_dtypes
from turbo_compile.huggingface import expert_counts
from turbo_compile.ir.mesh import Axes
from turbo_compile.ir.placement import layouts
from turbo_compile.ir.program import source
from turbo_compile.lower import Executable, lower
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.sections import Mesh

_CPU = torch.device("cpu")


class Simulation:
    """A model under a plan, on all the ranks of the plan's mesh. The model's weights are read at each step."""

    def __init__(self, model: Any, plan: dict[str, Any]) -> None:
        resolved = Plan.of(plan)
        self.model, self.mesh = model, resolved.mesh
        self.weights = {fqn: p.detach() for fqn, p in model.named_parameters()}
        experts = tuple(expert_counts(model)) if self.mesh.ep > 1 else ()
        self.layouts = layouts(resolved, {fqn: (p.shape, p.dtype) for fqn, p in self.weights.items()}, experts)
        dtypes = choose_dtypes(model, resolved.dtype)
        router = bool(getattr(model.config, "output_router_logits", False))
        signature = Signature(True, False, True, True, router, trainable=frozenset(self.weights))
        step = trace(model, resolved, signature, dtypes, _CPU, None)
        self.axes = [_axes(self.mesh, rank) for rank in range(self.mesh.dp * self.mesh.shard)]
        self.executables = [lower(step, axes, self.layouts, dtypes.reduce, {}, "eager") for axes in self.axes]

    def step(self, batch: Batch) -> tuple[list[float], dict[str, Tensor]]:
        """The loss each rank sees of the global `batch`, and every whole gradient."""
        network = _Network()
        fields = _fields([self._rows(batch, rank) for rank in range(len(self.axes))], self.mesh)

        def one(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
            place = self.axes[rank].coordinates["shard"]
            shards = {fqn: p[slice(*self.layouts[fqn].rows(place))] for fqn, p in self.weights.items()}
            return network.as_rank(rank, lambda: _step(self.executables[rank], self.model, shards, fields[rank]))

        with mock.patch.object(exchange, "_c10d", network), ThreadPoolExecutor(len(self.axes)) as pool:
            results = list(pool.map(one, range(len(self.axes))))
        return [float(loss) for loss, _ in results], {fqn: self._whole(fqn, results) for fqn in results[0][1]}

    def check_step(self, batch: Batch) -> None:
        """One forward and backward on the global batch, compared with the plain model's."""
        self._check(eager_step(self.model, batch).loss.item(), batch)

    def check_documents(self, batch: Batch) -> None:
        """Like `check_step` for a packed batch, whose documents the plain model reads one by one."""
        self._check(eager_documents(self.model, batch), batch)

    def _check(self, loss: float, batch: Batch) -> None:
        losses, gradients = self.step(batch)
        assert max(abs(each - loss) for each in losses) < 1e-5 * max(1.0, abs(loss)), (losses, loss)
        errors = {}
        for fqn, p in self.model.named_parameters():
            assert (p.grad is not None) == (fqn in gradients), fqn
            if p.grad is not None:
                assert not gradients[fqn].isnan().any(), fqn
                errors[fqn] = gradient_error(gradients[fqn], p.grad)
        wrong = {fqn: error for fqn, error in errors.items() if not error < 1e-5}
        assert not wrong, wrong

    def _rows(self, batch: Batch, rank: int) -> Read:
        """The rows of the global batch that rank `rank` passes."""
        parts, part = self.mesh.dp * self.mesh.fsdp, rank // self.mesh.sp
        own = {key: v.tensor_split(parts)[part] if isinstance(v, Tensor) and v.dim() else v for key, v in batch.items()}
        return read_batch(own, self.model.config, _CPU, self.model.config.vocab_size)

    def _whole(self, fqn: str, results: list[tuple[Tensor, dict[str, Tensor]]]) -> Tensor:
        """A gradient from the parts of all ranks; what several ranks hold must be equal."""
        parts, shard = [gradients[fqn] for _, gradients in results], self.mesh.shard
        if self.layouts[fqn].sharded:
            parts = [torch.cat(parts[first : first + shard]) for first in range(0, len(parts), shard)]
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]


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
