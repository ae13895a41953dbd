"""A job from beginning to end. The file to read first.

    reader -> prompts -> engine -> writer, with stats -> progress

Everything that can be wrong with the command is found before the model loads. Then a thread reads and tokenizes, the
main thread runs the engine, and a thread writes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cbatch import __version__, plan
from cbatch.config import RunConfig
from cbatch.deadline import Deadline
from cbatch.errors import INTERRUPTED, OK, READER_GONE, SOME_FAILED, Fatal, UsageError
from cbatch.output.target import Target
from cbatch.output.writer import ReaderGone, ShardSink, StreamSink, Writer
from cbatch.rows.feed import Feed
from cbatch.rows.inputs import resolve
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.rank import find_rank
from cbatch.rows.reader import BROKEN_DIGEST, UNKNOWN_DIGEST, read, spans
from cbatch.rows.request import Completion, Request, Row
from cbatch.streams import secure_standard_streams, stdout_for_records
from cbatch.watch import report
from cbatch.watch.progress import Progress, resolve_mode, say
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from cbatch.engine.places import Place
    from cbatch.engine.protocol import AnyEngine, Facts
    from cbatch.model.loader import ModelFiles
    from cbatch.output.journal import Done, Journal
    from cbatch.output.shards import Shards

_SHOWN_ERRORS = 3
_AHEAD = 1024  # requests that may wait between the reader and the engine


def run(config: RunConfig) -> int:
    """Run a job; returns its exit code. Fatal and UsageError say what ended it early."""
    if config.output.output == "-" and sys.stdout is None:
        raise UsageError("-o -: standard output is closed")
    secure_standard_streams()
    stats = RunStats()
    deadline, display = Deadline(config.task, stats.row_seconds), config.display
    view = Progress(stats, resolve_mode(display.progress), display.progress_interval)
    with deadline, view as progress:
        try:
            if config.output.output != "-":
                return Job(config, stats, progress, deadline).run()
            with stdout_for_records() as stdout:
                return Job(config, stats, progress, deadline, stdout).run()
        except ReaderGone:
            return READER_GONE


class Job:
    """The parts of one run and the order in which they start and end."""

    def __init__(
        self, config: RunConfig, stats: RunStats, progress: Progress, deadline: Deadline, stdout: Any = None
    ) -> None:
        self.config, self.stats, self.progress, self.deadline, self.stdout = config, stats, progress, deadline, stdout
        self.rank = find_rank(config.task.shard, os.environ)
        self.target = Target(config.output)
        self.settings: dict[str, Any] = {}  # what completions depend on, as the manifest keeps it
        self.places: list[Place] = []
        self.facts: Facts | None = None  # about the engine, once there is one
        self.writer: Writer | None = None
        self.journal: Journal | None = None  # once it is this job's
        self.left_to_others: int | None = None  # rows, when this task has done its own
        deadline.note, deadline.last_words = progress.note, self._last_words
        if about := ", ".join(filter(None, (str(self.rank), str(deadline)))):
            progress.note(f"cbatch {__version__}: {about}")
        plan.check_rank(config, self.rank, self.target.single_file)
        progress.doing = "opening the input"
        self.sources = resolve(config.input.inputs, self.target.owns)
        self.seen = [range(0)] * len(self.sources)  # the rows of each that are within --skip and --limit

    def run(self) -> int:
        try:
            return self._run()
        except OSError as error:
            place = error.filename or self.target.path or "standard output"
            safe = " What was finished is safe; mend this and run it again." if self.target.path else ""
            raise Fatal(f"{place}: {error.strerror or error}.{safe}") from None

    def _run(self) -> int:
        from cbatch.engine.places import find_places
        from cbatch.model.loader import locate, resolve_device

        plan.check_settings(self.config)
        plan.check_first_rows(self.sources, self.config, self.target.shape)
        resolve_device(self.config.engine.device)
        self.places = find_places(self.config.engine)
        self.progress.doing = f"looking for {self.config.engine.model}"
        files = locate(self.config.engine.model)
        files.check()
        self.progress.doing = "loading the tokenizer"
        builder = plan.prompt_builder(self.config, files)
        if self.target.path is None:
            return self._generate(files, builder, None, None)
        from cbatch.output.journal import Journal

        schema = self.target.schema(self.sources)
        journal = Journal(self.target.path, self.target.single_file, self.rank)
        if not journal.is_locked:
            self.progress.note(f"{self.target.path}: this file system has no locks; see that no other job writes there")
        try:
            return self._generate(files, builder, journal, self.target.shards(journal, self.sources, schema))
        finally:
            journal.close()

    def _generate(
        self, files: ModelFiles, builder: PromptBuilder, journal: Journal | None, shards: Shards | None
    ) -> int:
        config, done = self.config, None
        if journal and shards:
            done = self._begin(files, builder, journal, shards)
        self.journal = journal
        self.writer = writer = Writer(ShardSink(shards) if shards else StreamSink(self.stdout, self.target.shape))

        def deliver(completion: Completion) -> None:
            writer.put(completion)
            self.stats.finished(completion)
            if completion.error and self.stats.num_rows_failed <= _SHOWN_ERRORS:
                self.progress.note(f"{completion.error.kind}: {completion.error}")

        rows = read(self.sources, config.input.skip, config.input.limit, passed=builder.skip)
        feed = Feed(rows, self._requests(builder, done), deliver, _AHEAD)
        self._count_rows()
        try:
            finished = self._run_engine(feed, files, builder, deliver)
        finally:
            feed.stop()
            try:
                writer.close()
            finally:
                if shards:
                    shards.close()
        if journal and shards and finished:
            shards.finish()
            if config.output.retry_failed:  # the input may have been mended
                journal.begin(self.settings)
            if not self.rank.is_whole:
                done = shards.survey()
                self.left_to_others = sum(done.count_missing(source, rows) for source, rows in enumerate(self.seen))
        return self._report(finished)

    def _begin(self, files: ModelFiles, builder: PromptBuilder, journal: Journal, shards: Shards) -> Done:
        """Start a job, or go on with one under the seed it drew; what is done."""
        from cbatch.output.journal import Done

        output = self.config.output
        layout = {"format": self.target.format, "ordered": output.ordered, "prefix": output.prefix}
        self.settings = plan.settings(self.config, builder, files, self.sources) | layout
        is_there = shards.exists()  # asked first: another task of the job writes its settings before its rows
        earlier = None if output.overwrite else journal.manifest
        if not is_there and not self.rank.is_whole:
            earlier = journal.propose(self.settings)
        if earlier and self.config.sampling.seed is None:
            builder.reseed(earlier["seed"])
            self.settings["seed"] = earlier["seed"]
        if output.overwrite:
            shards.replace(self.settings)
        elif not is_there and self.rank.is_whole:
            journal.begin(self.settings)
        elif earlier is None:
            raise UsageError(f"{journal.output}: was not made by cbatch, or its state is gone; --overwrite replaces it")
        elif not self.rank.is_whole or shards.has_completions():
            journal.resume(self.settings, may_differ=("input sizes",) if output.retry_failed else ())
        elif earlier != self.settings:  # nothing was completed under the other settings
            shards.replace(self.settings)
        journal.forget_summary()
        done = Done(len(self.sources)) if shards.starts_anew else shards.resume(output.retry_failed)
        self.stats.num_rows_earlier, self.stats.num_rows_earlier_failed = done.num_rows, done.num_failed
        return done

    def _requests(self, builder: PromptBuilder, done: Done | None) -> Callable[[Row], Request | None]:
        """Row -> request, or None if the row is done or another task's; RowError if it can't be one."""
        index_of = {source.name: index for index, source in enumerate(self.sources)}

        def build(row: Row) -> Request | None:
            source = index_of[row.source]
            self.seen[source] = range(self.seen[source].start if self.seen[source] else row.index, row.index + 1)
            digest = done.digest(source, row.index) if done else 0
            if digest or not self.rank.owns(source, row.index):
                _check_unchanged(row, digest)
                builder.skip(row)
                return None
            if not row.problem:
                self.target.shape.check(row)
            return builder(row)

        return build

    def _run_engine(
        self, feed: Feed, files: ModelFiles, builder: PromptBuilder, deliver: Callable[[Completion], None]
    ) -> bool:
        """Complete the rows of the feed; whether there was time for all."""
        if feed.empty():
            return True
        self.progress.doing = f"loading {files.name}"
        engine = self._start_engine(files, builder.max_model_len)
        self.facts = engine.facts
        self.progress.note(self._first_line(engine.facts, builder))
        self.progress.doing = "first step"
        self.deadline.rows_run = True
        with closing(engine.generate(feed, self.deadline)) as completions:
            for completion in completions:
                deliver(completion)
        return feed.ended and not engine.has_unfinished

    def _start_engine(self, files: ModelFiles, max_model_len: int) -> AnyEngine:
        """One in this process, or several in processes of their own."""
        if len(self.places) == 1:
            from cbatch.engine.start import start_engine

            return start_engine(self.places[0].config, files, max_model_len, self.stats)
        from cbatch.engine.replicas import Replicas

        return Replicas(self.places, files, max_model_len, self.stats, self.progress.note)

    def _first_line(self, facts: Facts, builder: PromptBuilder) -> str:
        config, sampling = self.config, builder.sampling
        draw = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
        where, each = facts.device, ""
        if facts.num_replicas > 1:
            where, each = facts.device_type, f"{facts.num_replicas} engines ({'; '.join(map(str, self.places))}), each "
        text = (
            f"cbatch {__version__}: {config.engine.model} ({facts.dtype} on {where}), "
            f"{'chat' if builder.chat else 'raw'} prompts, max_tokens {sampling.max_tokens}, {draw}; "
            f"{each}up to {facts.max_num_seqs} sequences, KV cache for {facts.capacity:,} tokens"
        )
        if config.engine.kv_cache_dtype != "auto":
            text += f" in {config.engine.kv_cache_dtype}"
        if facts.capacity < facts.max_model_len:
            text += f", so no row can be longer, though the context is {facts.max_model_len:,}"
        text += "".join(f"; {note}" for note in facts.notes)
        if not facts.has_eos:
            text += "; the model names no end-of-sequence token, so only --stop and --max-tokens end a row"
        return text

    def _count_rows(self) -> None:
        """Find the number of rows beside the run, for the ETA."""

        def count() -> None:
            try:
                counts = [source.count() for source in self.sources]
            except Exception:  # the reader will say what is wrong with the file
                return
            known = [one for one in counts if one is not None]
            if len(known) == len(counts):
                parts = spans(known, self.config.input.skip, self.config.input.limit)
                self.stats.num_rows = sum(self.rank.count(source, rows) for source, rows in enumerate(parts))

        threading.Thread(target=count, name="counter", daemon=True).start()

    def _report(self, finished: bool) -> int:
        stats, journal = self.stats, self.journal
        if finished:
            stats.num_rows = stats.num_rows_earlier + stats.num_rows_done
        limits: dict[str, float] = {}
        if self.facts and finished:
            from cbatch.model.ceilings import ceilings

            measured = ceilings(self.facts.device, self.facts.dtype)
            devices = (
                self.facts.num_replicas if self.facts.device_type == "cuda" else 1
            )  # CPUs are measured all together
            limits = {name: devices * value for name, value in asdict(measured).items()} if measured else {}
        figures = report.summary(stats, finished, **limits)
        if self.left_to_others is not None:
            figures["shard"], figures["rows_left_to_others"] = self.rank.suffix[1:], self.left_to_others
        if journal:
            journal.write_summary(figures)
        self.progress.end(figures, str(self.target.path or "standard output"))
        if self.left_to_others is not None:
            left = self.left_to_others
            rest = f"{left:,} rows are left to the others" if left else "all rows of the job are done"
            self.progress.note(f"This was {self.rank}; {rest}.")
        if not finished:
            if journal:
                note = f"{self.deadline.reason}: everything finished is on disk; run the same command again to go on."
                self.progress.note(note)
            return INTERRUPTED
        return SOME_FAILED if stats.num_rows_failed or stats.num_rows_earlier_failed else OK

    def _last_words(self) -> None:
        """The process ends in a moment, in the middle of what the main thread does."""
        if self.writer:
            self.writer.flush()
        self._report(finished=False)
        self.progress.abandon()


def _check_unchanged(row: Row, digest: int) -> None:
    """Fatal if a row is not what it was when it was completed; 0 if it was not."""
    if digest and row.digest == BROKEN_DIGEST != digest:
        raise Fatal(f"{row.problem}. Rows from here on were read before; restore the input to go on.")
    if digest not in (0, UNKNOWN_DIGEST, row.digest):
        raise Fatal(
            f"{row.where}: this row has changed since it was completed. Use the same input, another output, or "
            "--overwrite to start anew."
        )


def fatal(error: Fatal) -> int:
    """Tell the user what ended the run; the exit code."""
    say(f"cbatch: {error}")
    return error.exit_code
