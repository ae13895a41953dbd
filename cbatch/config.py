"""All settings of cbatch: frozen dataclasses, checked when they are built; derive with `replace`, never mutate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from cbatch.errors import SettingError, UsageError
from cbatch.settings import Settings, by_field, field_names, option

SCHEDULES = ("static", "dynamic")  # baselines
MAX_FAILURES = r"(\d{1,18})|(\d{1,3}(?:\.\d{1,9})?)%|none"  # N, or X%
PEERS = ("transformers", "vllm", "openvino")


@dataclass(frozen=True)
class InputConfig(Settings):
    inputs: tuple[str, ...] = field(default=(), metadata={"flags": "INPUT", "path_after": ""})
    skip: int = option(0, "Leave out the first N rows of the input.", at_least=0)
    limit: int | None = option(None, "Stop after N rows of the input.", at_least=0)


@dataclass(frozen=True)
class PromptConfig(Settings):
    prompt_column: str | None = option(
        None, "Column that holds the prompt. (default: prompt, messages or token_ids, whichever a row has)"
    )
    template: str | None = option(
        None,
        "Jinja template over all columns that makes the prompt, e.g. 'Summarise: {{ text }}', or @FILE.",
        path_after="@",
    )
    system: str | None = option(None, "System message put before every conversation that has none.")
    chat: bool | None = option(
        None,
        "Send a text prompt as a user message through the model's chat template, or as raw text. "
        "(default: chat if the model has a chat template)",
        flags="--chat/--raw",
    )
    date: str | None = option(
        None,
        "Date, or date and time in ISO format, that a template gets which asks for it. (default: the job's first start, "
        "recorded)",
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus completion, in tokens. (default: the model's context)", at_least=2
    )
    truncate: str | None = option(
        None,
        "Shorten a prompt that is too long from this side instead of making it an error row.",
        choices=("left", "right"),
    )

    special_tokens_in_text: str | None = option(
        None,
        "What a special token is that a text only spells, such as <|im_start|> in a web page. plain: text like any other. "
        "encode: that token. (default: plain in conversations, encode in raw prompts)",
        choices=("encode", "plain"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template == "":
            raise SettingError("template", "must not be empty")
        if self.system is not None and self.chat is False:
            raise SettingError("system", "needs a conversation; it can't be combined with --raw")
        for name, text in (("system", self.system), ("template", self.template)):
            if any("\ud800" <= character <= "\udfff" for character in text or ""):
                raise SettingError(name, "is not valid UTF-8")
        if self.date is not None:
            object.__setattr__(self, "date", _iso_moment(self.date))


def _iso_moment(text: str) -> str:
    """A date, or a date and time, in the one form in which manifests keep it; SettingError if it is none."""
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError:
        raise SettingError("date", f"must be like 2026-01-31 or 2026-01-31T09:30:00, not {text!r:.80}") from None


@dataclass(frozen=True)
class SamplingParams(Settings):
    """How the tokens of a row are chosen.

    Order of the filters: penalties, temperature, top-k, top-p, min-p.
    """

    max_tokens: int = option(256, "Most tokens in a completion.", at_least=1)
    temperature: float = option(0.0, "0 always takes the likeliest token.", at_least=0)
    top_p: float = option(
        1.0, "Sample from the smallest set of tokens whose probabilities sum to P.", at_least=0, at_most=1
    )
    top_k: int = option(0, "Sample from the K likeliest tokens; 0 or -1 for all.", at_least=-1)
    min_p: float = option(0.0, "Leave out tokens less likely than P times the likeliest.", at_least=0, at_most=1)
    repetition_penalty: float = option(1.0, "Divide the scores of tokens already seen, prompt included.", at_least=1e-6)
    presence_penalty: float = option(
        0.0, "Subtract from the score of a token already generated.", at_least=-2, at_most=2
    )
    frequency_penalty: float = option(
        0.0, "Subtract from the score of a token for each time it was generated.", at_least=-2, at_most=2
    )
    stop: tuple[str, ...] = option((), "End a completion at this text, which is left out (repeatable).")
    stop_token_ids: tuple[int, ...] = option(
        (),
        "End a completion at this token, which is left out (repeatable).",
        flags="--stop-token-id",
        aliases=("stop_token_id",),
        at_least=0,
    )
    ignore_eos: bool = option(False, "Go on after the model's end-of-sequence token.")
    min_tokens: int = option(0, "Do not end a completion before this many tokens.", at_least=0)
    seed: int | None = option(None, "Seed of the random draws; chosen and recorded if not given.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise SettingError("stop", "must not hold an empty text")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def override(self, values: Mapping[str, Any]) -> SamplingParams:
        """These settings with some replaced; null leaves a setting as it is. ValueError if a name or a value is wrong."""
        names = field_names(SamplingParams)
        if unknown := [name for name in values if name not in names]:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}")
        return replace(self, **by_field({name: value for name, value in values.items() if value is not None}, names))


@dataclass(frozen=True)
class EngineConfig(Settings):
    model: str = option(
        "smollm2-135m", "Folder, GGUF file, Hub id, or smollm2-135m.", flags="--model/-m", path_after=""
    )
    dtype: str = option(
        "auto",
        "Precision of weights and activations. auto: as the checkpoint says, if the device computes it fast.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantization: str | None = option(
        None,
        "int8: weights of all layers, and what they are multiplied by, as 8-bit integers. On a CPU.",
        choices=("int8",),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache. auto: that of the model. Half the memory and fewer bytes to read: int8 on a CPU, fp8 "
        "(e4m3) on a GPU.",
        choices=("auto", "int8", "fp8"),
    )
    device: str = option("auto", "Where to run: auto, cpu or cuda (or cuda:N).")
    data_parallel_size: str = option(
        "1",
        "Engines that share the rows, each on a GPU of its own or on its share of the CPUs. auto: all GPUs, or one for "
        "each NUMA node.",
    )
    load_format: str = option("auto", "dummy: random weights, to measure speed only.", choices=("auto", "dummy"))
    generation_config: str = option(
        "cbatch",
        "model: take sampling defaults from the model's generation_config.json. cbatch: use those shown here.",
        choices=("cbatch", "model"),
    )
    scheduling: str = option(
        "continuous",
        "continuous: the batch is decided anew at every step. static, dynamic: baselines to compare it with.",
        choices=("continuous", *SCHEDULES),
    )
    order: str = option(
        "auto",
        "auto: of the rows read ahead, the longest first, and those with the same beginning together. "
        "input: as they come.",
        choices=("auto", "input"),
    )
    max_num_seqs: int | None = option(
        None, "Most sequences in one step. (default: 128 on a CPU, 256 on a GPU)", at_least=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in one step, decodes and prompt slices together. (default: 512 on a CPU, 8192 on a GPU)",
        at_least=1,
    )
    block_size: int | None = option(
        None, "Tokens in a block of the KV cache. (default: 128 on a CPU, 32 on a GPU)", at_least=1
    )
    kv_cache_memory: float | None = option(
        None, "Memory for the KV cache, in GiB. (default: half of what is free on a CPU)", at_least=0
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of GPU memory for weights, KV cache and work space.", at_least=0, at_most=1
    )
    enable_prefix_caching: bool = option(True, "Compute a prompt beginning that rows share only once.")
    cuda_graphs: str = option(
        "on",
        "Record the steps on a GPU as CUDA graphs, which spares the time of launching them.",
        choices=("on", "off"),
    )
    threads: int | None = option(None, "CPU threads. (default: the CPUs this process may use)", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch("auto|[1-9][0-9]*", self.data_parallel_size):
            raise SettingError(
                "data_parallel_size", f"must be a number, at least 1, or auto, not {self.data_parallel_size!r}"
            )
        if self.data_parallel_size != "1" and self.scheduling != "continuous":
            raise SettingError(
                "scheduling", f"{self.scheduling} is a baseline with one engine; leave out --data-parallel-size"
            )


@dataclass(frozen=True)
class OutputConfig(Settings):
    output: str = option(
        "",
        "Folder of shards, or one .jsonl or .parquet file, or - for standard output.",
        flags="--output/-o",
        path_after="",
    )
    format: str | None = option(
        None, "Format of the output. (default: by OUT's suffix, else jsonl)", choices=("jsonl", "parquet")
    )
    shard_rows: int = option(50_000, "Rows in a shard of an output folder.", at_least=1)
    ordered: bool = option(False, "Write the output in input order when the job ends, not as rows finish.")
    prefix: str = option("", "Put this before the names of the columns that cbatch adds.")
    overwrite: bool = option(False, "Throw away what an earlier job left in OUT and start anew.")
    retry_failed: bool = option(False, "Run rows again that ended in an error.")


@dataclass(frozen=True)
class TaskConfig(Settings):
    """This process as one task of several (a rank), the time it has, and the failures that end it."""

    shard: str | None = option(
        None,
        "i/n: complete only every n-th row, from the i-th, i from 0; others do the rest into the same folder. none: all "
        "rows. (default: as Slurm or torchrun says)",
    )
    time_limit: str | None = option(
        None,
        "Leave before this time is over: 90 (seconds), 30m, 2h, HH:MM:SS, D-HH:MM:SS, or none. (default: the Slurm "
        "job's end)",
    )
    grace: float = option(0.0, "Seconds for which running rows may go on after a signal.", at_least=0)
    max_failures: str | None = option(
        None,
        "End the run when more rows than this have failed: 100, or 5% of those done (looked at from the 100th on), or none. "
        "(default: when the model gives no numbers for the first 100)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_failures is not None and not re.fullmatch(MAX_FAILURES, self.max_failures):
            raise SettingError(
                "max_failures", f"must be a number, a share such as 5%, or none, not {self.max_failures!r:.80}"
            )


@dataclass(frozen=True)
class DisplayConfig(Settings):
    progress: str = option(
        "auto",
        "auto: a live view on a terminal, else plain lines. none: print nothing unless something is wrong.",
        choices=("auto", "rich", "plain", "json", "none"),
    )
    progress_interval: float | None = option(
        None, "Seconds between plain or JSON lines. (default: 10, after the first minute 60)", at_least=0.01
    )


@dataclass(frozen=True)
class RunConfig:
    """All of a job's settings, panel by panel as `cbatch run --help` shows them."""

    input: InputConfig
    prompt: PromptConfig
    sampling: SamplingParams
    engine: EngineConfig
    output: OutputConfig
    display: DisplayConfig
    task: TaskConfig = TaskConfig()
    given: frozenset[str] = frozenset()  # fields that the user has set, also those set to their default


