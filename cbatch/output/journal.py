"""The lock of an output, the settings of the job that writes there, and the figures of its last run.

A job can be killed at any moment and goes on when it is run again. What that takes lies beside the output, in a
state folder (`OUT/.cbatch`, or `.NAME.cbatch` beside a single file NAME):

    lock            held while a job runs (flock: the kernel lets go of it when the process dies)
    manifest.json   the settings that completions depend on
    part-N.jsonl    the records of the shard that is being written, appended as rows finish
    part-N.idx      for each record of shard N, its row and a checksum of that row's input
    summary.json    the figures of the last run

Where several ranks share the output, all but the manifest has `-I-of-N` in its name: `part-0-of-3-00000.jsonl`.
The records are the only truth: what is done is what stands in the shards. The index is a cache of that (believed only
if it was made for a file of just that size) and remembers the checksums. A shard under its final name is complete; it
gets there by a rename.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from cbatch.errors import Fatal, UsageError
from cbatch.output import durable
from cbatch.output.target import Target
from cbatch.rows.rank import WHOLE, Rank

Settings = dict[str, Any]  # what the completions of a job depend on


class Journal:
    """The lock, the manifest and the summary of an output. The lock is held until `close`."""

    def __init__(self, target: Target, rank: Rank = WHOLE) -> None:
        self.target, self.rank, self.state = target, rank, target.state
        self._manifest = self.state / "manifest.json"
        self._summary = self.state / f"summary{rank.suffix}.json"
        lock = self.state / f"lock{rank.suffix}"
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"{target}: can't write there: {error.strerror}") from None
        self.is_locked = self._try(self._lock, fcntl.LOCK_EX)
        for path in self.state.glob("lock*"):
            if not path.name.endswith(f"-of-{rank.num_ranks}") and path != lock:  # of a job that is divided otherwise
                with path.open("rb") as other:
                    self._try(other.fileno(), fcntl.LOCK_SH)
        for scratch in self.state.glob("*.tmp"):  # of a job that was killed
            if rank.suffix in scratch.name:
                scratch.unlink()

    def _try(self, lock: int, kind: int) -> bool:
        """Take a lock; False where the file system has none. UsageError if a live process holds it."""
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(f"{self.target}: another cbatch job is writing there now") from None
            return False
        return True

    @property
    def manifest(self) -> Settings | None:
        """The settings of the job that wrote to this output; None if there was none. Fatal if they can't be read."""
        try:
            settings = json.loads(self._manifest.read_text())
            if not isinstance(settings, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Fatal(f"{self._manifest}: can't be read: {error}") from None
        return settings

    def begin(self, settings: Settings) -> None:
        """Record the settings of a new job."""
        _write_json(self._manifest, settings)

    def propose(self, settings: Settings) -> Settings:
        """Record the settings of a new job, unless another rank has done so already; returns the recorded settings."""
        proposal = self.state / f"manifest{self.rank.suffix}.json"
        _write_json(proposal, settings)
        with suppress(FileExistsError):
            self._manifest.hardlink_to(proposal)  # unlike a rename, it replaces nothing
        proposal.unlink()
        return self.manifest or settings

    def check(self, settings: Settings, may_differ: Collection[str] = ()) -> None:
        """UsageError if settings, other than those named in `may_differ`, differ from the manifest's."""
        earlier = self.manifest or {}
        differences = [
            f"{name}: {_shown(earlier.get(name))} before, {_shown(settings.get(name))} now"
            for name in sorted({*earlier, *settings})
            if earlier.get(name) != settings.get(name) and name not in may_differ
        ]
        if differences:
            text = "; ".join(differences)
            mended = " An input whose bad lines were mended goes with --retry-failed." if "input sizes" in text else ""
            raise UsageError(
                f"{self.target} holds rows made under other settings. Use the same settings to go on, another output, or "
                f"--overwrite to start anew.{mended} What differs: {text}"
            )

    def forget(self) -> None:
        """Remove the manifest."""
        self._manifest.unlink(missing_ok=True)

    def write_summary(self, figures: dict[str, Any]) -> None:
        _write_json(self._summary, figures)

    def forget_summary(self) -> None:
        """Remove the figures of the run before: should this one die, they must not be taken for its own."""
        self._summary.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    durable.replace(path, [json.dumps(value, indent=2).encode() + b"\n"])


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
