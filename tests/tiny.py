"""Tiny random models and a byte-level tokenizer, made from nothing in a moment."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 300


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 entries; bos <|im_start|> (1), eos <|im_end|> (2); encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the rain in the plain stays the same all the time " * 20], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[2])
    fast.chat_template = template
    return fast


def make_config(kind: type = LlamaConfig, **settings: Any) -> Any:
    """A configuration of two small layers."""
    defaults: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return kind(**{**defaults, **settings})


def make_model(config: Any, attention: str = "eager", seed: int = 0) -> Any:
    """A random float32 model. Weights are large enough that greedy outputs vary from token to token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model.eval()


def save_model(folder: Path, config: Any = None, template: str | None = TEMPLATE) -> Path:
    """A model folder as `cbatch -m` takes it."""
    model = make_model(config or make_config())
    model.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def generate(model: Any, token_ids: list[int], max_new_tokens: int, eos_token_id: int | None = None) -> list[int]:
    """What transformers itself generates greedily, without the prompt; the end token, if any, included."""
    ids = torch.tensor([token_ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(token_ids) :].tolist()
    return tokens


def edit(path: Path, **values: Any) -> None:
    """Set keys of a JSON file, which need not be there."""
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))
