"""A model put together without its weights, and whether a checkpoint's tensors are all of it and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from cbatch.errors import Fatal, UsageError, first_line
from cbatch.model.attention import NAME, attention_specs
from cbatch.model.weights import Stored

_FLOATS = ("F64", "F32", "F16", "BF16")
# Tensors that old checkpoints store, though they follow from the configuration, and parts that predict further tokens.
_SUPERFLUOUS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|position_ids|rotary_pos_emb\.inv_freq)$"
)


def skeleton(config: Any) -> Any:
    """The model on torch's meta device, its attention routed to cbatch; UsageError says why there can be none."""
    logging.set_verbosity_error()
    kind = config.model_type
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=NAME, trust_remote_code=False)
    except KeyError as error:
        if error.args == (NAME,):
            raise UsageError(f"models of type {kind} have attention of their own, which is not supported") from None
        raise UsageError(f"its configuration can't be understood: {first_line(error)} is unknown") from None
    except Exception as error:  # whatever the settings of a damaged configuration make of it
        raise UsageError(f"its configuration can't be understood: {first_line(error):.300}") from None


def check_attention(model: Any) -> None:
    """UsageError if a layer attends in a way that cbatch does not support, as far as that shows without weights."""
    try:
        attention_specs(model)
    except Fatal as refused:
        if refused.__cause__ is None:  # else the model can't run without weights, and is judged when it has them
            raise UsageError(f"models of type {model.config.model_type} are not supported: {refused}") from None


def check_tensors(model: Any, stored: Mapping[str, Stored]) -> None:
    """UsageError unless the stored tensors are the weights of a `skeleton`: all of them, in its shapes, and no other."""
    logging.disable_progress_bar()
    try:
        _, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict={name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()},
            device_map={"": "meta"},
            attn_implementation=NAME,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception:  # some conversions need the weights; loading them judges these
        info = {"unexpected_keys": [], "missing_keys": [], "mismatched_keys": []}
    if problem := misfit(model, stored, info):
        raise UsageError(f"its weights do not fit: {problem}")


def misfit(model: Any, stored: Mapping[str, Stored], info: Mapping[str, Any]) -> str:
    """What is wrong with the tensors of a checkpoint, by transformers' account of loading them; empty if nothing is.

    transformers leaves what is missing random, passes over what it has no place for, and casts any number to a weight.
    """
    unset = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    if unset:
        return f"{len(unset)} are missing or of another shape, {min(unset)} among them"
    if unknown := [name for name in info["unexpected_keys"] if not _SUPERFLUOUS.search(name)]:
        return (
            f"{type(model).__name__} has no place for {len(unknown)} of the tensors, {min(unknown)} among them; "
            "they belong to a quantized, adapted or larger model"
        )
    numbers = {name for name, value in model.state_dict().items() if not value.is_floating_point()}
    packed = [
        n for n, t in stored.items() if t.dtype not in _FLOATS and not _SUPERFLUOUS.search(n) and n not in numbers
    ]
    if packed:
        return f"{min(packed)} is stored as {stored[min(packed)].dtype}, which only a scheme of quantization explains"
    return ""
