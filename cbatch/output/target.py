"""What `-o` names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.config import OutputConfig
from cbatch.errors import UsageError
from cbatch.output.record import RecordShape
from cbatch.output.shard import find_shards
from cbatch.rows.reader import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from cbatch.output.journal import Journal
    from cbatch.output.shards import Shards


_OTHER_SUFFIXES = (".csv", ".tsv", ".json", ".ndjson", ".txt", ".gz", ".zst", ".arrow", ".feather")


class Target:
    """Standard output (`path` is None), a folder, or a single file, and the format of its records."""

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
        if name.endswith(_OTHER_SUFFIXES) and not Path(output.output).is_dir():
            raise UsageError(f"-o {output.output}: cbatch writes .jsonl and .parquet, or a folder of these")
        if self.path is not None and not self.single_file and self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: is a file; name a folder, or a file that ends in .jsonl or .parquet")

    @property
    def state(self) -> Path | None:
        """The folder that keeps what a killed job needs to go on: `OUT/.cbatch`, or `.NAME.cbatch` beside a file."""
        if self.path is None:
            return None
        return self.path.with_name(f".{self.path.name}.cbatch") if self.single_file else self.path / ".cbatch"

    def owns(self, path: Path) -> bool:
        """Whether a file belongs to this output, by whatever name it goes: a job may replace or remove it."""
        if self.path is None or self.state is None:
            return False
        found = path.stat()
        return (found.st_dev, found.st_ino) in self._final_inodes or path.resolve().is_relative_to(self.state.resolve())

    @cached_property
    def _final_inodes(self) -> set[tuple[int, int]]:
        """Device and inode of each file that this output has published."""
        assert self.path is not None
        finals = [self.path] if self.single_file else find_shards(self.path).values()
        found = [path.stat() for path in finals if path.exists()]
        return {(one.st_dev, one.st_ino) for one in found}

    @property
    def shape(self) -> RecordShape:
        return RecordShape(self.output.prefix, openai=self.format == "jsonl")

    def schema(self, sources: Sequence[Source]) -> pa.Schema | None:
        """The columns of Parquet output, None for JSONL."""
        if self.format == "jsonl":
            return None
        from cbatch.output import parquet

        return parquet.schema_of(sources, self.output.prefix)

    def shards(self, journal: Journal, sources: Sequence[Source], schema: pa.Schema | None) -> Shards:
        from cbatch.output.shards import Shards

        names = [source.name for source in sources]
        return Shards(journal, self.shape, names, schema, self.single_file, self.output.ordered, self.output.shard_rows)
