"""A published run as the model, cluster and strategy to predict it with, and what was measured.

Everything is read from a row's own columns: sizes of the axes, what is sharded, recomputation, kernels, framework. A
row that leaves something out is either completed by the framework's usual default or skipped with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from published_hardware import cluster_of
from published_models import Unknown, model_of

from turbo_compile.errors import TurboCompileError
from turbo_compile.plans.cluster import Cluster
from turbo_compile.plans.cost import ModelCost
from turbo_compile.plans.memory import gathered_bytes
from turbo_compile.plans.timeline import Engine, Strategy, predict

GIB = 2.0**30


@dataclass(frozen=True)
class Case:
    """One run. `step_s` is None where it ran out of memory or no time can be read; memory in bytes as defined."""

    id: str
    dataset: str
    tier: str
    model: ModelCost
    cluster: Cluster
    strategy: Strategy
    moe: bool
    flash: bool
    step_s: float | None
    out_of_memory: bool
    memory: float | None
    memory_kind: str  # allocated, reserved, other


class Skip(ValueError):
    """A row that cannot be described; the message is the reason."""


def read_case(row: Mapping[str, str]) -> Case:
    """A row as a case.

    Raises:
        Skip: says what is missing.
    """
    row = {key: (value or "").strip() for key, value in row.items()}
    status = row["status"].lower()
    oom = status.startswith("oom")
    if not oom and status not in ("ok", ""):
        raise Skip(f"status {row['status'].split(':')[0]}")
    if re.search(r"lora|adapter|nf4|qlora", f"{row['workload']} {row['precision']}", re.IGNORECASE):
        raise Skip("adapters or quantised weights, which no program here trains")
    if re.search(r"offload=True|cpu offload", row["parallel_other"], re.IGNORECASE):
        raise Skip("offloads to the host")
    try:
        model = model_of(row)
    except Unknown as error:
        raise Skip(str(error)) from None
    except TurboCompileError as error:
        raise Skip(f"model cannot be captured: {error}"[:80]) from None
    cluster = cluster_of(row)
    strategy = strategy_of(row, model, cluster)
    return Case(
        id=row["id"],
        dataset=row["dataset"],
        tier=row["tier"],
        model=model,
        cluster=cluster,
        strategy=strategy,
        moe=row["dense_or_moe"] == "moe" or bool(model.experts),
        flash=strategy.engine.attention == "flash",
        step_s=None if oom else _step(row, strategy),
        out_of_memory=oom,
        memory=_memory(row),
        memory_kind=_memory_kind(row),
    )


def strategy_of(row: Mapping[str, str], model: ModelCost, cluster: Cluster) -> Strategy:
    """The axes, the batch, what is kept, and the engine."""
    ranks = _whole(row["n_gpus"]) or 0
    if not ranks:
        raise Skip("number of devices unknown")
    tp, pp, cp, ep = (_whole(row[axis]) or 1 for axis in ("tp", "pp", "cp", "ep"))
    vpp = _whole(row["vpp"]) or 1
    ulysses = re.match(r"(\d+)", row["sp"])
    sp = int(ulysses[1]) if ulysses else 1
    replicas, rest = divmod(ranks, tp * pp * cp * sp)
    if rest or not replicas:
        raise Skip("axes do not multiply to the number of devices")
    seq = _whole(row["seq_len"].lstrip("<=")) or 0
    if not seq:
        raise Skip("sequence length unknown")
    engine, kind = engine_of(row)
    stage = _stage(row, kind)
    declared = _whole(row["dp_replicate"]) or 1
    dp = declared if stage == 3 and declared > 1 and replicas % declared == 0 and _whole(row["dp_shard"]) else 1
    micro, accumulation = _batch(row, replicas, pp)
    base = Strategy(
        dp=dp if stage else replicas,
        fsdp=replicas // dp if stage else 1,
        sp=sp,
        ep=min(ep, replicas * cp * tp),
        tp=tp,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        cp=cp,
        tp_sequence=row["sp"] == "yes" or (tp > 1 and kind == "fsdp2"),
        zero_stage=stage,
        micro=micro,
        accumulation=accumulation,
        seq=seq,
        recompute=_recompute(row, kind),
        prefetch=1,
        dtype=_dtype(row),
        imbalance=1.0 if "balanc" in row["notes"] else (1.1 if model.experts else 1.0),
        engine=engine,
    )
    held = _held(base, row, kind)
    if re.search(r"DeepCompile\(.*S\)", row["parallel_other"]):
        held = replace(held, kept=_selectively(model, cluster, held))
    return held


def _selectively(model: ModelCost, cluster: Cluster, strategy: Strategy) -> float:
    """The share of the blocks that selective unsharding leaves gathered: what seven eighths of the memory hold."""
    room = 0.88 * cluster.accelerator.usable_bytes - predict(model, cluster, strategy).peak_bytes
    whole = sum(gathered_bytes(model.group_of(call), strategy) for call in model.blocks)
    return min(1.0, max(0.0, room / whole))


# --- engine -----------------------------------------------------------------------------------------------------------


def engine_of(row: Mapping[str, str]) -> tuple[Engine, str]:
    """How the framework of a row runs a model, and its kind: megatron, deepspeed, fsdp1, fsdp2, paddle."""
    words = f"{row['parallel_other']} {row['source']} {row['workload']}"
    kind = _kind(words, row)
    compiled = row["compile"].lower().startswith("yes") or "DeepCompile" in words
    attention = row["attention_kernel"].lower()
    scores = bool(re.search(r"no flash|^torch$|^fused$|fused softmax|eager|math", attention))
    fused_kernels = kind in ("megatron", "paddle") and attention != "torch"
    engine = Engine(
        name=kind,
        kernels="compiled" if compiled else "fused" if fused_kernels else "eager",
        attention="scores" if scores else "flash",
        attention_factor=_attention_factor(attention, row["hardware"]),
        score_passes=6.5 if "softmax" in attention or attention == "fused" else 16.0,
        block_host_s=9e-4 if kind == "megatron" else 0.0,  # fitted on vTrain's small models
        stall=0.0 if "Megatron-DeepSpeed" in words or kind in ("fsdp1", "deepspeed") else 0.22,  # on AlephAlpha's runs
        call_s={"fsdp1": 2.5e-4, "fsdp2": 1.5e-4, "deepspeed": 6e-4}.get(kind, 2e-5),
        host_s=1e-2,
        experts="loop" if "HF transformers" in row["workload"] else "grouped",
        overlap_gradients=0.0 if re.search(r"no (grad|comm)", words) else 0.6,
        overlap=0.9,
        reserved=1.08,
    )
    return _tuned(engine, kind, row), kind


def _kind(words: str, row: Mapping[str, str]) -> str:
    for pattern, kind in (
        (r"Paddle", "paddle"),
        (r"Megatron-FSDP", "fsdp2"),
        (r"DeepCompile|ZeRO-?3|DeepSpeed ZeRO", "deepspeed"),
        (r"FSDP2|SimpleFSDP|torchtitan", "fsdp2"),
        (r"FSDP", "fsdp1"),
        (r"DS3D|Megatron|FlagScale|1F1B|Bridge|NeMo|3D", "megatron"),
        (r"ZeRO", "deepspeed"),
    ):
        if re.search(pattern, words, re.IGNORECASE):
            return kind
    return "megatron" if (_whole(row["pp"]) or 1) > 1 or (_whole(row["tp"]) or 1) > 1 else "fsdp1"


def _tuned(engine: Engine, kind: str, row: Mapping[str, str]) -> Engine:
    """What else a row says of its kernels."""
    attention = row["attention_kernel"]
    if "1F1B" in row["parallel_other"] and kind == "megatron" and "flash" in attention and "RMS" not in attention:
        engine = replace(engine, kernels="eager")  # norms and rotary embeddings as written
    if "async" in row["parallel_other"].lower() and kind == "fsdp2":
        engine = replace(engine, overlap_tp=0.5)
    return engine


def _attention_factor(attention: str, hardware: str) -> float:
    """Of the device's efficiency, which is for FlashAttention 2."""
    if re.search(r"v1|1\.0|attention1", attention):
        return 0.75
    if re.search(r"cudnn|te/|attention-?3", attention) and not hardware.startswith("A"):
        return 1.25
    return 1.0


