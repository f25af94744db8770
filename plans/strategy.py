"""Everything a prediction needs beside the model and the cluster: how it is spread, and by what kind of engine.

`Strategy.of(plan, model)` is what our own engine would do. Published runs of other engines are described with the same
words: what is sharded, what is overlapped, which kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from turbo_compile.plans.cost import ModelCost
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.ranges import resolve_ranges

Recompute = str | tuple[str, ...]
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Engine:
    """How a framework runs a model.

    `kernels`: "compiled" (fused, few launches), "fused" (eager with fused norms and activations), "eager".
    `attention`: "flash", or "scores" where the scores are written to memory, `score_passes` times over.
    `attention_factor` scales the device's flash efficiency: older and newer kernels than the file's.
    `overlap` is the share of a sharded parameter's gathers and reductions that may run beside compute; of the
    gradients' reduction of replicated parameters, `overlap_gradients`. `logit_bytes` live for each logit at the
    loss, cut over tp if `vocabulary_parallel`; with `head_fused` a chunk of them, and the gradient of the head's weight
    in fp32. `host_s` is what the host adds to a step, `call_s` to each block and pass (hooks of a sharding wrapper); it
    needs `block_host_s` to start a block's pass, which shows where the device is faster. `stall` is the share of device
    time that a framework loses beside its kernels: gaps, ranks that wait for the slowest, clocks that fall under load.
    Gathered parameters take at most `live_bytes`, gradients that wait for their reduction `bucket_bytes`: where modules
    are gathered one by one.
    """

    name: str = "turbo_compile"
    kernels: Literal["compiled", "fused", "eager"] = "compiled"
    attention: Literal["flash", "scores"] = "flash"
    attention_factor: float = 1.0
    score_passes: float = 6.0
    overlap: float = 1.0
    overlap_gradients: float = 0.8
    overlap_tp: float = 0.0
    fused_optimizer: bool = True
    experts: Literal["grouped", "loop"] = "grouped"
    logit_bytes: float = 8.0
    head_fused: bool = False
    vocabulary_parallel: bool = True
    host_s: float = 2e-3
    call_s: float = 3e-5
    reduce_every_micro: bool = True
    block_host_s: float = 0.0
    stall: float = 0.0
    live_bytes: float = math.inf
    bucket_bytes: float = math.inf
    reserved: float = 1.06  # what an allocator holds over what is in use


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to train. Axes multiply to the world: tp innermost, then cp, sp, fsdp, dp, pp; ep folds over fsdp x sp.

    `zero_stage` says what lies in shards over fsdp x sp: optimizer state (1), gradients too (2), parameters too (3).
    Resident bytes for each parameter: `weight_bytes` of a copy in the compute dtype (0: only the master),
    `master_bytes`, `optimizer_bytes`, `gradient_bytes`; on the wire `gather_bytes` and `reduce_bytes`.
    `recompute` is one mode for all blocks, or one a block.
    """

    dp: int = 1
    fsdp: int = 1
    sp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    tp_sequence: bool = False
    zero_stage: int = 3
    micro: int = 1
    accumulation: int = 1
    seq: int = 4096
    recompute: Recompute = "none"
    reshard: bool = True
    kept: float = 0.0  # share of the blocks that stay gathered all the same
    prefetch: int = 1
    dtype: str = "bf16"
    weight_bytes: float = 0.0
    master_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    gradient_bytes: float = 4.0
    gather_bytes: float = 2.0
    reduce_bytes: float = 4.0
    imbalance: float = 1.0  # rows of the fullest expert rank over the mean
    trained: float = 1.0  # share of the parameters that train (adapters: little)
    engine: Engine = Engine()

    @property
    def world(self) -> int:
        return self.dp * self.fsdp * self.sp * self.tp * self.pp * self.cp

    @property
    def shard(self) -> int:
        """Ranks a dense parameter's shards lie on."""
        return self.fsdp * self.sp

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        return self.micro * self.accumulation * self.dp * self.fsdp

    @property
    def tokens(self) -> int:
        return self.rows * self.seq

    def mode(self, block: int, blocks: int) -> str:
        """The recompute mode of a block, by its place."""
        if isinstance(self.recompute, str):
            return self.recompute
        return self.recompute[block * len(self.recompute) // max(blocks, 1)]

    @classmethod
    def of(cls, plan: Plan, model: ModelCost, *, imbalance: float = 1.0) -> Strategy:
        """What our engine does under `plan`; a batch the plan leaves open is one row a rank of 4096 tokens."""
        mesh, batch = plan.mesh, plan.batch
        names = [call.fqn for call in model.blocks]
        modes = resolve_ranges(plan.recompute, names, what="recompute")
        reshard = resolve_ranges(plan.schedule.reshard, names, what="schedule.reshard")
        micro = batch.micro or 1
        replicas = mesh.dp * mesh.fsdp
        accumulation = max(1, (batch.global_ or micro * replicas) // (micro * replicas))
        compute = _BYTES.get(plan.dtype.compute, model.element_bytes)
        master = _BYTES.get(plan.dtype.master, model.element_bytes)
        return cls(
            dp=mesh.dp,
            fsdp=mesh.fsdp,
            sp=mesh.sp,
            ep=mesh.ep,
            micro=micro,
            accumulation=accumulation,
            seq=batch.seq or 4096,
            recompute=_simple([modes[name] for name in names]),
            reshard=all(reshard[name] for name in names) if names else True,
            prefetch=plan.schedule.prefetch,
            dtype={8: "fp64", 4: "fp32"}.get(compute, "fp16" if plan.dtype.compute == "fp16" else "bf16"),
            master_bytes=master,
            optimizer_bytes=2.0 * master,
            gradient_bytes=master,
            gather_bytes=compute,
            reduce_bytes=_BYTES.get(plan.dtype.reduce, 4),
            imbalance=imbalance,
            engine=Engine(head_fused=plan.fuse == "auto" or "linear_cross_entropy" in plan.fuse),
        )


def fraction_recomputed(strategy: Strategy, blocks: int) -> Mapping[str, Fraction]:
    """How much of the model each recompute mode covers."""
    counts: dict[str, int] = {}
    for block in range(blocks):
        mode = strategy.mode(block, blocks)
        counts[mode] = counts.get(mode, 0) + 1
    return {mode: Fraction(count, max(blocks, 1)) for mode, count in counts.items()}


def _simple(modes: list[str]) -> Recompute:
    """One word where all blocks agree."""
    return modes[0] if len(set(modes)) == 1 else tuple(modes) if modes else "none"
