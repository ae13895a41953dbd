from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import OutputConfig
from cbatch.errors import RowError, UsageError
from cbatch.output.target import Target
from cbatch.rows.inputs import resolve
from cbatch.rows.reader import read


def file_at(path: Path, content: bytes = b'{"n": 0}\n{"n": 1}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names_of(*inputs: object, output: Path | None = None) -> list[str]:
    return [Path(source.name).name for source in resolve(list(map(str, inputs)), owned_by(output))]


def owned_by(output: Path | None) -> Callable[[Path], bool]:
    """Tells which files belong to the output of a job."""
    return Target(OutputConfig(output=str(output))).owns if output else lambda _: False


def test_a_folder_gives_its_files_in_order_without_hidden_and_foreign_ones(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a.ndjson",
        "sub/c.txt",
        "d.jsonl.gz",
        ".hidden.jsonl",
        ".cbatch/e.jsonl",
        "f.json",
        "g.md",
    ):
        file_at(tmp_path / name)
    assert names_of(tmp_path) == ["a.ndjson", "b.jsonl", "d.jsonl.gz", "c.txt"]


def test_what_a_folder_leaves_out_is_counted_and_said(tmp_path: Path) -> None:
    for name in (
        "a.jsonl",
        "B.JSONL",
        "C.Jsonl.GZ",
        "c.json",
        "d.jsonl.bz2",
        "e.csv.gz",
        "_SUCCESS",
        ".hidden",
        "sub/f.txt",
        "sub/x.bz2",
    ):
        file_at(tmp_path / name)
    file_at(tmp_path / ".git/config")
    file_at(tmp_path / "x.jsonl/inside.txt", b"")
    file_at(tmp_path / "out/part-00000.jsonl")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    said: list[str] = []
    found = resolve([str(tmp_path)], owned_by(tmp_path / "out"), said.append)
    assert [Path(source.name).name for source in found] == ["B.JSONL", "C.Jsonl.GZ", "a.jsonl", "f.txt", "inside.txt"]
    (line,) = said
    reasons = "2 .bz2, 2 hidden, 1 .json, 1 .csv.gz, 1 without an ending, 1 broken links, 1 linked folders, 1 no regular files, 1 of the output"
    start, empty = line.split("; ")
    assert start.startswith(f"{tmp_path}: left out: ")
    assert sorted(start.removeprefix(f"{tmp_path}: left out: ").split(", ")) == sorted(reasons.split(", "))
    assert empty == "1 of 5 files read are empty"


def test_what_a_pattern_leaves_out_is_counted_and_said(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.csv", "c/d.jsonl"):
        file_at(tmp_path / name)
    said: list[str] = []
    resolve([str(tmp_path / "*")], note=said.append)
    assert said == [f"{tmp_path}/*: left out: 1 .csv, 1 folders"]
    with pytest.raises(UsageError, match=r"holds no file that ends in .*; left out: 1 \.csv"):
        resolve([str(tmp_path / "b*")])


def test_nothing_is_said_where_nothing_is_left_out(tmp_path: Path) -> None:
    file_at(tmp_path / "a.jsonl")
    said: list[str] = []
    resolve([str(tmp_path)], note=said.append)
    assert said == []


def test_a_folder_that_can_not_be_looked_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_at(tmp_path / "a.jsonl")
    file_at(tmp_path / "closed/b.jsonl")
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UsageError, match=f"{tmp_path}: {tmp_path}/closed: can't be opened: Permission denied"):
        resolve([str(tmp_path)])


@pytest.mark.parametrize(
    "name",
    ["s3://bucket/x.jsonl", "gs://b/x", "hdfs://h/x.parquet", "https://h/x.jsonl", "S3://b/x", "file:///x.jsonl"],
)
def test_urls_are_refused_as_input_and_as_output(name: str) -> None:
    scheme = name.partition("//")[0] + "//"
    with pytest.raises(UsageError, match=f"{name}: cbatch reads local files and hf:// datasets, not {scheme}"):
        resolve([name])
    with pytest.raises(UsageError, match=f"-o {name}: cbatch writes local files, not {scheme}"):
        Target(OutputConfig(output=name))


def test_a_json_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"if it has one object a line, let its name end in \.jsonl"):
        resolve([str(file_at(tmp_path / "in.json"))])


def test_a_folder_below_a_hidden_one_may_be_named(tmp_path: Path) -> None:
    file_at(tmp_path / ".data/in.jsonl")
    assert names_of(tmp_path / ".data") == ["in.jsonl"]