# --- memory and batch -------------------------------------------------------------------------------------------------


_HALF_GRADIENTS = {
    "weight_bytes": 2.0,
    "master_bytes": 4.0,
    "optimizer_bytes": 8.0,
    "gradient_bytes": 2.0,
    "reduce_bytes": 2.0,
}


def _held(strategy: Strategy, row: Mapping[str, str], kind: str) -> Strategy:
    """Bytes for each parameter that a kind of framework holds and sends."""
    half = bool(re.search(r"bf16-true|pure_bf16", row["precision"]))
    if "AA-Scaling" in row["parallel_other"]:  # gradients in bf16, and a loss over whole logits: fitted on what fits
        whole = replace(strategy.engine, vocabulary_parallel=False, logit_bytes=14.0, reserved=1.25)
        return replace(strategy, **_HALF_GRADIENTS, engine=whole)
    if kind in ("megatron", "paddle"):
        return replace(
            strategy, weight_bytes=2.0, master_bytes=4.0, optimizer_bytes=8.0, gradient_bytes=4.0, reduce_bytes=4.0
        )
    if kind == "deepspeed":
        engine = strategy.engine
        if (
            "DeepCompile" not in row["parallel_other"]
        ):  # stage3_max_live_parameters, and buckets, as configured by default
            engine = replace(engine, live_bytes=2e9, bucket_bytes=2.6e9)
        return replace(strategy, **_HALF_GRADIENTS, engine=engine)
    if half:
        return replace(strategy, master_bytes=2.0, optimizer_bytes=4.0, gradient_bytes=2.0, reduce_bytes=2.0)
    return replace(strategy, reduce_bytes=4.0 if kind == "fsdp2" else 2.0)


