"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import make_config, make_model, make_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def save_gguf(
    path: Path,
    template: str | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    split: str = "default",
) -> Any:
    """Write a tiny Llama to a GGUF file, with metadata and tensors of one's own beside its; returns the model."""
    model, tokenizer = make_model(make_config()), make_tokenizer(template)
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    values = {
        "llama.context_length": config.max_position_embeddings,
        "llama.block_count": config.num_hidden_layers,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": 10_000.0,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **(metadata or {}),
    }
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add[type(value)](key, value)
    state = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(sorted(state, key=state.__getitem__))
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in sorted(state, key=state.__getitem__)])
    writer.add_token_merges(_merges(tokenizer))
    if template:
        writer.add_chat_template(template)
    for name, weight in model.state_dict().items():
        writer.add_tensor(_name(name), _permuted(name, weight.numpy(), config))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _merges(tokenizer: Any) -> list[str]:
    import json

    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [" ".join(merge) for merge in merges]


def _name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _permuted(name: str, weight: Any, config: Any) -> Any:
    """Rotary halves side by side, as llama.cpp has them."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name.partition("self_attn.")[2][:1])
    if heads is None or ".self_attn." not in name:
        return weight
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )
