"""Checks of a job's settings and first rows, and how its prompts are made: all before any weight is read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from cbatch.config import RunConfig, SamplingParams
from cbatch.errors import RowError, SettingError, UsageError
from cbatch.output.record import RecordShape
from cbatch.rows import openai
from cbatch.rows.prompt import PROMPT_COLUMNS, PromptBuilder, check_request, prompt_column
from cbatch.rows.rank import Rank
from cbatch.rows.reader import BROKEN_DIGEST, Source
from cbatch.rows.request import Row
from cbatch.rows.template import Template, template_text

if TYPE_CHECKING:
    from cbatch.engine.plan import EnginePlan
    from cbatch.model.loader import ModelFiles

_FIRST_ROWS = 20  # looked at before anything is loaded
_GENERATION_CONFIG = {  # transformers' names -> cbatch's
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
# Settings of transformers that would change completions unless they have this value, or null.
_NOT_APPLIED: dict[str, Any] = {
    **{"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": 0, "typical_p": 1},
    **{
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "top_h": 1,
        "guidance_scale": 1,
        "dola_layers": None,
        "token_healing": False,
    },
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "min_length": 0},
    **{"bad_words_ids": [], "force_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": []},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None, "forced_decoder_ids": [], "sequence_bias": {}},
    **{"exponential_decay_length_penalty": None, "constraints": [], "watermarking_config": None},
}
_RECORDED_AS = {"stop_token_ids": "stop_token_id"}  # manifests keep the name that the setting had at first


def columns_on_request(config: RunConfig) -> tuple[str, ...]:
    """The columns that these settings add to records, beside those that are always there."""
    return ("truncated_tokens",) if config.prompt.truncate else ()


def check_settings(config: RunConfig) -> None:
    """UsageError if settings contradict each other across panels."""
    if config.output.retry_failed and (config.input.skip or config.input.limit is not None):
        raise UsageError("--retry-failed runs all rows again that failed; it can't be combined with --skip or --limit")


def check_rank(config: RunConfig, rank: Rank, single_file: bool) -> None:
    """UsageError if a task that is one of several can't do what is asked for."""
    if rank.is_whole:
        return
    output = config.output
    for is_asked, problem in (
        ("-" in config.input.inputs, "standard input can't be read by several tasks."),
        (single_file, f"{output.output}: one file can't take the rows of several tasks; name a folder."),
        (output.ordered, "--ordered needs all rows in one task."),
        (output.overwrite, "--overwrite: a task can't tell what others wrote since; remove OUT before they start."),
        (output.retry_failed, "--retry-failed needs OUT to itself; run it when all tasks have ended."),
    ):
        if is_asked:
            raise UsageError(f"{problem} This is {rank}; --shard none does all rows in one task")


def check_first_rows(sources: Sequence[Source], config: RunConfig, shape: RecordShape) -> None:
    """UsageError if a file can't be read, none of its first rows holds a prompt, or columns collide with those added."""
    for source, rows in _first_rows(sources):
        if all(map(openai.is_request, rows)):
            _check_request(source, config)
        elif config.prompt.template:
            _check_template(Template(config.prompt.template, datetime.now()), rows)
        else:
            _check_prompt_column(source, config.prompt.prompt_column, rows)
        try:
            for row in rows:
                shape.check(row)
        except RowError as error:
            raise UsageError(str(error)) from None


def _first_rows(sources: Sequence[Source]) -> Iterator[tuple[Source, list[Row]]]:
    """The first good rows of each source that has any and can be read twice; UsageError if one can't be read at all."""
    for source in sources:
        if source.name == "-" or (source.kind == "dataset" and source.size is None):
            continue
        first = list(islice(source.rows(), _FIRST_ROWS))
        if first and first[0].digest == BROKEN_DIGEST:
            raise UsageError(str(first[0].problem))
        if rows := [row for row in first if not row.problem]:
            yield source, rows


def _check_request(source: Source, config: RunConfig) -> None:
    try:
        check_request(config.prompt)
    except RowError as error:
        raise UsageError(f"{source.name}: {error}") from None


