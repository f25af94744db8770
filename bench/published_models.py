"""The model of a published run: its row's shape as a Hugging Face configuration, costed from the captured program.

A shape is text such as `L=32,h=4096,ffn=14336,heads=32,kv=8,vocab=128256`; where a row gives only a name, the public
shape of that name is used.
"""

from __future__ import annotations

import re
from functools import cache

from transformers import (
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from turbo_compile.costing import cost_of_config
from turbo_compile.plans.cost import ModelCost

# Public shapes, from each model's own config.json on its hub page.
_SHAPES = {
    r"llama-?3(\.\d)?-?8b": "L=32,h=4096,ffn=14336,heads=32,kv=8,vocab=128256",
    r"llama-?3(\.\d)?-?70b": "L=80,h=8192,ffn=28672,heads=64,kv=8,vocab=128256",
    r"llama-?3(\.\d)?-?405b": "L=126,h=16384,ffn=53248,heads=128,kv=8,vocab=128256",
    r"llama-?3\.2-?1b": "L=16,h=2048,ffn=8192,heads=32,kv=8,vocab=128256,tied",
    r"llama-?3\.2-?3b": "L=28,h=3072,ffn=8192,heads=24,kv=8,vocab=128256,tied",
    r"llama-?2?-?7b": "L=32,h=4096,ffn=11008,heads=32,kv=32,vocab=32000",
    r"llama-?2?-?13b": "L=40,h=5120,ffn=13824,heads=40,kv=40,vocab=32000",
    r"llama-?(1-)?30b": "L=60,h=6656,ffn=17920,heads=52,kv=52,vocab=32000",
    r"llama-?(1-)?65b": "L=80,h=8192,ffn=22016,heads=64,kv=64,vocab=32000",
    r"llama-?2?-?70b": "L=80,h=8192,ffn=28672,heads=64,kv=8,vocab=32000",
    r"mistral-?7b": "L=32,h=4096,ffn=14336,heads=32,kv=8,vocab=32000",
    r"mixtral-?8x7b": "L=32,h=4096,moe_ffn=14336,heads=32,kv=8,vocab=32000,E=8,topk=2",
    r"mixtral-?8x22b": "L=56,h=6144,moe_ffn=16384,heads=48,kv=8,vocab=32768,E=8,topk=2",
    r"qwen3-?30b-?a3b": "L=48,h=2048,moe_ffn=768,heads=32,kv=4,head_dim=128,vocab=151936,E=128,topk=8",
    r"qwen3-?235b-?a22b": "L=94,h=4096,moe_ffn=1536,heads=64,kv=4,head_dim=128,vocab=151936,E=128,topk=8",
    r"qwen3-?0\.6b": "L=28,h=1024,ffn=3072,heads=16,kv=8,head_dim=128,vocab=151936,tied",
    r"qwen3-?1\.7b": "L=28,h=2048,ffn=6144,heads=16,kv=8,head_dim=128,vocab=151936,tied",
    r"qwen3-?4b": "L=36,h=2560,ffn=9728,heads=32,kv=8,head_dim=128,vocab=151936,tied",
    r"qwen3-?8b": "L=36,h=4096,ffn=12288,heads=32,kv=8,head_dim=128,vocab=151936",
    r"qwen3-?14b": "L=40,h=5120,ffn=17408,heads=40,kv=8,head_dim=128,vocab=151936",
    r"qwen3-?32b": "L=64,h=5120,ffn=25600,heads=64,kv=8,head_dim=128,vocab=151936",
    r"qwen2\.?5?-?0\.5b": "L=24,h=896,ffn=4864,heads=14,kv=2,vocab=151936,tied",
    r"qwen2\.?5?-?1\.5b": "L=28,h=1536,ffn=8960,heads=12,kv=2,vocab=151936,tied",
    r"qwen2\.?5?-?3b": "L=36,h=2048,ffn=11008,heads=16,kv=2,vocab=151936,tied",
    r"qwen2\.?5?-?7b": "L=28,h=3584,ffn=18944,heads=28,kv=4,vocab=152064",
    r"qwen2\.?5?-?14b": "L=48,h=5120,ffn=13824,heads=40,kv=8,vocab=152064",
    r"qwen2\.?5?-?32b": "L=64,h=5120,ffn=27648,heads=40,kv=8,vocab=152064",
    r"qwen2\.?5?-?72b": "L=80,h=8192,ffn=29568,heads=64,kv=8,vocab=152064",
    r"qwen(1\.5)?-?1\.8b": "L=24,h=2048,ffn=5504,heads=16,kv=16,vocab=151936",
    r"qwen(1\.5)?-?7b": "L=32,h=4096,ffn=11008,heads=32,kv=32,vocab=151936",
    r"qwen(1\.5)?-?14b": "L=40,h=5120,ffn=13696,heads=40,kv=40,vocab=152064",
    r"qwen(1\.5)?-?72b": "L=80,h=8192,ffn=24576,heads=64,kv=64,vocab=152064",
    r"qwen1\.5-moe-a2\.7b": "L=24,h=2048,moe_ffn=1408,heads=16,kv=16,vocab=151936,E=60,topk=4,shared_ffn=5632",
    r"deepseek-?v3|deepseek-?r1": "L=61(3 dense),h=7168,dense_ffn=18432,moe_ffn=2048,heads=128 MLA(q_lora=1536,"
    "kv_lora=512,nope=128,rope=64,v=128),vocab=129280,E=256,topk=8,shared=1",
    r"falcon-?40b": "L=60,h=8192,ffn=32768,heads=128,kv=8,vocab=65024 (GELU)",
    r"falcon-?7b": "L=32,h=4544,ffn=18176,heads=71,kv=1,vocab=65024 (GELU)",
    r"phi-?1\.5": "L=24,h=2048,ffn=8192,heads=32,kv=32,vocab=51200 (GELU)",
    r"stablelm-?alpha-?3b": "L=16,h=4096,ffn=16384,heads=32,kv=32,vocab=50432 (GELU)",
    r"opt-?125m": "L=12,h=768,ffn=3072,heads=12,kv=12,vocab=50272 (GELU)",
    r"opt-?1\.3b": "L=24,h=2048,ffn=8192,heads=32,kv=32,vocab=50272 (GELU)",
    r"opt-?2\.7b": "L=32,h=2560,ffn=10240,heads=32,kv=32,vocab=50272 (GELU)",
    r"opt-?6\.7b": "L=32,h=4096,ffn=16384,heads=32,kv=32,vocab=50272 (GELU)",
    r"opt-?13b": "L=40,h=5120,ffn=20480,heads=40,kv=40,vocab=50272 (GELU)",
    r"opt-?30b": "L=48,h=7168,ffn=28672,heads=56,kv=56,vocab=50272 (GELU)",
    r"opt-?66b": "L=64,h=9216,ffn=36864,heads=72,kv=72,vocab=50272 (GELU)",
    r"(opt-?175b|gpt-?3-?175b)": "L=96,h=12288,ffn=49152,heads=96,kv=96,vocab=51200 (GELU)",
    r"gpt-?neox-?20b": "L=44,h=6144,ffn=24576,heads=64,kv=64,vocab=50432 (GELU)",
    r"bloom-?(176b)?$": "L=70,h=14336,ffn=57344,heads=112,kv=112,vocab=250880 (GELU)",
    r"bloom-?7b1": "L=30,h=4096,ffn=16384,heads=32,kv=32,vocab=250880 (GELU)",
    r"(internlm-?)?7b": "L=32,h=4096,ffn=11008,heads=32,kv=32,vocab=103168",
}
_GPT = re.compile(r"gelu|\bmpt|\bgpt|\bopt\b|bloom", re.IGNORECASE)
_NOT_GPT = re.compile(r"gpt-oss|swiglu|\bglu\b", re.IGNORECASE)


class Unknown(ValueError):
    """A row whose model cannot be told."""


def model_of(row: dict[str, str]) -> ModelCost:
    """The cost of a row's model.

    Raises:
        Unknown: neither its shape nor its name says enough.
    """
    shape = row["arch"].strip()
    if "L=" not in shape:
        shape = _public_shape(row["model"]) or _public_shape(row["hf_name"].rpartition("/")[2])
    if not shape:
        raise Unknown("model shape unknown")
    return _cost(shape, bool(_GPT.search(f"{row['model']} {shape}") and not _NOT_GPT.search(row["model"])))


def _public_shape(name: str) -> str:
    plain = re.sub(r"(meta-|-hf|-base|-instruct|-chat)", "", name.lower()).strip().replace(" ", "-")
    plain = plain.replace("-b", "b")
    return next((shape for pattern, shape in _SHAPES.items() if re.fullmatch(pattern, plain)), "")


@cache
def _cost(shape: str, gpt: bool) -> ModelCost:
    return cost_of_config(config_of(shape, gpt))


def config_of(shape: str, gpt: bool) -> PreTrainedConfig:
    """The configuration nearest to a shape: GPT-2, Llama, Qwen3, Mixtral, Qwen-MoE or DeepSeek-V3."""
    value = _values(shape)
    try:
        layers, hidden, heads = value["L"], value["h"], value["heads"]
        vocabulary = value["vocab"]
    except KeyError as missing:
        raise Unknown(f"model shape without {missing.args[0]}") from None
    if gpt and "E" not in value and value.get("kv", heads) == heads:
        return GPT2Config(
            n_layer=layers,
            n_embd=hidden,
            n_head=heads,
            n_inner=value.get("ffn", 4 * hidden),
            vocab_size=vocabulary,
            n_positions=2048,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    common = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        tie_word_embeddings="tied" in shape,
    )
    if "MLA" in shape:
        return DeepseekV3Config(
            **common,
            num_key_value_heads=heads,
            intermediate_size=value.get("dense_ffn", value.get("ffn", 10944)),
            moe_intermediate_size=value["moe_ffn"],
            n_routed_experts=value["E"],
            num_experts_per_tok=value["topk"],
            n_shared_experts=value.get("shared", 1),
            first_k_dense_replace=value.get("dense", 0),
            q_lora_rank=value.get("q_lora"),
            kv_lora_rank=value.get("kv_lora", 512),
            qk_nope_head_dim=value.get("nope", 128),
            qk_rope_head_dim=value.get("rope", 64),
            v_head_dim=value.get("v", 128),
            n_group=1,
            topk_group=1,
        )
    common["num_key_value_heads"] = value.get("kv", heads)
    head_dim = value.get("head_dim", hidden // heads)
    if "E" not in value:
        kind = Qwen3Config if "head_dim" in value else LlamaConfig
        return kind(**common, intermediate_size=value["ffn"], head_dim=head_dim)
    wide = value.get("moe_ffn", value.get("ffn", 0))
    if value.get("shared_ffn") or value.get("shared"):
        shared = value.get("shared_ffn", wide * value.get("shared", 1))
        return Qwen2MoeConfig(
            **common,
            moe_intermediate_size=wide,
            intermediate_size=wide,
            num_experts=value["E"],
            num_experts_per_tok=value["topk"],
            shared_expert_intermediate_size=shared,
        )
    if value["E"] <= 16 and "head_dim" not in value:
        return MixtralConfig(
            **common, intermediate_size=wide, num_local_experts=value["E"], num_experts_per_tok=value["topk"]
        )
    return Qwen3MoeConfig(
        **common,
        head_dim=head_dim,
        moe_intermediate_size=wide,
        intermediate_size=wide,
        num_experts=value["E"],
        num_experts_per_tok=value["topk"],
    )


def _values(shape: str) -> dict[str, int]:
    """`name=number` pairs; `(3 dense)` after the layers is `dense`."""
    found = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", shape)}
    if dense := re.search(r"\((\d+) dense", shape):
        found["dense"] = int(dense[1])
    return found
