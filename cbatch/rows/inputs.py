"""The names that a user gives as INPUT (files, folders, patterns, standard input, datasets) -> sources."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cbatch.errors import UsageError, first_line
from cbatch.rows.lines import COMPRESSED_SUFFIXES, open_lines
from cbatch.rows.reader import SUFFIXES, Source
from cbatch.rows.signature import HEAD, holds_no_object

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)")  # at the start of a name: what it names is not a local file

Told = Callable[[str], None]


def resolve(
    inputs: Sequence[str], is_output: Callable[[Path], bool] = lambda _: False, note: Told = lambda _: None
) -> list[Source]:
    """The sources that INPUT... names, in order; UsageError if one is missing, unreadable or named twice.

    `is_output` tells which files belong to the job's own output. A folder or a pattern leaves them out; naming one of
    them itself is a UsageError. `note` tells the user how many files a folder or a pattern leaves out, and why.
    """
    sources: list[Source] = []
    for name in inputs:
        try:
            sources += _sources(name, is_output, note)
        except OSError as error:
            place = f"{name:.200}" if error.filename in (None, name) else f"{name:.200}: {error.filename}"
            raise UsageError(f"{place}: can't be opened: {error.strerror or first_line(error)}") from None
    seen: set[object] = set()
    for source in sources:
        is_file = source.kind != "dataset" and source.name != "-"
        status = Path(source.name).stat() if is_file else None
        key = (status.st_dev, status.st_ino) if status else source.name
        if key in seen:
            raise UsageError(f"{source.name}: named twice as an input, perhaps by another name")
        seen.add(key)
    return sources


def _sources(name: str, is_output: Callable[[Path], bool], note: Told) -> list[Source]:
    """The sources that one INPUT names."""
    if name == "-":
        return [_standard_input()]
    if name.startswith("hf://"):
        return [_hub_dataset(name)]
    if scheme := URL.match(name):
        raise UsageError(f"{name}: cbatch reads local files and hf:// datasets, not {scheme[1]}; copy it here first")
    path, _, query = name.partition("?") if not Path(name).exists() else (name, "", "")
    if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
        return [_saved_dataset(name, path, query)]
    if Path(name).is_file():
        return [_named_file(name, is_output)]
    _check_is_folder_or_pattern(Path(name))
    return _files(name, is_output, note)


def _check_is_folder_or_pattern(path: Path) -> None:
    """UsageError if a path that is no regular file is no folder either, but something that can't be read."""
    if path.is_dir():
        return
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path}: is a link to {path.readlink()}, which can't be found")
    if path.exists():
        raise UsageError(f"{path}: is no regular file; if it can be read once, give it as standard input: - < {path}")


def _files(name: str, is_output: Callable[[Path], bool], note: Told) -> list[Source]:
    """The files of a folder or a pattern."""
    files, left_out = [], Counter[str]()
    for path in _files_below(Path(name)) if Path(name).is_dir() else _files_matching(name):
        if reason := _why_left_out(path, is_output):
            left_out[reason] += 1
        else:
            files.append(path)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    if not files:
        found = f"; left out: {reasons}" if reasons else ""
        raise UsageError(f"{name}: holds no file that ends in {', '.join(SUFFIXES)}{found}")
    if num_empty := sum(not path.stat().st_size for path in files):
        reasons += f"{'; ' if reasons else ''}{num_empty:,} of {len(files):,} files read are empty"
    if reasons:
        note(f"{name}: {'left out: ' if left_out else ''}{reasons}")
    return [_file(path) for path in files]