def _stage(row: Mapping[str, str], kind: str) -> int:
    if stated := re.fullmatch(r"[0-3]", row["zero_stage"]):
        return int(stated[0])
    if "ZeRO" in row["parallel_other"] and (found := re.search(r"ZeRO-?(\d)", row["parallel_other"])):
        return int(found[1])
    return 1 if kind in ("megatron", "paddle") else 3


def _batch(row: Mapping[str, str], replicas: int, pp: int) -> tuple[int, int]:
    """Rows of a micro-batch on a rank, and how many micro-batches a step has."""
    micro, whole = _whole(row["micro_batch"]), _whole(row["global_batch"])
    if not micro and not whole:
        raise Skip("batch size unknown")
    if not micro:
        micro = max(1, (whole or 1) // replicas // (4 * pp if pp > 1 else 1))
    if not whole or "per micro-batch iteration" in row["notes"]:
        return micro, pp * 4 if pp > 1 else 1
    steps, rest = divmod(whole, micro * replicas)
    if rest and steps > 0:
        steps += 1
    if not steps:
        raise Skip("global batch smaller than one micro-batch on every rank")
    return micro, steps


def _recompute(row: Mapping[str, str], kind: str) -> str:
    stated = row["ac"].lower()
    if stated.startswith("full"):
        return "full"
    if "selective" in stated:
        return "selective"
    return "none"


def _dtype(row: Mapping[str, str]) -> str:
    precision = row["precision"].lower()
    if re.search(r"nvfp4|fp4", precision) and "bnb" not in precision:
        return "fp4"
    if re.search(r"fp8|float8", precision):
        return "fp8"
    if re.search(r"fp16|amp$", precision):
        return "fp16"
    return "bf16"


# --- what was measured ------------------------------------------------------------------------------------------------


def _step(row: Mapping[str, str], strategy: Strategy) -> float | None:
    if stated := _number(row["step_time_s"]):
        return stated
    if rate := _number(row["tokens_per_s_per_gpu"]):
        return strategy.tokens / rate / strategy.world
    return None


def _memory(row: Mapping[str, str]) -> float | None:
    raw = row["mem_raw"]
    if exact := re.search(r"max_memory_allocated=(\d+)\s*B", raw):
        return float(exact[1])
    value = _number(row["peak_mem_gib"])
    if value is None:
        return None
    if re.search(r"\d\s*MB max allocated", raw):
        return value * GIB
    return value * (1e9 if re.search(r"\d\s*GB\b", raw) else GIB)


def _memory_kind(row: Mapping[str, str]) -> str:
    raw = row["mem_raw"].lower()
    if "allocated" in raw:
        return "allocated"
    return "reserved" if "reserved" in raw else "other"


def _number(text: str) -> float | None:
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        return None
    return value if value > 0 else None


def _whole(text: str) -> int | None:
    value = _number(text)
    return int(value) if value is not None else None
