"""A job from beginning to end. The file to read first.

    reader -> prompts -> engine -> writer, with stats -> progress

Everything that can be wrong with the command is found before the model loads. Then a thread reads and tokenizes, the
main thread runs the engine, and a thread writes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cbatch import __version__
from cbatch.config import OutputConfig, RunConfig
from cbatch.errors import Fatal, RowError, UsageError
from cbatch.rows.feed import Feed
from cbatch.rows.prompt import PromptBuilder, template_text
from cbatch.rows.reader import UNKNOWN_DIGEST, Source, read, resolve
from cbatch.rows.record import RecordShape
from cbatch.rows.request import Completion, Request, Row, SamplingParams
from cbatch.rows.writer import ReaderGone, ShardSink, StreamSink, Writer
from cbatch.watch import report
from cbatch.watch.progress import Progress, resolve_mode, say
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from cbatch.engine.engine import Engine
    from cbatch.model.loader import ModelFiles
    from cbatch.rows.journal import Done, Journal
    from cbatch.rows.shards import Shards

OK, FATAL, USAGE, SOME_FAILED, INTERRUPTED, READER_GONE = 0, 1, 2, 3, 75, 141

_FIRST_ROWS = 20  # looked at before anything is loaded
_AHEAD = 4  # times max_num_seqs: requests that may wait between the reader and the engine


class Interrupted(Exception):
    """A signal came before the engine ran."""


def run(config: RunConfig) -> int:
    """Run a job; returns its exit code. Fatal and UsageError say what ended it early."""
    stats = RunStats()
    with Progress(stats, resolve_mode(config.display.progress)) as progress, _stdout_for_records() as stdout:
        try:
            return Job(config, stats, progress, stdout).run()
        except ReaderGone:
            return READER_GONE


class Job:
    """The parts of one run and the order in which they start and end."""

    def __init__(self, config: RunConfig, stats: RunStats, progress: Progress, stdout: Any) -> None:
        self.config, self.stats, self.progress, self.stdout = config, stats, progress, stdout
        self.engine: Engine | None = None
        self.stopping = False

    def run(self) -> int:
        config, output = self.config, self.config.output
        self.progress.doing = "opening the input"
        target = Target(output)
        sources = resolve(config.input.inputs, exclude=target.path)
        shape = RecordShape(output.prefix, openai=target.format == "jsonl")
        check_first_rows(sources, config, shape)
        with _signals(self._on_signal):
            try:
                if target.path is None:
                    return self._generate(sources, shape, None, None)
                from cbatch.rows.journal import Journal

                journal = Journal(target.path, target.single_file)
                try:
                    return self._generate(sources, shape, journal, target.shards(journal, sources, shape))
                finally:
                    journal.close()
            except Interrupted:
                self.progress.note("Interrupted before the first row; nothing is lost.")
                return INTERRUPTED

    def _generate(
        self, sources: list[Source], shape: RecordShape, journal: Journal | None, shards: Shards | None
    ) -> int:
        from cbatch.model.loader import locate

        config = self.config
        self.progress.doing = f"looking for {config.engine.model}"
        files = locate(config.engine.model)
        files.check()
        self.progress.doing = "loading the tokenizer"
        sampling = sampling_defaults(config, files)
        done = None
        if journal and shards:
            sampling, done = _begin(config, sampling, files, sources, journal, shards)
            self.stats.rows_earlier = done.num_rows
        elif sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(63))
        builder = prompt_builder(config, sampling, files)
        writer = Writer(ShardSink(shards) if shards else StreamSink(self.stdout, shape))

        def deliver(completion: Completion) -> None:
            writer.put(completion)
            self.stats.finished(completion)

        selected = read(sources, config.input.skip, config.input.limit)
        feed = Feed(selected, _requests(builder, shape, sources, done), deliver, _AHEAD * max_num_seqs(config))
        self._count_rows(sources)
        try:
            self._run_engine(feed, files, builder, deliver)
        finally:
            feed.stop()
            try:
                writer.close()
            finally:
                if shards:
                    shards.close()
        if shards and not self.stopping:
            shards.finish()
        return self._report(journal)

    def _run_engine(self, feed: Feed, files: ModelFiles, builder: PromptBuilder, deliver: Any) -> None:
        if feed.empty():
            return
        self.progress.doing = f"loading {files.name}"
        from cbatch.engine.start import start_engine

        engine = start_engine(self.config.engine, files, builder.max_model_len, self.stats)
        self.progress.note(self._first_line(engine, builder))
        self.progress.doing = "first step"
        self.engine = engine
        for completion in engine.generate(feed):
            deliver(completion)

    def _first_line(self, engine: Engine, builder: PromptBuilder) -> str:
        config, sampling = self.config, builder.sampling
        model, pool = engine.runner.model, engine.scheduler.pool
        draw = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
        tokens = pool.num_blocks * pool.block_size
        text = (
            f"cbatch {__version__}: {config.engine.model} ({str(model.dtype).removeprefix('torch.')} on {model.device}), "
            f"{'chat' if builder.chat else 'raw'} prompts, max_tokens {sampling.max_tokens}, {draw}; "
            f"up to {engine.scheduler.max_num_seqs} sequences, KV cache for {tokens:,} tokens"
        )
        if engine.max_model_len < builder.max_model_len:
            text += f"; the KV cache limits a row to {engine.max_model_len:,} tokens"
        if not engine.eos_token_ids:
            text += "; the model names no end-of-sequence token, so only --stop and --max-tokens end a row"
        return text

    def _count_rows(self, sources: list[Source]) -> None:
        """Find the number of rows beside the run, for the ETA."""

        def count() -> None:
            try:
                counts = [source.count() for source in sources]
            except Exception:  # the reader will say what is wrong with the file
                return
            if all(one is not None for one in counts):
                rows = max(0, sum(one for one in counts if one is not None) - self.config.input.skip)
                limit = self.config.input.limit
                self.stats.rows_total = rows if limit is None else min(rows, limit)

        threading.Thread(target=count, name="counter", daemon=True).start()

    def _report(self, journal: Journal | None) -> int:
        stats, finished = self.stats, not self.stopping
        if finished:
            stats.rows_total = stats.rows_earlier + stats.rows_done
        limits: dict[str, float] = {}
        if self.engine and finished:
            from cbatch.model.ceilings import ceilings

            limits = asdict(ceilings(self.engine.runner.device, self.engine.runner.model.dtype))
        figures = report.summary(stats, finished, **limits)
        if journal:
            from cbatch.rows.journal import write_atomically

            write_atomically(journal.state / "summary.json", _json(figures))
        self.progress.note(_json(figures, indent=None) if self.progress.mode == "json" else report.text(figures))
        if self.stopping:
            self.progress.note(
                "Everything finished is on disk; run the same command again to go on." if journal else ""
            )
            return INTERRUPTED
        return SOME_FAILED if stats.rows_failed else OK

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.stopping:
            os._exit(128 + number)
        self.stopping = True
        if self.engine is None:
            raise Interrupted
        self.engine.stopping = True


class Target:
    """What `-o` names."""

    def __init__(self, output: OutputConfig) -> None:
        self.output = output
        name = Path(output.output).name
        by_suffix = next((kind for kind in ("jsonl", "parquet") if name.endswith(f".{kind}")), None)
        self.format = output.format or by_suffix or "jsonl"
        self.path = None if output.output == "-" else Path(output.output)
        self.single_file = by_suffix is not None and not (self.path is not None and self.path.is_dir())
        if not output.output:
            raise UsageError("say where the completions go: -o FOLDER, -o FILE.jsonl, -o FILE.parquet or -o -")
        if by_suffix and output.format and by_suffix != output.format:
            raise UsageError(f"-o {output.output} and --format {output.format} contradict each other")
        if self.path is None and (self.format != "jsonl" or output.ordered or output.retry_failed or output.overwrite):
            raise UsageError(
                "standard output takes JSONL as rows finish: no --format parquet, --ordered, --retry-failed, --overwrite"
            )
        if self.path is not None and not self.single_file and self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: is a file; name a folder, or a file that ends in .jsonl or .parquet")

    def shards(self, journal: Journal, sources: list[Source], shape: RecordShape) -> Shards:
        from cbatch.rows.shards import Shards

        schema = None
        if self.format == "parquet":
            from cbatch.rows import parquet

            schema = parquet.schema_of(sources, shape.prefix)
        names = [source.name for source in sources]
        return Shards(journal, shape, names, schema, self.single_file, self.output.ordered, self.output.shard_rows)


def check_first_rows(sources: list[Source], config: RunConfig, shape: RecordShape) -> None:
    """UsageError if none of a file's first rows holds a prompt, or if their columns collide with those added."""
    for source in sources:
        if source.name == "-" or (source.kind == "dataset" and source.size is None):
            continue
        rows = [row for row in islice(source.rows(), _FIRST_ROWS) if not row.problem]
        names = {config.prompt.prompt_column, "messages", "token_ids", "body"}
        if rows and not config.prompt.template and not any(names & row.data.keys() for row in rows):
            columns = ", ".join(dict.fromkeys(name for row in rows for name in row.data)) or "none"
            raise UsageError(
                f"{source.name}: no column {config.prompt.prompt_column!r}, 'messages' or 'token_ids'. "
                f"Columns: {columns}. Name one with --prompt-column, or make a prompt with --template."
            )
        for row in rows:
            try:
                shape.check(row)
            except RowError as error:
                raise UsageError(str(error)) from None