def _why_left_out(path: Path, is_output: Callable[[Path], bool]) -> str | None:
    """Why something that a folder or a pattern holds is not read; None if it is."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_dir():
        return "linked folders" if path.is_symlink() else "folders"
    if not path.is_file():
        return "broken links" if path.is_symlink() else "no regular files"
    if not _is_known(path):
        ending = "".join(path.suffixes[-2:] if path.suffix.lower() in COMPRESSED_SUFFIXES else path.suffixes[-1:])
        return ending or "without an ending"
    return "of the output" if is_output(path) else None


def _is_known(path: Path) -> bool:
    """Whether the name of a file ends as those of files that can be read do, in letters of either case."""
    return path.name.lower().endswith(SUFFIXES)


def _standard_input() -> Source:
    if sys.stdin is None:
        raise UsageError("-: standard input is closed")
    return Source("-", "jsonl")


def _named_file(name: str, is_output: Callable[[Path], bool]) -> Source:
    if is_output(Path(name)):
        raise UsageError(f"{name}: is an input and would be overwritten as the output; choose another output")
    return _file(Path(name))


def _files_below(folder: Path) -> list[Path]:
    """What a folder and its subfolders hold, in order; of hidden and of linked folders only themselves."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for place, folders, files in os.walk(folder, onerror=refuse):
        aside = [name for name in folders if name.startswith(".") or (Path(place) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in aside]
        found += [Path(place) / name for name in (*files, *aside)]
    return sorted(found)


def _files_matching(pattern: str) -> list[Path]:
    """What matches a pattern, in order."""
    found = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
    if not found:
        raise UsageError(f"{pattern}: no such file or folder, and no file matches it")
    return found


def _file(path: Path) -> Source:
    """A file that can be opened and, if it is Parquet, has a readable footer."""
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise UsageError(f"{str(path)!r}: the name of this file is not valid UTF-8; rename it")
    if not _is_known(path):
        hint = "; if it has one object a line, let its name end in .jsonl" if path.suffix.lower() == ".json" else ""
        raise UsageError(f"{path}: unknown kind of file; cbatch reads {', '.join(SUFFIXES)}{hint}")
    kind = _kind(path)
    try:
        with open_lines(str(path), kind) as content:
            if kind == "jsonl" and holds_no_object(content.peek(HEAD)[:HEAD]):
                raise UsageError(
                    f"{path}: is not JSONL: its first lines are no objects; cbatch reads one object a line"
                )
        if kind == "parquet":
            _check_columns(path)
    except UsageError:
        raise
    except Exception as error:  # a damaged footer makes Arrow raise what it likes
        raise UsageError(f"{path}: can't be read: {first_line(error)}") from None
    return Source(str(path), kind, path.stat().st_size)


def _kind(path: Path) -> str:
    """The kind of source that a file is, by its name."""
    name = path.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return "parquet" if name.endswith(".parquet") else "text" if name.endswith(".txt") else "jsonl"


def _check_columns(path: Path) -> None:
    """UsageError if a Parquet file has two columns of one name."""
    import pyarrow.parquet as pq

    names = pq.ParquetFile(path).schema_arrow.names
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: has two columns of the name {max(names, key=names.count)!r}; rename one")


def _hub_dataset(name: str) -> Source:
    """A dataset on the Hugging Face Hub, hf://org/name?split=train&config=x, streamed."""
    import datasets

    url = urlsplit(name)
    options = {key: values[-1] for key, values in parse_qs(url.query).items()}
    if unknown := options.keys() - {"split", "config", "revision"}:
        raise UsageError(f"{name}: unknown option {min(unknown)!r}; known are split, config, revision")
    try:
        dataset = datasets.load_dataset(
            url.netloc + url.path,
            options.get("config"),
            split=options.get("split", "train"),
            revision=options.get("revision"),
            streaming=True,
        )
    except Exception as error:
        raise UsageError(f"{name}: can't be opened: {first_line(error)}") from None
    if dataset.features:
        dataset = dataset.decode(False)  # pictures and sounds stay as they are stored
    return Source(name, "dataset", None, dataset)


def _saved_dataset(name: str, path: str, query: str) -> Source:
    """A dataset in a folder that `save_to_disk` wrote; FOLDER?split=train names one of several splits."""
    import datasets

    split = parse_qs(query).get("split", [None])[-1]
    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise UsageError(f"{name}: can't be opened as a dataset: {first_line(error)}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UsageError(f"{name}: say which split, as {path}?split=NAME; it has {', '.join(dataset)}")
        dataset = dataset[split]
    elif split is not None:
        raise UsageError(f"{name}: this dataset has no splits; name it as {path}")
    return Source(name, "dataset", dataset.num_rows, dataset)