def test_patterns(tmp_path: Path) -> None:
    for name in ("part-1.jsonl", "part-2.jsonl", "part-10.jsonl", "x/part-3.jsonl", ".part-4.jsonl"):
        file_at(tmp_path / name)
    assert names_of(tmp_path / "part-?.jsonl") == ["part-1.jsonl", "part-2.jsonl"]
    assert names_of(tmp_path / "**" / "part-*.jsonl") == [f"part-{n}.jsonl" for n in (1, 10, 2, 3)]
    assert names_of(tmp_path / "part-[!1]*.jsonl") == ["part-2.jsonl"]


def test_a_file_with_a_pattern_or_a_question_mark_in_its_name_is_thatfile_at(tmp_path: Path) -> None:
    for name in ("what?.jsonl", "[a].jsonl", "a.jsonl"):
        file_at(tmp_path / name)
    assert names_of(tmp_path / "what?.jsonl", tmp_path / "[a].jsonl") == ["what?.jsonl", "[a].jsonl"]


@pytest.mark.parametrize("again", ["in.jsonl", "sub/../in.jsonl", "*.jsonl", ".", "link.jsonl"])
def test_the_same_file_twice_is_refused(tmp_path: Path, again: str) -> None:
    path = file_at(tmp_path / "in.jsonl")
    (tmp_path / "sub").mkdir()
    if again == "link.jsonl":
        (tmp_path / again).symlink_to(path)
    with pytest.raises(UsageError, match="named twice"):
        resolve([str(path), str(tmp_path / again)])


def test_two_names_of_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").hardlink_to(file_at(tmp_path / "a.jsonl"))
    with pytest.raises(UsageError, match=r"b\.jsonl: named twice as an input, perhaps by another name"):
        resolve([str(tmp_path)])


def test_what_can_not_be_read_as_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    file_at(tmp_path / "table.jsonl", b"prompt,id\nhello,1\nbye,2\n")
    for name, problem in (
        ("gone.jsonl", "is a link to nowhere, which can't be found"),
        ("loop.jsonl", "is a link to loop.jsonl, which can't be found"),
        ("pipe.jsonl", "is no regular file"),
        ("table.jsonl", "is not JSONL"),
    ):
        with pytest.raises(UsageError, match=problem):
            resolve([str(tmp_path / name)])


def test_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path: Path) -> None:
    file_at(tmp_path / "x.jsonl/in.jsonl")
    assert names_of(tmp_path / "x.jsonl") == ["in.jsonl"]


def test_standard_input_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="named twice"):
        resolve(["-", "-"])


def test_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="closed"):
        resolve(["-"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no such file"),
        ("*.ndjson", "no file matches"),
        ("empty", "holds no file"),
        ("data.json", "unknown kind"),
        ("data.csv", "unknown kind"),
        ("data.parquet.gz", "unknown kind"),
        ("bad.parquet", "can't be read"),
        ("empty.parquet", "can't be read"),
        ("x" * 300, "can't be opened"),
    ],
)
def test_an_input_that_can_not_be_opened_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("data.json", "data.csv", "data.parquet.gz"):
        file_at(tmp_path / file)
    file_at(tmp_path / "bad.parquet", b"PAR1 this is not Parquet PAR1")
    file_at(tmp_path / "empty.parquet", b"")
    with pytest.raises(UsageError, match=message) as caught:
        resolve([str(tmp_path / name)])
    assert name[:50] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_or_a_pattern_leaves_out_the_output(tmp_path: Path) -> None:
    file_at(tmp_path / "in.jsonl")
    file_at(tmp_path / "out/part-00000.jsonl")
    file_at(tmp_path / "done.jsonl")
    assert names_of(tmp_path, output=tmp_path / "out") == ["done.jsonl", "in.jsonl"]
    assert names_of(tmp_path / "*.jsonl", output=tmp_path / "done.jsonl") == ["in.jsonl"]
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert names_of(tmp_path / "**" / "*.jsonl", output=tmp_path / "link") == ["done.jsonl", "in.jsonl"]


def test_a_named_input_that_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    single, shard = file_at(tmp_path / "in.jsonl"), file_at(tmp_path / "out/part-00000.jsonl")
    (tmp_path / "link.jsonl").symlink_to(single)
    for name, output in ((single, single), (single, tmp_path / "link.jsonl"), (shard, tmp_path / "out")):
        with pytest.raises(UsageError, match="overwritten"):
            resolve([str(name)], owned_by(output))
    assert names_of(single, output=tmp_path) == ["in.jsonl"]


