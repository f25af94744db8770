"""The models that benchmarks share: Qwen3 at a chosen depth and width, random weights."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def qwen3(layers: int, hidden: int = 512, vocabulary: int = 8192, tied: bool = False) -> Qwen3ForCausalLM:
    """A dense Qwen3 in fp32, the same weights on every rank. 8 layers of 512 with 8,192 tokens: 33.6M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()
