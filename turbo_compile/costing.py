"""The cost of a model, from its configuration: captured on meta with a few layers of each kind, repeated, kept on disk.

cost = cost_of_config(AutoConfig.from_pretrained("Qwen/Qwen3-235B-A22B"))     # seconds, then milliseconds
cost = cost_of_model(model)                                                  # every layer of a model at hand
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from turbo_compile.capture import Signature, capture
from turbo_compile.differentiate import differentiate
from turbo_compile.huggingface import compute_dtypes
from turbo_compile.plans.cost import CallCost, GroupCost, ModelCost
from turbo_compile.plans.reading import read_cost

VERSION = 1  # of what is read: a cost kept by another is read again
_DEPTHS = ("num_hidden_layers", "n_layer")
_CPU = torch.device("cpu")


def cost_of_model(model: PreTrainedModel, compute: torch.dtype = torch.bfloat16) -> ModelCost:
    """The cost of `model`, weights on meta or real, computing in `compute`.

    Raises:
        CaptureError: the model cannot be captured; names its line.
    """
    signature = Signature(
        loss=True,
        logits=False,
        training=True,
        differentiable=True,
        trainable=frozenset(name for name, p in model.named_parameters() if p.requires_grad),
    )
    program = capture(model, signature, compute_dtypes(model, compute), _CPU)
    return read_cost(program, differentiate(program, signature.differentiated))


def cost_of_config(config: PreTrainedConfig, compute: torch.dtype = torch.bfloat16) -> ModelCost:
    """The cost of the model a configuration describes; read from `cache_directory()` if it was captured before."""
    path = cache_directory() / f"{_key(config, compute)}.json"
    if path.is_file():
        return ModelCost.from_json(path.read_text(encoding="utf-8"))
    cost = _captured(config, compute)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(cost.to_json(), encoding="utf-8")
    partial.replace(path)  # whole or absent, whoever else writes
    return cost


def cache_directory() -> Path:
    """Where captured costs are kept: TURBO_COMPILE_CACHE, or the user's cache directory."""
    home = os.environ.get("TURBO_COMPILE_CACHE") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/turbo_compile"
    return Path(home).expanduser() / "costs"


def _key(config: PreTrainedConfig, compute: torch.dtype) -> str:
    values = {
        key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "transformers_version")
    }
    text = json.dumps(
        [VERSION, torch.__version__, transformers_version, str(compute), values], sort_keys=True, default=str
    )
    return f"{config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _captured(config: PreTrainedConfig, compute: torch.dtype) -> ModelCost:
    values = config.to_dict()
    kinds = _layer_kinds(values)
    few = max((kinds.index(kind) for kind in set(kinds)), default=-1) + 1
    short = _shortened(config, values, few) if few < len(kinds) else config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(short, dtype=torch.float32)
    for module in model.modules():  # dropout draws nothing that costs: kept out of the program
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    cost = cost_of_model(model, compute)
    return _repeated(cost, kinds, few) if few < len(kinds) else cost


def _layer_kinds(values: Mapping[str, Any]) -> list[str]:
    """One word a layer, the same for layers the configuration makes alike."""
    depth = next((values[key] for key in _DEPTHS if values.get(key)), 0)
    lists = [each for each in values.values() if isinstance(each, list) and len(each) == depth]
    dense = values.get("first_k_dense_replace") or 0
    every = values.get("decoder_sparse_step") or 1
    only = values.get("mlp_only_layers") or []
    return [
        "/".join(str(part) for part in (*[each[i] for each in lists], i < dense, (i + 1) % every == 0, i in only))
        for i in range(depth)
    ]


def _shortened(config: PreTrainedConfig, values: Mapping[str, Any], few: int) -> PreTrainedConfig:
    depth = next(values[key] for key in _DEPTHS if values.get(key))
    changed = {key: few for key in _DEPTHS if values.get(key)}
    lists = {key: each[:few] for key, each in values.items() if isinstance(each, list) and len(each) == depth}
    kept = {
        key: each for key, each in values.items() if key not in ("transformers_version", "_name_or_path", "qk_head_dim")
    }
    return type(config).from_dict({**kept, **lists, **changed})


def _repeated(cost: ModelCost, kinds: list[str], few: int) -> ModelCost:
    """`cost` of the first `few` layers, at full depth: each further layer is a copy of the first of its kind."""
    blocks = [call for call in cost.calls if call.block]
    if len(blocks) != few:
        raise ValueError(f"{cost.name}: {len(blocks)} blocks were captured of {few} layers, so they cannot be repeated")
    groups = dict(cost.groups)
    made: list[CallCost] = []
    stem = blocks[0].fqn.rpartition(".")[0]
    for layer in range(few, len(kinds)):
        like = blocks[kinds.index(kinds[layer])]
        fqn = f"{stem}.{layer}"
        names = []
        for name in like.groups:
            shared = sum(name in call.groups for call in cost.calls) > 1
            copy = name if shared else name.replace(f"{like.fqn}.", f"{fqn}.")
            if copy not in groups:
                group = groups[name]
                groups[copy] = GroupCost(copy, group.dense, group.experts, group.tensors, group.trained)
            names.append(copy)
        made.append(CallCost(fqn, like.segment, tuple(names), True))
    last = cost.calls.index(blocks[-1]) + 1
    return replace(cost, groups=groups, calls=(*cost.calls[:last], *made, *cost.calls[last:]))
