"""What `-o` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.config import OutputConfig
from cbatch.errors import UsageError
from cbatch.output.record import RecordShape
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