def sampling_defaults(config: RunConfig, files: ModelFiles) -> SamplingParams:
    """The settings of rows that have none of their own; `--generation-config model` lets the model decide first."""
    if config.engine.generation_config != "model":
        return config.sampling
    generation = files.generation_config
    given = {
        "max_new_tokens": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
    }
    untouched = SamplingParams()
    values = {
        name: generation[key]
        for key, name in given.items()
        if generation.get(key) is not None and getattr(config.sampling, name) == getattr(untouched, name)
    }
    if not generation.get("do_sample") and "temperature" in values:
        values["temperature"] = 0.0
    elif generation.get("do_sample") and config.sampling.temperature == untouched.temperature:
        values.setdefault("temperature", 1.0)
    return config.sampling.override(values)


def prompt_builder(config: RunConfig, sampling: SamplingParams, files: ModelFiles) -> PromptBuilder:
    context, asked = files.context, config.prompt.max_model_len
    if asked is not None and asked > context:
        raise UsageError(f"--max-model-len {asked}: the model's context is {context} tokens")
    vocab_size = files.config.get_text_config().vocab_size
    return PromptBuilder(config.prompt, sampling, files.tokenizer, asked or context, vocab_size, sampling.seed or 0)


def max_num_seqs(config: RunConfig) -> int:
    return config.engine.max_num_seqs or 256


