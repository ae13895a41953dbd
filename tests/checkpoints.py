"""What the config.json of widely used checkpoints says, at tiny sizes: names, flags and obsolete keys as they are published.

Sizes are shrunk; what changes the arithmetic or the reading (rotation, windows, ties, biases, caps, scalings, quantization,
custom code) is kept. From the files on the Hugging Face Hub, as far as they are known to their readers by heart.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 300}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_IDS, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "bfloat16"}
_COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-05}
_LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_DECODER, **_COMMON},
    **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "transformers_version": "4.40.0", "use_cache": True},
}
_LLAMA3_ROPE = {
    **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    **{"original_max_position_embeddings": 64, "rope_type": "llama3"},
}
_QWEN2 = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_DECODER, **_COMMON, "rms_norm_eps": 1e-06},
    **{"max_window_layers": 2, "rope_theta": 1000000.0, "sliding_window": 512, "use_sliding_window": False},
    **{"tie_word_embeddings": False, "use_mrope": False, "transformers_version": "4.43.1"},
}
_QWEN3 = {
    **{**_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    **{"attention_bias": False, "rope_scaling": None, "sliding_window": None},
}
_EXPERTS = {
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True},
    **{"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001},
}
_MISTRAL = {
    **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", **_DECODER, **_COMMON},
    **{"rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False},
}
_GEMMA = {
    **{**_DECODER, "attention_bias": False, "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"},
    **{"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_theta": 10000.0},
}
_PHI3 = {
    **{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **_DECODER, **_COMMON, "num_key_value_heads": 4},
    **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 64, "pad_token_id": 0},
    **{"rope_theta": 10000.0, "sliding_window": 511, "tie_word_embeddings": False, "rope_scaling": None},
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
}
_OLMO = {**_DECODER, **_COMMON, "attention_bias": False, "pad_token_id": 0, "tie_word_embeddings": False}
_GRANITE = {
    **{**_DECODER, **_COMMON, "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0},
    **{
        "logits_scaling": 8.0,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000,
    },
    **{"tie_word_embeddings": True, "pad_token_id": 0},
}
_DEEPSEEK = {
    **{**_DECODER, **_COMMON, "num_key_value_heads": 4, "attention_bias": False, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 8, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "rope_theta": 10000},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 8, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 64, "type": "yarn"},
    },
}
_GPT_NEOX = {
    **{"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", **_IDS, **_SIZES, "bos_token_id": 2},
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-05, "max_position_embeddings": 512, "rotary_emb_base": 10000},
    **{"rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "use_parallel_residual": True},
}
_OPT = {
    **{"architectures": ["OPTForCausalLM"], "model_type": "opt", **_IDS, "hidden_size": 32, "ffn_dim": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "activation_function": "relu", "do_layer_norm_before": True},
    **{"max_position_embeddings": 512, "pad_token_id": 1, "prefix": "</s>", "word_embed_proj_dim": 32, "dropout": 0.1},
    "torch_dtype": "float16",
}
_FALCON = {
    **{"architectures": ["FalconForCausalLM"], "model_type": "falcon", **_IDS, "hidden_size": 32, "alibi": False},
    **{
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bias": False,
        "layer_norm_epsilon": 1e-05,
        "multi_query": True,
    },
    **{"new_decoder_architecture": False, "parallel_attn": True, "apply_residual_connection_post_layernorm": False},
    "torch_dtype": "bfloat16",
}
_STABLELM = {
    **{"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", **_DECODER, "hidden_act": "silu"},
    **{"layer_norm_eps": 1e-05, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "rope_theta": 10000},
    **{"tie_word_embeddings": False, "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False},
}
_COHERE = {
    **{**_DECODER, "attention_bias": False, "hidden_act": "silu", "layer_norm_eps": 1e-05, "logit_scale": 0.0625},
    **{"pad_token_id": 0, "rope_theta": 8000000.0},
}
_GLM = {
    **{**_DECODER, **_COMMON, "attention_bias": True, "head_dim": 8, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": [2, 3, 4]},
}

RUN: dict[str, Config] = {  # completions are those of transformers
    "Llama-2-7b-chat": {**_LLAMA, "num_key_value_heads": 4, "torch_dtype": "float16", "pad_token_id": 0},
    "Llama-3-8B-Instruct": {**_LLAMA, "rope_theta": 500000.0},
    "Llama-3.1-8B-Instruct": {
        **_LLAMA,
        "eos_token_id": [2, 3, 4],
        "rope_scaling": _LLAMA3_ROPE,
        "rope_theta": 500000.0,
    },
    "Llama-3.2-1B-Instruct": {
        **{**_LLAMA, "head_dim": 8, "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True},
        "eos_token_id": [2, 3, 4],
    },
    "CodeLlama-7b-Instruct": {**_LLAMA, "num_key_value_heads": 4, "rope_theta": 1000000},
    "TinyLlama-1.1B-Chat": _LLAMA,
    "vicuna-7b-v1.5-16k": {**_LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}, "max_sequence_length": 512},
    "Yi-1.5-9B-Chat": {**_LLAMA, "rope_theta": 5000000.0, "pad_token_id": 0},
    "deepseek-coder-6.7b": {**_LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "DeepSeek-R1-Distill-Llama-8B": {**_LLAMA, "rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0},
    "SmolLM2-1.7B-Instruct": {
        **{**_LLAMA, "num_key_value_heads": 4, "rope_theta": 130000, "tie_word_embeddings": True},
        "rope_interleaved": False,
    },
    "Falcon3-7B-Instruct": {**_LLAMA, "head_dim": 16, "activation": "swiglu", "rope_theta": 1000042},
    "InternLM3-8B": {**_LLAMA, "rope_scaling": {"factor": 6.0, "rope_type": "linear"}, "qkv_bias": False},
    "Qwen1.5-0.5B-Chat": {**_QWEN2, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "Qwen2.5-7B-Instruct": _QWEN2,
    "Qwen2.5-Coder-32B-Instruct with YaRN": {
        **_QWEN2,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128, "type": "yarn"},
    },
    "DeepSeek-R1-Distill-Qwen-7B": {**_QWEN2, "rope_theta": 10000},
    "Qwen1.5-MoE-A2.7B-Chat": {
        **{**_QWEN2, **_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
        **{"norm_topk_prob": False, "shared_expert_intermediate_size": 24, "num_key_value_heads": 4},
    },
    "Qwen3-0.6B": {**_QWEN3, "tie_word_embeddings": True},
    "Qwen3-8B": _QWEN3,
    "Qwen3-30B-A3B": {**_QWEN3, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "Mistral-7B-v0.1": {**_MISTRAL, "sliding_window": 16, "rope_theta": 10000.0},
    "Mistral-7B-Instruct-v0.3": _MISTRAL,
    "Mistral-Nemo-Instruct-2407": {**_MISTRAL, "head_dim": 16},
    "Mixtral-8x7B-Instruct": {
        **{**_MISTRAL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02},
    },
    "gemma-2b": {**_GEMMA, "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "num_key_value_heads": 1},
    "gemma-2-2b-it": {
        **{**_GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8},
        "sliding_window": 16,
    },
    "gemma-3-4b-it, of which the text part runs": {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 5},
        **{"eoi_token_index": 6, "eos_token_id": [2, 3], "image_token_index": 7, "mm_tokens_per_image": 4},
        "text_config": {
            **{**_SIZES, "head_dim": 8, "model_type": "gemma3_text", "num_key_value_heads": 2, "sliding_window": 16},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 300, "query_pre_attn_scalar": 8},
        },
        "vision_config": {
            **{"hidden_size": 16, "image_size": 28, "intermediate_size": 24, "model_type": "siglip_vision_model"},
            **{"num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False},
        },
        "torch_dtype": "bfloat16",
    },
    "gemma-3-1b-it": {
        **{**_GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": 1},
        **{"attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None},
        **{"num_hidden_layers": 3, "query_pre_attn_scalar": 8, "rope_local_base_freq": 10000, "rope_scaling": None},
        **{"rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 3, "eos_token_id": [2, 3]},
    },
    "phi-2": {
        **{"architectures": ["PhiForCausalLM"], "model_type": "phi", **_DECODER, "num_key_value_heads": None},
        **{"hidden_act": "gelu_new", "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.5, "qk_layernorm": False},
        **{"tie_word_embeddings": False, "embd_pdrop": 0.0, "resid_pdrop": 0.1, "rope_scaling": None},
    },
    "Phi-3-mini-4k-instruct": {**_PHI3, "original_max_position_embeddings": 512},
    "Phi-3.5-mini-instruct": {
        **_PHI3,
        "rope_scaling": {"long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3], "type": "longrope"},
    },
    "phi-4": {**_PHI3, "auto_map": {}, "num_key_value_heads": 2, "rope_theta": 250000, "sliding_window": None},
    "Phi-4-mini-instruct": {
        **{**_PHI3, "num_key_value_heads": 2, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        **{"head_dim": 8, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
        "rope_scaling": {"long_factor": [1.0, 1.5, 2.0], "short_factor": [1.0, 1.0, 1.1], "type": "longrope"},
    },
    "SmolLM3-3B": {
        **{**_LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0]},
        **{"no_rope_layer_interval": 4, "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},
        **{"layer_types": ["full_attention", "full_attention"], "rope_theta": 5000000.0, "tie_word_embeddings": True},
        "pad_token_id": 4,
    },
    "OLMo-7B-0724-hf": {
        **{**_OLMO, "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "clip_qkv": 8.0},
        "num_key_value_heads": 4,
    },
    "OLMo-2-1124-7B-Instruct": {
        **{**_OLMO, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_theta": 500000},
        "num_key_value_heads": 4,
    },
    "Olmo-3-7B-Instruct": {
        **{**_OLMO, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 16},
        **{"layer_types": ["sliding_attention", "full_attention"], "rope_theta": 500000},
        "rope_scaling": {
            "attention_factor": 1.2,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_type": "yarn",
        },
    },
    "OLMoE-1B-7B-0924": {
        **{**_OLMO, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 4},
        **{"num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None, "num_key_value_heads": 4},
    },
    "granite-3.3-2b-instruct": {**_GRANITE, "architectures": ["GraniteForCausalLM"], "model_type": "granite"},
    "granite-3.1-1b-a400m-instruct": {
        **{**_GRANITE, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        **{"num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False},
    },
    "DeepSeek-V2-Lite-Chat": {
        **{**_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None},
        **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
        "routed_scaling_factor": 1.0,
    },
    "DeepSeek-V3 in bfloat16": {
        **{**_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 8},
        **{"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1},
    },
    "gpt2": {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **_IDS, "activation_function": "gelu_new"},
        **{"n_ctx": 512, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-05},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "gpt-j-6b": {
        **{"architectures": ["GPTJForCausalLM"], "model_type": "gptj", **_IDS, "activation_function": "gelu_new"},
        **{"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary": True, "rotary_dim": 4},
        **{"tie_word_embeddings": False, "n_inner": None, "gradient_checkpointing": False, "scale_attn_weights": True},
    },
    "pythia-1.4b": _GPT_NEOX,
    "gpt-neox-20b": {**_GPT_NEOX, "hidden_act": "gelu_fast", "attention_dropout": 0, "hidden_dropout": 0},
    "opt-125m": _OPT,
    "opt-350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "starcoder2-3b": {
        **{"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", **_DECODER, "use_bias": True},
        **{"hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm"},
        **{"rope_theta": 999999.4420358813, "sliding_window": 16, "embedding_dropout": 0.1, "residual_dropout": 0.1},
    },
    "starcoder": {
        **{"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", **_IDS, "multi_query": True},
        **{"activation_function": "gelu", "n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 2, "n_positions": 512},
        **{"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "inference_runner": 0},
    },
    "c4ai-command-r-v01": {
        **{**_COHERE, "architectures": ["CohereForCausalLM"], "model_type": "cohere", "use_qk_norm": False},
        "num_key_value_heads": 4,
    },
    "c4ai-command-r7b-12-2024": {
        **{**_COHERE, "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 8},
        **{
            "layer_switch": 2,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
        },
        **{"rotary_pct": 1.0, "sliding_window": 16, "sliding_window_pattern": 2, "use_gated_activation": True},
        "use_parallel_block": True,
    },
    "glm-4-9b-chat-hf": {**_GLM, "architectures": ["GlmForCausalLM"], "model_type": "glm"},
    "GLM-4-9B-0414": {**_GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "EXAONE-4.0-1.2B": {
        **{
            **_LLAMA,
            "architectures": ["Exaone4ForCausalLM"],
            "model_type": "exaone4",
            "reorder_and_upcast_attn": False,
        },
        **{"layer_types": ["full_attention", "full_attention"], "sliding_window": None, "sliding_window_pattern": None},
        **{"rope_scaling": _LLAMA3_ROPE, "rope_theta": 1000000, "tie_word_embeddings": True},
    },
    "Hunyuan-1.8B-Instruct": {
        **{**_LLAMA, "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 8},
        **{"use_qk_norm": True, "use_cla": False, "tie_word_embeddings": True, "pad_token_id": 0},
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
    },
    "ERNIE-4.5-0.3B-PT": {
        **{**_LLAMA, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "use_bias": False},
        **{"head_dim": 8, "rope_theta": 500000, "tie_word_embeddings": True, "compression_ratio": 1.0},
    },
    "Seed-OSS-36B-Instruct": {
        **{**_LLAMA, "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True},
        **{
            "attention_out_bias": False,
            "head_dim": 8,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
        },
    },
}

_BERT = {
    **_IDS,
    **_SIZES,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_INT4 = {"bits": 4, "group_size": 128}

REFUSED: dict[str, tuple[Config, str]] = {  # and a word that the reason holds
    "bert-base-uncased": ({**_BERT, "architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM"),
    "roberta-large-mnli": (
        {**_BERT, "architectures": ["RobertaForSequenceClassification"], "model_type": "roberta"},
        "RobertaForSequenceClassification",
    ),
    "flan-t5-base": (
        {
            **{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
            **{"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 300},
            **{"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "feed_forward_proj": "gated-gelu"},
        },
        "t5",
    ),
    "bart-large-cnn": (
        {
            **{"architectures": ["BartForConditionalGeneration"], "model_type": "bart", "is_encoder_decoder": True},
            **{
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "vocab_size": 300,
            },
            **{
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "max_position_embeddings": 512,
            },
        },
        "bart",
    ),
    "whisper-tiny": (
        {
            **{
                "architectures": ["WhisperForConditionalGeneration"],
                "model_type": "whisper",
                "is_encoder_decoder": True,
            },
            **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 300, "num_mel_bins": 80},
        },
        "whisper",
    ),
    "Skywork-Reward-Llama-3.1-8B": (
        {**_LLAMA, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
        "LlamaForSequenceClassification",
    ),
    "internlm2-7b-reward": (
        {
            **_LLAMA,
            "architectures": ["InternLM2ForRewardModel"],
            "model_type": "internlm2",
            "auto_map": {"AutoConfig": "x.Y"},
        },
        "internlm2",
    ),
    "bloomz-560m": (
        {
            **{"architectures": ["BloomForCausalLM"], "model_type": "bloom", **_IDS, "n_embed": 32, "n_layer": 2},
            **{"num_attention_heads": 4, "layer_norm_epsilon": 1e-05, "seq_length": 512},
        },
        "ALiBi",
    ),
    "mpt-7b-chat": (
        {
            **{"architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2},
            **{"attn_config": {"alibi": True, "attn_impl": "torch"}, "max_seq_len": 512, "vocab_size": 300},
        },
        "",
    ),
    "falcon-rw-1b": ({**_FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}, "falcon"),
    "falcon-7b-instruct": (_FALCON, "falcon"),
    "falcon-40b": ({**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False}, "falcon"),
    "stablelm-2-1_6b-chat": (_STABLELM, "stablelm"),
    "stablelm-2-12b-chat": (
        {
            **{**_STABLELM, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False},
            "num_key_value_heads": 2,
        },
        "stablelm",
    ),
    "Nemotron-Mini-4B-Instruct": (
        {
            **{"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", **_DECODER, "hidden_act": "relu2"},
            **{"head_dim": 8, "norm_eps": 1e-05, "partial_rotary_factor": 0.5, "rope_theta": 10000, "mlp_bias": False},
            **{"attention_bias": False, "tie_word_embeddings": False},
        },
        "nemotron",
    ),
    "mamba-130m-hf": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            **_IDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
        },
        "mamba",
    ),
    "falcon-mamba-7b": (
        {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", **_IDS, "hidden_size": 32},
        "falcon_mamba",
    ),
    "rwkv-4-169m-pile": (
        {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", **_IDS, "hidden_size": 32, "num_hidden_layers": 2},
        "rwkv",
    ),
    "Jamba-v0.1": (
        {
            **{**_DECODER, "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attn_layer_offset": 1},
            **{"attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4},
        },
        "jamba",
    ),
    "Zamba2-1.2B": (
        {**_DECODER, "num_hidden_layers": 54, "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2"},
        "zamba2",
    ),
    "granite-4.0-h-tiny": (
        {
            **{**_GRANITE, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
            **{"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2},
        },
        "granitemoehybrid",
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        {
            **{**_QWEN3, **_EXPERTS, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            **{"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        },
        "qwen3_next",
    ),
    "LFM2-1.2B": (
        {
            **{**_DECODER, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"},
            **{"layer_types": ["conv", "full_attention"], "block_dim": 32, "conv_L_cache": 3},
        },
        "lfm2",
    ),
    "gpt-oss-20b": (
        {
            **{**_DECODER, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4},
            **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "num_experts_per_tok": 2},
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
        },
        "gpt_oss",
    ),
    "Llama-4-Scout-17B-16E-Instruct": (
        {
            **{"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "boi_token_index": 5},
            "text_config": {
                **_DECODER,
                "model_type": "llama4_text",
                "num_local_experts": 4,
                "attention_chunk_size": 64,
            },
            "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 32, "num_hidden_layers": 1},
        },
        "llama4",
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {
            **{**_QWEN2, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
            **{"rope_scaling": {"mrope_section": [1, 1, 2], "type": "mrope"}, "image_token_id": 5, "video_token_id": 6},
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32},
        },
        "Qwen2_5_VLForConditionalGeneration",
    ),
    "llava-1.5-7b-hf": (
        {
            **{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 5},
            **{"text_config": {**_LLAMA}, "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32}},
        },
        "LlavaForConditionalGeneration",
    ),
    "internlm2-chat-7b": (
        {
            **{**_LLAMA, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
            "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
        },
        "internlm2",
    ),
    "chatglm3-6b": (
        {
            **{"architectures": ["ChatGLMModel"], "model_type": "chatglm", "hidden_size": 32, "num_layers": 2},
            "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig", "AutoModel": "modeling_chatglm.X"},
        },
        "chatglm",
    ),
    "Baichuan2-7B-Chat": (
        {
            **{**_LLAMA, "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "z_loss_weight": 0},
            "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"},
        },
        "baichuan",
    ),
    "Llama-2-7B-Chat-GPTQ": (
        {**_LLAMA, "quantization_config": {**_INT4, "quant_method": "gptq", "desc_act": True, "sym": True}},
        "gptq",
    ),
    "Qwen2.5-7B-Instruct-AWQ": (
        {**_QWEN2, "quantization_config": {**_INT4, "quant_method": "awq", "version": "gemm", "zero_point": True}},
        "awq",
    ),
    "Llama-3.1-8B-Instruct-bnb-4bit": (
        {
            **_LLAMA,
            "quantization_config": {
                **{"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
                **{"_load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
            },
        },
        "bitsandbytes",
    ),
    "Llama-3.1-8B-Instruct-FP8": (
        {
            **_LLAMA,
            "quantization_config": {
                **{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
            },
        },
        "compressed-tensors",
    ),
    "DeepSeek-V3": (
        {
            **{**_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 8},
            **{"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            "quantization_config": {
                **{
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [128, 128],
                },
            },
        },
        "fp8",
    ),
    "Qwen3-8B-HQQ": ({**_QWEN3, "quantization_config": {"quant_method": "hqq", "skip_modules": ["lm_head"]}}, "hqq"),
    "Qwen3-8B-torchao-int4": (
        {**_QWEN3, "quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4"}}}},
        "torchao",
    ),
    "bitnet-b1.58-2B-4T": (
        {
            **{**_LLAMA, "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_act": "relu2"},
            "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
        },
        "bitnet",
    ),
}
