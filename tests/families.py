"""Model families, each as small as its architecture allows: what the engine's tests train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 101  # odd: its rows divide over no mesh
WINDOW = 6

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def _alternating(layers: int) -> dict[str, Any]:
    return {
        "sliding_window": WINDOW,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
    }


def _gpt2(layers: int, **more: Any) -> GPT2Config:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 128}
    return GPT2Config(**(sizes | off | {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2} | more))


def _deepseek(layers: int, **more: Any) -> DeepseekV3Config:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sparse = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": 4, "moe_intermediate_size": 24}
    return DeepseekV3Config(**(_BASE | latent | sparse | _EXPERTS | sizes | more))


def _qwen3_moe(layers: int, **more: Any) -> Qwen3MoeConfig:
    sparse = {"moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1}
    sizes = {"num_hidden_layers": layers, "head_dim": 8, "mlp_only_layers": []}
    return Qwen3MoeConfig(**(_BASE | sparse | _EXPERTS | sizes | more))


def _mixtral(layers: int, **more: Any) -> MixtralConfig:
    return MixtralConfig(**(_BASE | _EXPERTS | {"num_hidden_layers": layers, "num_local_experts": 4} | more))


def _gpt_oss(layers: int, **more: Any) -> GptOssConfig:
    sizes = {"num_hidden_layers": layers, "head_dim": 8, "num_local_experts": 4}
    # A context of exactly factor x original: transformers warns otherwise.
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    return GptOssConfig(**(_BASE | _EXPERTS | sizes | _alternating(layers) | {"rope_parameters": rope} | more))


def _glm4_moe(layers: int, **more: Any) -> Glm4MoeConfig:
    sparse = {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "head_dim": 8}
    rest = {"num_hidden_layers": layers, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}
    return Glm4MoeConfig(**(_BASE | _EXPERTS | sparse | rest | more))


def _olmoe(layers: int, **more: Any) -> OlmoeConfig:
    return OlmoeConfig(**(_BASE | _EXPERTS | {"num_hidden_layers": layers, "num_experts": 4} | more))


def _qwen3_next(layers: int, **more: Any) -> Qwen3NextConfig:
    sparse = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "head_dim": 8}
    kinds = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return Qwen3NextConfig(**(_BASE | _EXPERTS | sparse | kinds | linear | heads | more))


def _bailing(layers: int, **more: Any) -> BailingHybridConfig:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sparse = {"num_local_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "head_dim": 8}
    kinds = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "first_k_dense_replace": 1}
    return BailingHybridConfig(**(_BASE | _EXPERTS | latent | sparse | {"num_key_value_heads": 4} | kinds | more))


def _llama4(layers: int, **more: Any) -> Llama4TextConfig:
    sparse = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 8}
    kinds = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    return Llama4TextConfig(**(_BASE | sparse | kinds | more))


def _dense(kind: Callable[..., PreTrainedConfig], **own: Any) -> Callable[..., PreTrainedConfig]:
    return lambda layers, **more: kind(**(_BASE | {"num_hidden_layers": layers} | own | more))


def _gemma3(layers: int, **more: Any) -> Gemma3TextConfig:
    own = {"num_hidden_layers": layers, "head_dim": 8, "query_pre_attn_scalar": 8}
    return Gemma3TextConfig(**(_BASE | own | _alternating(layers) | more))


_FAMILIES: dict[str, tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig]]] = {
    "llama": (LlamaForCausalLM, _dense(LlamaConfig)),
    "qwen2": (Qwen2ForCausalLM, _dense(Qwen2Config)),
    "qwen3": (Qwen3ForCausalLM, _dense(Qwen3Config, head_dim=8)),
    "mistral": (MistralForCausalLM, _dense(MistralConfig, head_dim=8, sliding_window=WINDOW)),
    "gemma3": (Gemma3ForCausalLM, _gemma3),
    "phi3": (Phi3ForCausalLM, _dense(Phi3Config, resid_pdrop=0.0)),
    "olmo2": (Olmo2ForCausalLM, _dense(Olmo2Config)),
    "gpt2": (GPT2LMHeadModel, _gpt2),
    "qwen3_moe": (Qwen3MoeForCausalLM, _qwen3_moe),
    "mixtral": (MixtralForCausalLM, _mixtral),
    "deepseek_v3": (DeepseekV3ForCausalLM, _deepseek),
    "gpt_oss": (GptOssForCausalLM, _gpt_oss),
}
FAMILIES = tuple(_FAMILIES)
_FAMILIES |= {  # mixtures that only the tests of experts train; the hybrids with full attention alone
    "glm4_moe": (Glm4MoeForCausalLM, _glm4_moe),
    "olmoe": (OlmoeForCausalLM, _olmoe),
    "qwen3_next": (Qwen3NextForCausalLM, _qwen3_next),
    "bailing_hybrid": (BailingHybridForCausalLM, _bailing),
    "llama4": (Llama4ForCausalLM, _llama4),
}
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
WITH_ROUTER_LOSS = ("qwen3_moe", "mixtral", "gpt_oss")


def config_of(family: str, layers: int = 2, **changes: Any) -> PreTrainedConfig:
    """The family's configuration; `changes` are fields of it."""
    return _FAMILIES[family][1](layers, **changes)


def build(family: str, layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """The family's model in training mode, with the same weights in every process."""
    torch.manual_seed(seed)
    return _FAMILIES[family][0](config_of(family, layers, **changes)).to(dtype).train()


def ids_of(rows: int, length: int, vocabulary: int = VOCABULARY, seed: int = 1) -> Tensor:
    """Token ids (rows, length), uniform in [3, vocabulary)."""
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
