"""Where completions go: what `-o` names, in which format, and which files are part of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.config import OutputConfig
from cbatch.errors import UsageError
from cbatch.output.record import RecordShape
from cbatch.output.shard import Shard, find_shards
from cbatch.rows.inputs import URL
from cbatch.rows.rank import WHOLE
from cbatch.rows.reader import Source

if TYPE_CHECKING:
    import pyarrow as pa

_OTHER_SUFFIXES = (".csv", ".tsv", ".json", ".ndjson", ".txt", ".gz", ".zst", ".arrow", ".feather")


class Target:
    """Standard output, a folder or a single file, and the format of the records there."""

    def __init__(self, output: OutputConfig, model: str = "", on_request: tuple[str, ...] = ()) -> None:
        """`model`: its name, for records that say it. `on_request`: columns beside those that are always added."""
        self.output, self._model, self._on_request = output, model, on_request
        self.path, self.is_stream = Path(output.output), output.output == "-"
        by_suffix = next((kind for kind in ("jsonl", "parquet") if self.path.name.endswith(f".{kind}")), None)
        self.format = output.format or by_suffix or "jsonl"
        try:
            self.single_file = by_suffix is not None and not self.path.is_dir()
            self._check(by_suffix)
        except OSError as error:  # a name that is too long, a folder that can't be looked into
            raise UsageError(f"-o {output.output:.200}: {error.strerror or error}") from None

    def _check(self, by_suffix: str | None) -> None:
        output, given = self.output, self.output.output
        if scheme := URL.match(given):
            raise UsageError(f"-o {given}: cbatch writes local files, not {scheme[1]}; copy them there afterwards")
        if not given:
            raise UsageError("say where the completions go: -o FOLDER, -o FILE.jsonl, -o FILE.parquet or -o -")
        if by_suffix and output.format and by_suffix != output.format:
            raise UsageError(f"-o {given} and --format {output.format} contradict each other")
        if self.is_stream and (self.format != "jsonl" or output.ordered or output.retry_failed or output.overwrite):
            raise UsageError(
                "standard output takes JSONL as rows finish: no --format parquet, --ordered, --retry-failed, --overwrite"
            )
        if self.path.name.endswith(_OTHER_SUFFIXES) and not self.path.is_dir():
            raise UsageError(f"-o {given}: cbatch writes .jsonl and .parquet, or a folder of these")
        if (self.path / "config.json").is_file() and not self.state.exists():
            raise UsageError(f"-o {given}: is the folder of a model; name another folder")
        if not self.is_stream and not self.single_file and self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: is a file; name a folder, or a file that ends in .jsonl or .parquet")

    def __str__(self) -> str:
        return "standard output" if self.is_stream else str(self.path)

    @property
    def state(self) -> Path:
        """The folder of what a job needs to go on: `OUT/.cbatch`, or `.NAME.cbatch` beside a file."""
        return self.path.with_name(f".{self.path.name}.cbatch") if self.single_file else self.path / ".cbatch"

    def final_files(self) -> dict[Shard, Path]:
        """The files that are published, of this job or of one that wrote here before."""
        if not self.single_file:
            return find_shards(self.path)
        return {Shard(WHOLE, 0): self.path} if self.path.exists() else {}

    def owns(self, path: Path) -> bool:
        """Whether a file is part of this output, under whatever name: a job may replace or remove it."""
        if self.is_stream:
            return False
        found = path.stat()
        return (found.st_dev, found.st_ino) in self._final_inodes or path.resolve().is_relative_to(self.state.resolve())

    @cached_property
    def _final_inodes(self) -> set[tuple[int, int]]:
        """Device and inode of each published file."""
        found = [path.stat() for path in self.final_files().values()]
        return {(status.st_dev, status.st_ino) for status in found}

    @property
    def shape(self) -> RecordShape:
        return RecordShape(self.output.prefix, self.format == "jsonl", self._model, self._on_request)

    @property
    def layout(self) -> dict[str, Any]:
        """The settings that say how the records lie on disk, as the manifest keeps them."""
        return {"format": self.format, "ordered": self.output.ordered, "prefix": self.output.prefix}

    def schema(self, sources: Sequence[Source]) -> pa.Schema | None:
        """The columns of Parquet output, None for JSONL."""
        if self.format == "jsonl":
            return None
        from cbatch.output import parquet

        return parquet.schema_of(sources, self.shape)
