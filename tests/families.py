"""Configurations of tiny models of the architectures that are tested."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.tiny import make_config

FULL_AND_SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {"attention_bias": True}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen2 sliding": (hf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": (hf.Qwen3Config, {}),
    "mistral": (hf.MistralConfig, {"sliding_window": 7}),
    "gemma2": (hf.Gemma2Config, {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, **FULL_AND_SLIDING}),
    "gemma3_text": (hf.Gemma3TextConfig, {"query_pre_attn_scalar": 8, **FULL_AND_SLIDING}),
    "phi3": (hf.Phi3Config, {"sliding_window": 7}),
    "smollm3": (hf.SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "olmo2": (hf.Olmo2Config, {}),
    "granite": (hf.GraniteConfig, {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "gpt_neox": (hf.GPTNeoXConfig, {"head_dim": None}),
    "gpt2": (hf.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (hf.Qwen3MoeConfig, EXPERTS),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
}
# Compared with their own attention when they are loaded
OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "phi": (hf.PhiConfig, {}),
    "opt": (hf.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": (hf.Starcoder2Config, {"sliding_window": 7}),
    "cohere2": (hf.Cohere2Config, FULL_AND_SLIDING),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {
            **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6},
            **{"head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"n_group": 1, "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
        },
    ),
}


def config_of(name: str) -> Any:
    kind, settings = {**FAMILIES, **OTHERS}[name]
    return make_config(kind, **settings)
