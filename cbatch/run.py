"""A job from beginning to end. The file to read first.

    reader -> engine -> output, with stats -> progress

Everything that can be wrong with the command is found before the model loads. Then a thread reads and tokenizes, the
main thread runs the engine, and a thread writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from cbatch import __version__, plan
from cbatch.config import RunConfig
from cbatch.deadline import Deadline
from cbatch.ending import Ending
from cbatch.errors import READER_GONE, Fatal, UsageError
from cbatch.failures import FailureLimit
from cbatch.opening import first_line
from cbatch.output.index import Done
from cbatch.output.sink import Sink, make_sink
from cbatch.output.stream import ReaderGone
from cbatch.output.target import Target
from cbatch.output.writer import Writer
from cbatch.rows import remarks
from cbatch.rows.feed import Feed
from cbatch.rows.inputs import resolve
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.rank import find_rank
from cbatch.rows.reader import Source, read
from cbatch.rows.remaining import Remaining, count_in_background
from cbatch.rows.request import Completion, Request, Row
from cbatch.streams import secure_standard_streams, stdout_for_records
from cbatch.watch.progress import Progress, resolve_mode, say
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from cbatch.engine.plan import EnginePlan
    from cbatch.engine.protocol import AnyEngine
    from cbatch.model.loader import ModelFiles

Deliver = Callable[[Completion], None]

_SHOWN_ERRORS = 3
_AHEAD = 1024  # requests that may wait between the reader and the engine


def run(config: RunConfig) -> int:
    """Run a job; returns its exit code. Fatal and UsageError say what ended it early."""
    is_stream = config.output.output == "-"
    if is_stream and sys.stdout is None:
        raise UsageError("-o -: standard output is closed")
    secure_standard_streams()
    stats, display = RunStats(), config.display
    deadline = Deadline(config.task, stats.row_seconds)
    progress = Progress(stats, resolve_mode(display.progress), display.progress_interval)
    with deadline, progress, stdout_for_records() if is_stream else nullcontext() as stdout:
        try:
            return Job(config, stats, progress, deadline).run(stdout)
        except ReaderGone:
            return READER_GONE


class Job:
    """One run of a job: `run` is the whole of it, the other methods are its steps."""

    def __init__(self, config: RunConfig, stats: RunStats, progress: Progress, deadline: Deadline) -> None:
        self.config, self.stats, self.progress, self.deadline = config, stats, progress, deadline
        self._failures = FailureLimit(config.task.max_failures)
        self.rank = find_rank(config.task.shard, os.environ)
        self.target = Target(config.output, config.engine.model, plan.columns_on_request(config))
        self.ending = Ending(stats, progress, deadline, self.target, self.rank)
        deadline.note, deadline.last_words = progress.note, self.ending.last_words

    def run(self, stdout: BinaryIO | None) -> int:
        try:
            return self._run(stdout)
        except OSError as error:
            place = error.filename or self.target
            is_there = not self.target.is_stream and self.target.state.exists()
            safe = " What was finished is safe; mend this and run it again." if is_there else ""
            raise Fatal(f"{place}: {error.strerror or error}.{safe}") from None

    def _run(self, stdout: BinaryIO | None) -> int:
        """reader -> engine -> output"""
        sources = self._open_inputs()
        files, engine_plan, builder = self._plan(sources)
        with closing(make_sink(self.target, sources, self.rank, stdout, self.progress.note)) as sink:
            done = self._open_output(sink, sources, files, engine_plan, builder)
            shape = self.target.shape
            state_of = partial(done.state, content_of=shape.content_of_row)
            remaining = Remaining(sources, self.rank, builder, state_of, shape.check)
            with Writer(sink) as writer:
                self.ending.writer = writer
                deliver = partial(self._deliver, writer)
                build = partial(self._request, remaining)
                with Feed(self._rows(sources, remaining), build, deliver, _AHEAD) as feed:
                    finished = self._complete(feed, files, engine_plan, builder, deliver)
            if finished:
                self._check_end(remaining, done)
            left_to_others = sink.finish(remaining.seen) if finished else 0
            return self.ending.report(finished, left_to_others)

    def _open_inputs(self) -> list[Source]:
        if about := ", ".join(filter(None, (str(self.rank), str(self.deadline)))):
            self.progress.note(f"cbatch {__version__}: {about}")
        plan.check_rank(self.config, self.rank, self.target.single_file)
        self.progress.doing = "opening the input"
        return resolve(self.config.input.inputs, self.target.owns, self.progress.note)

    def _plan(self, sources: Sequence[Source]) -> tuple[ModelFiles, EnginePlan, PromptBuilder]:
        """Find all that is wrong with the command; the model's files, how engines run, and how prompts are made."""
        from cbatch.engine.places import find_places
        from cbatch.engine.plan import resolve as resolve_engine
        from cbatch.model.loader import locate

        plan.check_settings(self.config)
        plan.check_first_rows(sources, self.config, self.target.shape)
        places = find_places(self.config.engine)
        self.progress.doing = f"looking for {self.config.engine.model}"
        files = locate(self.config.engine.model)
        files.check(dummy=self.config.engine.load_format == "dummy")
        engine_plan = resolve_engine(self.config.engine, places, files, self.config.prompt.max_model_len)
        if note := plan.not_applied(self.config, files):
            self.progress.note(note)
        self.progress.doing = "loading the tokenizer"
        return files, engine_plan, plan.prompt_builder(self.config, files, engine_plan.max_model_len, sources)

    def _open_output(
        self, sink: Sink, sources: Sequence[Source], files: ModelFiles, engine_plan: EnginePlan, builder: PromptBuilder
    ) -> Done:
        """Begin a job, or go on with one under the seed and the date that it drew; what is done."""
        proposed = plan.settings(self.config, engine_plan, builder, files, sources)
        settings, done = sink.open(proposed, plan.drawn(self.config))
        builder.adopt(settings)
        if done.num_rows:
            failed = f", {done.num_failed:,} of them failed" if done.num_failed else ""
            self.progress.note(
                f"{self.target}: {done.num_rows:,} rows are done already{failed}; the run goes on behind them."
            )
        self.stats.num_rows_earlier, self.stats.num_rows_earlier_failed = done.num_rows, done.num_failed
        return done

    def _rows(self, sources: Sequence[Source], remaining: Remaining) -> Iterable[Row]:
        """The rows within --skip and --limit; their number is found out meanwhile."""
        skip, limit = self.config.input.skip, self.config.input.limit
        count_in_background(sources, skip, limit, self.rank, self._expect)
        return read(sources, skip, limit, passed=remaining.skip)

    def _request(self, remaining: Remaining, row: Row) -> Request | None:
        """The request of a row that is to be done; what is worth knowing about it is counted, and said the first time."""
        request = remaining.request(row)
        for kind in request.remarks if request else ():
            if not self.stats.remarks[kind]:
                self.progress.note(remarks.first(kind, row.where))
            self.stats.remarks[kind] += 1
        return request

    def _check_end(self, remaining: Remaining, done: Done) -> None:
        """Fatal if rows that were completed are not in the input any more; a note if some could not be compared with it."""
        remaining.check_end(done.num_rows_of, self.config.input.limit)
        if remaining.num_unknown:
            self.progress.note(
                f"{remaining.num_unknown:,} rows that were done earlier could not be compared with the input, because the "
                "index of their records is lost."
            )

    def _expect(self, num_rows: int) -> None:
        self.stats.num_rows = num_rows

    def _complete(
        self, feed: Feed, files: ModelFiles, engine_plan: EnginePlan, builder: PromptBuilder, deliver: Deliver
    ) -> bool:
        """Run the engine on the rows of the feed; whether there was time for all. No row, no engine."""
        if feed.empty():
            return True
        self.progress.doing = f"loading {files.name}"
        engine = self._start_engine(files, engine_plan)
        self.ending.facts = engine.facts
        self.progress.note(first_line(self.config.engine, builder, engine.facts, engine_plan))
        self.progress.doing = "first step"
        self.deadline.rows_run = True
        with closing(engine.generate(feed, self.deadline)) as completions:
            for completion in completions:
                deliver(completion)
        return feed.ended and not engine.has_unfinished

    def _start_engine(self, files: ModelFiles, engine_plan: EnginePlan) -> AnyEngine:
        """One in this process, or several in processes of their own."""
        if len(engine_plan.places) == 1:
            from cbatch.engine.start import start_engine

            return start_engine(engine_plan, engine_plan.places[0], files, self.stats)
        from cbatch.engine.replicas import Replicas

        return Replicas(engine_plan, files, self.stats, self.progress.note)

    def _deliver(self, writer: Writer, completion: Completion) -> None:
        """Have a completion written and counted; the first errors are shown."""
        writer.put(completion)
        self.stats.finished(completion)
        if completion.error and self.stats.num_rows_failed <= _SHOWN_ERRORS:
            self.progress.note(f"{completion.error.kind}: {completion.error}")
        self._failures.check(self.stats, completion.error)


def fatal(error: Fatal) -> int:
    """Tell the user what ended the run; the exit code."""
    say(f"cbatch: {error}")
    return error.exit_code