def _begin(
    config: RunConfig,
    sampling: SamplingParams,
    files: ModelFiles,
    sources: list[Source],
    journal: Journal,
    shards: Shards,
) -> tuple[SamplingParams, Done]:
    """Start a job or go on with one: the sampling settings with their seed, and what is done."""
    output = config.output
    if output.overwrite:
        shards.remove()
    earlier = journal.manifest
    if earlier is None and shards.exists():
        raise UsageError(f"{journal.output}: was not made by cbatch, or its state is gone; --overwrite replaces it")
    if sampling.seed is None:
        sampling = replace(sampling, seed=earlier["seed"] if earlier else random.getrandbits(63))
    journal.begin(_settings(config, sampling, files, sources))
    return sampling, shards.resume(output.retry_failed)


def _settings(config: RunConfig, sampling: SamplingParams, files: ModelFiles, sources: list[Source]) -> dict[str, Any]:
    """Everything that completions depend on, as the manifest keeps it."""
    from cbatch.model.loader import resolve_device, resolve_dtype

    engine, prompt, output = config.engine, config.prompt, config.output
    dtype = resolve_dtype(engine.dtype, resolve_device(engine.device), files.config)
    return {
        **files.fingerprint(),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(sampling).items()},
        **asdict(prompt),
        "template": template_text(prompt.template) if prompt.template else None,
        "inputs": [[source.name, source.size] for source in sources],
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": engine.load_format,
        "format": output.format,
        "ordered": output.ordered,
        "prefix": output.prefix,
    }


def _requests(builder: PromptBuilder, shape: RecordShape, sources: list[Source], done: Done | None) -> Any:
    """Row -> request, or None if the row is done; RowError if it can't be one."""
    index_of = {source.name: index for index, source in enumerate(sources)}

    def build(row: Row) -> Request | None:
        digest = done.digest(index_of[row.source], row.row) if done else 0
        if digest:
            if UNKNOWN_DIGEST not in (digest, row.digest) and digest != row.digest:
                raise Fatal(
                    f"{row.where}: this row has changed since it was completed. Use the same input, another output, "
                    "or --overwrite to start anew."
                )
            return None
        if not row.problem:
            shape.check(row)
        return builder(row)

    return build


def _json(value: Any, indent: int | None = 2) -> str:
    import json

    return json.dumps(value, indent=indent) + ("\n" if indent else "")


@contextmanager
def _stdout_for_records() -> Iterator[Any]:
    """Standard output for records only: what a library prints there goes to stderr meanwhile."""
    sys.stdout.flush()
    records = os.fdopen(os.dup(1), "wb", buffering=1 << 16)
    os.dup2(2, 1)
    try:
        yield records
    finally:
        try:
            records.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), records.fileno())
        os.dup2(records.fileno(), 1)
        records.close()


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Route the signals that ask a job to stop to `handler`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def fatal(error: Fatal) -> int:
    """Tell the user what ended the run; the exit code."""
    say(f"cbatch: {error}")
    return error.exit_code