# Datasets


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    import datasets

    data: dict[str, Any] = {"id": [1, 2], "prompt": ["a", "b"], "messages": [[{"role": "user", "content": "x"}], []]}
    datasets.Dataset.from_dict(data).save_to_disk(str(tmp_path / "saved"))
    (source,) = resolve([str(tmp_path / "saved")])
    assert source.count() == 2
    assert [row.data["prompt"] for row in source.rows()] == ["a", "b"]
    assert next(source.rows()).data == {name: values[0] for name, values in data.items()}


def test_a_saved_dataset_with_splits_needs_one_named(tmp_path: Path) -> None:
    import datasets

    folder = str(tmp_path / "saved")
    splits = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(folder)
    assert [row.data for row in read(resolve([folder + "?split=test"]))] == [{"prompt": "test"}]
    assert len(resolve([folder + "?split=test", folder + "?split=train"])) == 2
    for name in (folder, folder + "?split=dev", folder + "?other=1"):
        with pytest.raises(UsageError, match="train, test"):
            resolve([name])


def test_a_folder_that_only_looks_like_a_dataset_is_refused(tmp_path: Path) -> None:
    file_at(tmp_path / "state.json", b"{}")
    with pytest.raises(UsageError, match="dataset"):
        resolve([str(tmp_path)])


def test_a_saved_dataset_is_read_as_it_is_stored_whatever_its_format(tmp_path: Path) -> None:
    import datasets

    data: dict[str, Any] = {
        "prompt": ["a", "b"],
        "token_ids": [[1, 2], [3]],
        "image": [{"bytes": b"x", "path": None}] * 2,
    }
    saved = datasets.Dataset.from_dict(data).with_format("numpy", columns=["token_ids"])
    saved.save_to_disk(str(tmp_path / "saved"))
    found = [row.data for row in read(resolve([str(tmp_path / "saved")]))]
    assert [columns["prompt"] for columns in found] == data["prompt"]
    assert [columns["token_ids"] for columns in found] == data["token_ids"]
    assert found[0]["image"] == {"bytes": b"x", "path": None}


def test_a_split_of_a_dataset_without_splits_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match="no splits"):
        resolve([str(tmp_path / "saved") + "?split=train"])


class FakeHub:
    """Stands where datasets.load_dataset is: remembers what it was asked for and streams some rows."""

    features = None

    def __init__(self, rows: list[Any], error: Exception | None = None) -> None:
        self.rows, self.error = rows, error
        self.asked: tuple[Any, ...] = ()

    def __call__(self, path: str, name: str | None, *, split: str, revision: str | None, streaming: bool) -> Any:
        self.asked = (path, name, split, revision, streaming)
        if self.error:
            raise self.error
        return self

    def __iter__(self) -> Any:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf://org/data", ("org/data", None, "train", None, True)),
        ("hf://data", ("data", None, "train", None, True)),
        ("hf://org/data?split=test", ("org/data", None, "test", None, True)),
        ("hf://org/data?config=en&split=train[:9]&revision=v1", ("org/data", "en", "train[:9]", "v1", True)),
    ],
)
def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[Any, ...]) -> None:
    hub = FakeHub([{"prompt": "a"}, {"prompt": "b", "when": datetime(2024, 1, 1)}])
    monkeypatch.setattr("datasets.load_dataset", hub)
    (source,) = resolve([name])
    assert hub.asked == asked
    assert source.count() is None
    assert [row.data for row in source.rows()] == [{"prompt": "a"}, {"prompt": "b", "when": "2024-01-01T00:00:00"}]
    assert [(row.source, row.index) for row in source.rows()] == [(name, 0), (name, 1)]


def test_an_unknown_option_of_a_hub_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="'splt'"):
        resolve(["hf://org/data?splt=test"])


def test_a_hub_that_can_not_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", FakeHub([], ConnectionError("no route\nto host")))
    with pytest.raises(UsageError, match=r"hf://org/data: can't be opened: no route$"):
        resolve(["hf://org/data"])


def test_a_stream_that_breaks_off_ends_in_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", FakeHub([{"n": 0}, RuntimeError("peer closed connection")]))
    rows = list(read(resolve(["hf://org/data"])))
    assert [row.data for row in rows] == [{"n": 0}, {}]
    assert isinstance(rows[1].problem, RowError)
    assert "peer closed connection" in str(rows[1].problem)