@dataclass(frozen=True)
class BenchConfig(Settings):
    workload: str = option(
        "ragged",
        "ragged, fixed or prefix, made of Python's own library; or a file with rows of token_ids and params.max_tokens.",
        path_after="",
    )
    rows: int | None = option(None, "Rows of the workload. (default: 256, or all of a file)", at_least=1)
    compare: str = option(
        ",".join(SCHEDULES), f"What to compare cbatch with, separated by commas: {', '.join((*SCHEDULES, *PEERS))}."
    )
    repeat: int = option(3, "Runs of each, taken in turn; medians are shown.", at_least=1)
    python: tuple[str, ...] = option(
        (), "An interpreter that has a peer: vllm=FOLDER/bin/python (repeatable).", path_after="[^=]*="
    )
    openvino_model: str | None = option(
        None,
        "Folder of the model as OpenVINO reads it. (default: converted once, and kept in cbatch's cache)",
        path_after="",
    )
    json: str | None = option(None, "Write every run, the medians and the timelines to this file.", path_after="")
    plot: str | None = option(
        None, "Draw the batches of the schedules over time into this page: FILE.html.", path_after=""
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.compared if name not in (*SCHEDULES, *PEERS)]:
            raise UsageError(f"--compare: {unknown[0]!r} is none of {', '.join((*SCHEDULES, *PEERS))}")
        if self.plot is not None and not self.plot.endswith(".html"):
            raise SettingError("plot", f"must end in .html, not {self.plot!r:.200}")

    @property
    def compared(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.compare.split(",") if name.strip()))
