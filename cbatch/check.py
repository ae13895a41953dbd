"""`cbatch check`: what a run would meet, without the model's weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch import plan
from cbatch.config import RunConfig
from cbatch.errors import OK, SOME_FAILED, RowError
from cbatch.output.record import RecordShape
from cbatch.output.target import Target
from cbatch.rows import remarks
from cbatch.rows.inputs import resolve
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.reader import read
from cbatch.rows.request import Row
from cbatch.watch.report import duration

if TYPE_CHECKING:
    from cbatch.engine.estimate import Estimate
    from cbatch.engine.plan import EnginePlan
    from cbatch.model.loader import ModelFiles

_SHOWN = 20  # bad rows
_BAR = 40  # characters
_SHORT, _SLOW = 1 / 4, 3  # the range of an estimated time: completions of this share of the most, and slower by this


def check(config: RunConfig) -> int:
    """Read and tokenize everything and print a report; SOME_FAILED if a row could not be completed."""
    from cbatch.engine.places import find_places
    from cbatch.engine.plan import resolve as resolve_engine
    from cbatch.model.loader import locate

    columns = plan.columns_on_request(config)
    target = Target(config.output, config.engine.model, columns) if config.output.output else None
    owns = target.owns if target else lambda _: False
    sources = resolve(config.input.inputs, owns, lambda text: print(text, file=sys.stderr))
    shape = target.shape if target else RecordShape(config.output.prefix, on_request=columns)
    plan.check_first_rows(sources, config, shape)
    places = find_places(config.engine)
    files = locate(config.engine.model)
    files.check(dummy=config.engine.load_format == "dummy")
    engine = resolve_engine(config.engine, places, files, config.prompt.max_model_len)
    builder = plan.prompt_builder(config, files, engine.max_model_len, sources)
    found = _read_all(read(sources, config.input.skip, config.input.limit), shape, builder)
    if note := plan.not_applied(config, files):
        print(note)
    for line in _report(found, builder, engine, files):
        print(line)
    return SOME_FAILED if found.errors else OK


@dataclass
class Found:
    """The rows of the input, counted."""

    lengths: Counter[int] = field(default_factory=Counter)  # of the prompts of good rows, in tokens
    longest: int = 0  # tokens that a good row may come to
    num_new: int = 0  # tokens that the completions of good rows may come to
    first: Row | None = None  # good row
    errors: Counter[str] = field(default_factory=Counter)  # bad rows by the kind of their error
    remarks: Counter[str] = field(default_factory=Counter)  # good rows by what is worth knowing about them

    @property
    def num_prompt(self) -> int:
        """Tokens in the prompts of good rows."""
        return sum(length * count for length, count in self.lengths.items())


def _read_all(rows: Iterable[Row], shape: RecordShape, builder: PromptBuilder) -> Found:
    """Make requests of all rows, count them, and print the first of the errors."""
    found = Found()
    for row in rows:
        try:
            if not row.problem:
                shape.check(row)
            request = builder(row)
        except RowError as error:
            found.errors[error.kind] += 1
            if found.errors.total() <= _SHOWN:
                print(f"{error.kind}: {error}")
            continue
        found.first = found.first or row
        found.lengths[len(request.token_ids)] += 1
        found.remarks.update(request.remarks)
        longest = request.longest(builder.max_model_len)
        found.longest = max(found.longest, longest)
        found.num_new += longest - len(request.token_ids)
    return found


def _report(found: Found, builder: PromptBuilder, engine: EnginePlan, files: ModelFiles) -> Iterator[str]:
    num_good, num_bad = found.lengths.total(), found.errors.total()
    if num_bad > _SHOWN:
        yield f"... and {num_bad - _SHOWN:,} more"
    yield f"Rows        {num_good + num_bad:,}: {num_good:,} good, {num_bad:,} bad" + _counts(found.errors)
    if found.first is None:
        return
    if found.remarks:
        yield f"Of these    {remarks.summary(found.remarks)}"
    yield from _prompt_lines(found.lengths)
    yield from _engine_lines(found, engine, files)
    if builder.asks_for_date:
        yield f"Date        {builder.date}, which a template asks for"
    yield f"Last tokens {builder.last_tokens(found.first)} (of the first prompt)"
    yield f"First prompt ({found.first.where}, {'chat' if builder.chat else 'raw'}), as the model sees it:"
    yield builder.render(found.first)


def _counts(errors: Counter[str]) -> str:
    return " (" + ", ".join(f"{count:,} {kind}" for kind, count in errors.most_common()) + ")" if errors else ""


def _prompt_lines(lengths: Counter[int]) -> Iterator[str]:
    """Totals and a histogram of the prompt lengths, in powers of two."""
    total = sum(length * count for length, count in lengths.items())
    yield f"Tokens      {total:,} in prompts: {min(lengths):,} to {max(lengths):,}, {total / lengths.total():.0f} on average"
    buckets: Counter[int] = Counter()
    for length, count in lengths.items():
        buckets[length.bit_length()] += count
    most = max(buckets.values())
    for bits in range(min(buckets), max(buckets) + 1):
        span = f"{2 ** (bits - 1):,} to {2**bits - 1:,}"
        yield f"  {span:>17} {'#' * -(-buckets[bits] * _BAR // most):<{_BAR}} {buckets[bits]:,}"


def _engine_lines(found: Found, engine: EnginePlan, files: ModelFiles) -> Iterator[str]:
    """How many blocks the rows need and how many fit, in all replicas together, and the time: estimates without weights."""
    from cbatch.engine.estimate import Estimate

    estimate = Estimate(files, engine)
    num_fit, block_bytes = estimate.num_blocks, estimate.bytes_per_token * engine.block_size
    num_good = found.lengths.total()
    mean = (found.num_prompt + found.num_new) / num_good
    blocks = -(-round(mean) // engine.block_size)
    num_rows = min(num_fit // blocks, engine.max_num_seqs * len(engine.places))
    basis = ""
    if engine.kv_cache_memory is None and estimate.weights:
        basis = f" beside weights of {estimate.weights / 1024**3:.2f} GiB, by an estimate from the model's files"
    if len(engine.places) > 1:
        basis += f", in {len(engine.places)} engines together"
    yield (
        f"KV cache    a row takes {blocks:,} blocks of {engine.block_size} tokens "
        f"({blocks * block_bytes / 1024**2:.1f} MiB) "
        f"on average with {found.num_new / num_good:,.0f} new tokens, {-(-found.longest // engine.block_size):,} at most; "
        f"about {num_fit:,} blocks fit here{basis}, {num_rows:,} rows at once"
    )
    yield from _time_line(found, num_rows, estimate)


def _time_line(found: Found, at_once: int, estimate: Estimate) -> Iterator[str]:
    """A range for the time of a run: nobody knows how long completions will be, or how near to the ceilings it will come."""
    num_rows = found.lengths.total()
    prompt = found.num_prompt / num_rows
    new = found.num_new / num_rows
    least = estimate.seconds(num_rows, prompt, new * _SHORT, at_once)
    most = estimate.seconds(num_rows, prompt, new, at_once)
    if least is not None and most is not None:
        yield (
            f"Time        about {duration(least)} to {duration(most * _SLOW)} after loading. The first, if completions have "
            f"{new * _SHORT:,.0f} tokens on average and this machine runs at the speed measured on it; the second, if they have "
            f"{new:,.0f}, the most they may, at a third of that speed. Prompts that begin alike take less"
        )
