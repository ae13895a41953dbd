"""What INPUT... names: files, folders, patterns, standard input and datasets -> sources."""

from __future__ import annotations

import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cbatch.errors import UsageError
from cbatch.rows.reader import SUFFIXES, Source, arrow_error, one_line


def resolve(inputs: Sequence[str], exclude: Path | None = None) -> list[Source]:
    """The sources that INPUT... names, in order; UsageError if one is missing, unreadable or named twice.

    A folder or a pattern leaves out the files of `exclude`, the job's own output; a file that is named itself must not
    be one of them.
    """
    sources: list[Source] = []
    for name in inputs:
        try:
            sources += _resolve_one(name, exclude)
        except OSError as error:
            raise UsageError(f"{name:.200}: can't be opened: {error.strerror or one_line(error)}") from None
    seen: set[str] = set()
    for source in sources:
        key = source.name if source.kind == "dataset" or source.name == "-" else str(Path(source.name).resolve())
        if key in seen:
            raise UsageError(f"{source.name}: named twice as an input")
        seen.add(key)
    return sources


def _resolve_one(name: str, exclude: Path | None) -> list[Source]:
    if name == "-":
        if sys.stdin is None:
            raise UsageError("-: standard input is closed")
        return [Source("-", "jsonl")]
    if name.startswith("hf://"):
        return [_hub_dataset(name)]
    path, _, query = name.partition("?") if not Path(name).exists() else (name, "", "")
    if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
        return [_disk_dataset(name, path, query)]
    if Path(name).is_file():
        if exclude and _is_shard(Path(name), exclude):
            raise UsageError(f"{name}: is an input and would be overwritten as the output; choose another output")
        return [_file(Path(name))]
    if Path(name).is_dir():
        found = [
            p
            for p in sorted(Path(name).rglob("*"))
            if not any(x.startswith(".") for x in p.parts[len(Path(name).parts) :])
        ]
    else:
        found = [Path(p) for p in sorted(glob.glob(name, recursive=True))]
        if not found:
            raise UsageError(f"{name}: no such file or folder, and no file matches it")
    files = [p for p in found if p.is_file() and p.name.endswith(SUFFIXES) and not _inside(p, exclude)]
    if not files:
        raise UsageError(f"{name}: holds no file that ends in {', '.join(SUFFIXES)}")
    return [_file(path) for path in files]


def _inside(path: Path, folder: Path | None) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder.resolve())


def _is_shard(path: Path, output: Path) -> bool:
    path, output = path.resolve(), output.resolve()
    return path == output or (path.parent == output and path.name.startswith("part-"))


def _file(path: Path) -> Source:
    """A file that can be opened and, if it is Parquet, has a readable footer."""
    stem = path.name.removesuffix(".gz").removesuffix(".zst")
    kind = "parquet" if stem.endswith(".parquet") else "text" if stem.endswith(".txt") else "jsonl"
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise UsageError(f"{str(path)!r}: the name of this file is not valid UTF-8; rename it")
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path}: unknown kind of file; cbatch reads {', '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:
            file.read(1)
        if kind == "parquet":
            import pyarrow.parquet as pq

            names = pq.ParquetFile(path).schema_arrow.names
            if len(set(names)) < len(names):
                raise UsageError(f"{path}: has two columns of the name {max(names, key=names.count)!r}; rename one")
    except (OSError, arrow_error()) as error:
        raise UsageError(f"{path}: can't be read: {one_line(error)}") from None
    return Source(str(path), kind, path.stat().st_size)


def _hub_dataset(name: str) -> Source:
    """hf://org/name?split=train&config=x, streamed."""
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
        raise UsageError(f"{name}: can't be opened: {one_line(error)}") from None
    if dataset.features:
        dataset = dataset.decode(False)  # pictures and sounds stay as they are stored
    return Source(name, "dataset", None, dataset)


def _disk_dataset(name: str, path: str, query: str) -> Source:
    """A folder that `save_to_disk` wrote; FOLDER?split=train where it holds several splits."""
    import datasets

    split = parse_qs(query).get("split", [None])[-1]
    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise UsageError(f"{name}: can't be opened as a dataset: {one_line(error)}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UsageError(f"{name}: say which split, as {path}?split=NAME; it has {', '.join(dataset)}")
        dataset = dataset[split]
    elif split is not None:
        raise UsageError(f"{name}: this dataset has no splits; name it as {path}")
    return Source(name, "dataset", dataset.num_rows, dataset)