def _check_template(template: Template, rows: Sequence[Row]) -> None:
    """UsageError if the template fails on all of these rows, which is more likely its fault than theirs."""
    errors = []
    for row in rows:
        try:
            template.render(row.data)
        except RowError as error:
            errors.append(f"{error.at(row.where)}. Columns: {', '.join(row.data):.500}.")
    if len(errors) == len(rows):
        raise UsageError(errors[0])


def _check_prompt_column(source: Source, asked: str | None, rows: Sequence[Row]) -> None:
    """UsageError if none of these rows has a column, and only one, that can hold a prompt."""
    errors = []
    for row in rows:
        try:
            if openai.is_request(row) or prompt_column(row.data, asked):
                return
        except RowError as error:
            errors.append(error)
    columns = ", ".join(dict.fromkeys(name for row in rows for name in row.data)) or "none"
    raise UsageError(
        f"{source.name}: {str(errors[0]).partition(';')[0]}. "
        f"Columns: {columns:.500}. Name one with --prompt-column, or make a prompt with --template."
    )


def sampling_defaults(config: RunConfig, files: ModelFiles) -> SamplingParams:
    """The settings of rows that have none of their own; `--generation-config model` lets the model decide first."""
    if config.engine.generation_config != "model":
        return config.sampling
    model = files.generation_config
    values = {
        name: model[key]
        for key, name in _GENERATION_CONFIG.items()
        if model.get(key) is not None and name not in config.given
    }
    if "temperature" not in config.given:
        values["temperature"] = values.get("temperature", 1.0) if model.get("do_sample") else 0.0
    try:
        return config.sampling.override(values)
    except SettingError as error:
        raise UsageError(f"--generation-config model: {files.name}: {error}") from None


def not_applied(config: RunConfig, files: ModelFiles) -> str:
    """A line for the user: the settings of the model that cbatch was asked to take and does not have; empty if none."""
    if config.engine.generation_config != "model":
        return ""
    model = files.generation_config
    names = [name for name, neutral in _NOT_APPLIED.items() if model.get(name) not in (None, neutral)]
    return f"--generation-config model: cbatch does not apply {', '.join(names)}" if names else ""


def prompt_builder(
    config: RunConfig, files: ModelFiles, max_model_len: int, sources: Sequence[Source] = ()
) -> PromptBuilder:
    """How rows become requests, under a seed drawn now if the settings name none.

    UsageError if a source is of conversations and the model has no chat template.
    """
    sampling = sampling_defaults(config, files)
    if sampling.seed is None:
        sampling = replace(sampling, seed=random.getrandbits(63))
    vocab_size = files.config.get_text_config().vocab_size
    builder = PromptBuilder(
        config.prompt, sampling, files.tokenizer, max_model_len, vocab_size, files.eos_token_ids, files.name
    )
    for source, rows in () if builder.has_chat_template else _first_rows(sources):
        if all(map(builder.is_conversation, rows)):
            raise UsageError(
                f"{source.name} holds conversations, and {files.name} has no chat template; use a chat model"
            )
    return builder


def drawn(config: RunConfig) -> tuple[str, ...]:
    """The settings that a job draws at its first start because the user gives none, and keeps."""
    given = {"seed": config.sampling.seed, "date": config.prompt.date}
    return tuple(name for name, value in given.items() if value is None)


def settings(
    config: RunConfig, engine: EnginePlan, builder: PromptBuilder, files: ModelFiles, sources: Sequence[Source]
) -> dict[str, Any]:
    """Everything that the completions of a job depend on, as its manifest keeps it."""
    prompt, sampling = config.prompt, asdict(builder.sampling)
    return {
        **files.fingerprint(),
        **{
            _RECORDED_AS.get(name, name): list(value) if isinstance(value, tuple) else value
            for name, value in sampling.items()
        },
        **asdict(prompt),
        "prompt_column": prompt.prompt_column or PROMPT_COLUMNS[0],
        "template": template_text(prompt.template) if prompt.template else None,
        "date": builder.date,
        "chat": builder.chat,
        "max_model_len": engine.max_model_len,
        "inputs": [source.name for source in sources],
        "input sizes": [source.size for source in sources],
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "kv_cache_dtype": config.engine.kv_cache_dtype,
        "load_format": engine.load_format,
    }
