"""The first line of a run: the model, and the settings that were resolved for it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from cbatch import __version__
from cbatch.config import EngineConfig, SamplingParams
from cbatch.rows.prompt import PromptBuilder

if TYPE_CHECKING:
    from cbatch.engine.plan import EnginePlan
    from cbatch.engine.protocol import Facts


def first_line(config: EngineConfig, builder: PromptBuilder, facts: Facts, engine_plan: EnginePlan) -> str:
    """The model, the sampling and the engine of a run, in one line for the user."""
    where, each = facts.device, ""
    if facts.num_replicas > 1:
        places = "; ".join(map(str, engine_plan.places))
        where, each = facts.device_type, f"{facts.num_replicas} engines ({places}), each "
    text = (
        f"cbatch {__version__}: {config.model} ({facts.dtype} on {where}), "
        f"{'chat' if builder.chat else 'raw'} prompts, {_sampling(builder.sampling)}; "
        f"{each}up to {facts.max_num_seqs} sequences, KV cache for {facts.capacity:,} tokens"
    )
    if builder.asks_for_date:
        text += f"; templates see the date {builder.date}"
    if config.kv_cache_dtype != "auto":
        text += f" in {config.kv_cache_dtype}"
    if facts.capacity < facts.max_model_len:
        text += f", so no row can be longer, though the context is {facts.max_model_len:,}"
    text += "".join(f"; {note}" for note in facts.notes)
    if not facts.has_eos:
        text += "; the model names no end-of-sequence token, so only --stop and --max-tokens end a row"
    return text


def _sampling(params: SamplingParams) -> str:
    """How rows without settings of their own are sampled: all that is not neutral."""
    draw = "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}, seed {params.seed}"
    said = {"max_tokens", "temperature", "seed"}
    others = [
        f", {spec.name} {_value(getattr(params, spec.name))}"
        for spec in fields(params)
        if spec.name not in said and getattr(params, spec.name) != spec.default
    ]
    return f"max_tokens {params.max_tokens}, {draw}" + "".join(others)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{item!r:.40}" for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
