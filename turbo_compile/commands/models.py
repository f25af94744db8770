"""The MODEL argument: a hub id, a local directory or a config file, and the model it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from turbo_compile.errors import TurboCompileError

DATA = files("turbo_compile") / "data"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHTS = ("*.safetensors", "*.bin")

# A tiny model keeps the structure of the real one: what a size cuts, and to what.
_SIZES = {
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_inner": 96,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "vocab_size": 128,
}
_DEPTHS = ("num_hidden_layers", "n_layer")
_DERIVED = ("qk_head_dim", "transformers_version", "_name_or_path")  # the config computes them again


@dataclass(frozen=True, slots=True)
class Source:
    """A model before it is built. `weights` is what `from_pretrained` takes; None: the config alone."""

    name: str
    config: PreTrainedConfig
    weights: str | None
    tokenizer: str | None


def find_model(model: str | None) -> Source:
    """The model that MODEL names; None is the small one that comes with the package.

    Raises:
        TurboCompileError: there is no such model.
    """
    if model is None:
        return Source("small", _config(str(DATA / "small.json")), None, None)
    path = Path(model)
    if path.is_file():
        return Source(path.stem, _config(model), None, None)
    if path.is_dir():
        weights = model if any(any(path.glob(pattern)) for pattern in _WEIGHTS) else None
        tokenizer = model if any((path / name).exists() for name in _TOKENIZERS) else None
        return Source(path.resolve().name, _config(model), weights, tokenizer)
    if path.suffix == ".json" or path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise TurboCompileError(f"there is no model at {model}: no such file or directory")
    return Source(model.rpartition("/")[2], _config(model), model, model)


def build_model(source: Source, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model with its weights in `dtype` (None: as they are stored), or with random ones (None: in fp32)."""
    if source.weights is None:
        return _checked(_from_config(source.config, dtype or torch.float32))
    wanted = "auto" if dtype is None else dtype
    return _checked(AutoModelForCausalLM.from_pretrained(source.weights, config=source.config, dtype=wanted))


def build_on_meta(source: Source) -> PreTrainedModel:
    """The model without weights, in the dtype its config names."""
    with torch.device("meta"):
        return _checked(_from_config(source.config, source.config.dtype or torch.float32))


def load_tokenizer(source: Source) -> Any | None:
    return None if source.tokenizer is None else AutoTokenizer.from_pretrained(source.tokenizer)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    values = config.to_dict()
    return _like(config, values, {key: 0.0 for key, value in values.items() if _is_dropout(key, value)})


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture at toy size: every kind of layer once, gradients well above rounding noise."""
    values = config.to_dict()
    changed: dict[str, Any] = {key: 0.0 for key, value in values.items() if _is_dropout(key, value)}
    for key, size in _SIZES.items():
        if isinstance(values.get(key), int) and values[key] > size:
            changed[key] = size
    changed |= _tiny_heads(values) | _tiny_depth(values) | _tiny_tokens(values)
    if "rope_parameters" in values:
        changed["rope_parameters"] = _tiny_rope(values["rope_parameters"], changed.get("head_dim", 16))
    return _like(config, values, changed | {"initializer_range": 0.2})


def _tiny_heads(values: Mapping[str, Any]) -> dict[str, int]:
    changed = {}
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads is not None and groups is not None:
        changed["num_key_value_heads"] = min(4, heads) if groups == heads else min(2, groups)
    if "qk_rope_head_dim" in values and values.get("head_dim"):
        changed["head_dim"] = _SIZES["qk_rope_head_dim"]  # in latent attention: of the rotary part alone
    return changed


def _tiny_depth(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest layers, at least two, that show every kind; lists with an entry a layer are cut to match."""
    key = next((key for key in _DEPTHS if key in values), None)
    if key is None:
        return {}
    depth = values[key]
    by_layer = {name: each for name, each in values.items() if isinstance(each, list) and len(each) == depth}
    kinds = [max(each.index(kind) for kind in set(each)) + 1 for each in by_layer.values()]
    few = min(depth, max(2, values.get("decoder_sparse_step") or 1, *kinds, 0))
    changed: dict[str, Any] = {key: few, **{name: each[:few] for name, each in by_layer.items()}}
    if "mlp_only_layers" in values:
        changed["mlp_only_layers"] = [layer for layer in values["mlp_only_layers"] or [] if layer < few]
    return changed


def _tiny_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens that a vocabulary of 128 still has."""
    named = {key: values[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id") if key in values}
    return {key: None for key, token in named.items() if not isinstance(token, int) or token >= _SIZES["vocab_size"]}


def _tiny_rope(parameters: Any, head_dim: int) -> Any:
    """Rotary settings with lists of factors, one for each frequency, cut to the frequencies of a tiny head."""
    if isinstance(parameters, Mapping):
        return {key: _tiny_rope(value, head_dim) for key, value in parameters.items()}
    return parameters[: head_dim // 2] if isinstance(parameters, list) else parameters


def _is_dropout(key: str, value: object) -> bool:
    return isinstance(value, float) and ("dropout" in key or key.endswith("pdrop"))


def _like(config: PreTrainedConfig, values: Mapping[str, Any], changed: Mapping[str, Any]) -> PreTrainedConfig:
    kept = {key: value for key, value in values.items() if key not in _DERIVED}
    return type(config).from_dict({**kept, **changed})


def _config(model: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise TurboCompileError(
            f"{model} is no model that can be read ({reason}); "
            "give a hub id, a directory with a config.json, or a config file"
        ) from error


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise TurboCompileError(f"{config.model_type} is no causal language model that transformers knows") from error


def _checked(model: Any) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise TurboCompileError(f"{type(model).__name__} is not a transformers PreTrainedModel")
    return model
