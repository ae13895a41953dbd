from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
import pytest

from cbatch import __version__, cli
from cbatch.config import (
    DisplayConfig,
    EngineConfig,
    InputConfig,
    OutputConfig,
    PromptConfig,
    RunConfig,
    SamplingParams,
)
from tests.conftest import Cbatch

Call = Callable[..., "tuple[int, str, str]"]
CONTEXT = 512  # of the tiny model


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line in this process; exit code, standard output and standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cbatch", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture
def parsed(call: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """What the arguments of `cbatch run` come to."""

    def parse(*args: object) -> RunConfig:
        seen: list[RunConfig] = []
        monkeypatch.setattr("cbatch.run.run", lambda config: seen.append(config) or 0)
        code, _, err = call("run", *args)
        assert code == 0, err
        return seen[0]

    return parse


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def shard(folder: Path) -> list[dict[str, Any]]:
    return records(folder / "part-00000.jsonl")


# Flags


def test_every_setting_has_a_flag_with_help_and_the_documented_default(
    call: Call, parsed: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call("run", "--help")
    assert code == 0
    for kind in (PromptConfig, SamplingParams, EngineConfig, OutputConfig, DisplayConfig):
        for spec in fields(kind):
            flag = (spec.metadata.get("flags") or "--" + spec.name.replace("_", "-")).split("/")[0]
            assert flag in out
            assert len(spec.metadata["help"]) > 10
    config = parsed("in.jsonl")
    assert config.input == InputConfig(("in.jsonl",))
    assert (config.prompt, config.sampling, config.engine) == (PromptConfig(), SamplingParams(), EngineConfig())
    assert (config.output, config.display) == (OutputConfig(), DisplayConfig())


def test_flags_arrive_where_they_belong(parsed: Callable[..., RunConfig]) -> None:
    config = parsed(
        *("a.jsonl", "b.jsonl", "-m", "model", "-o", "out", "--raw", "--stop", "x", "--stop", "y z"),
        *("--stop-token-id", 7, "--top-p", 0.5, "--temperature", 1, "--seed", -3, "--no-enable-prefix-caching"),
        *("--limit", 0, "--skip", 2, "--truncate", "left", "--ignore-eos", "--progress", "none"),
    )
    assert config.input == InputConfig(("a.jsonl", "b.jsonl"), skip=2, limit=0)
    assert config.prompt == PromptConfig(chat=False, truncate="left")
    assert config.sampling == SamplingParams(
        stop=("x", "y z"), stop_token_ids=(7,), top_p=0.5, temperature=1.0, seed=-3, ignore_eos=True
    )
    assert config.engine == EngineConfig(model="model", enable_prefix_caching=False)
    assert (config.output.output, config.display.progress) == ("out", "none")


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"cbatch {__version__}\n", "")
    for args in (("--help",), ("-h",), ("run", "-h"), ("check", "--help")):
        assert call(*args)[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-tokens", 0), "--max-tokens must be at least 1"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--max-tokens", "1.5"), "--max-tokens"),
        (("--temperature", -1), "--temperature must be at least 0"),
        (("--temperature", "nan"), "--temperature must be finite"),
        (("--top-p", 1.5), "--top-p must be between 0 and 1"),
        (("--top-k", -2), "--top-k must be at least -1"),
        (("--repetition-penalty", 0), "--repetition-penalty must be at least 1e-06"),
        (("--stop-token-id", -1), "--stop-token-id must be at least 0"),
        (("--stop", ""), "--stop must not hold an empty text"),
        (("--skip", -1), "--skip must be at least 0"),
        (("--max-model-len", 1), "--max-model-len must be at least 2"),
        (("--shard-rows", 0), "--shard-rows must be at least 1"),
        (("--kv-cache-memory", "inf"), "--kv-cache-memory must be finite, not inf"),
        (("--gpu-memory-utilization", 1.5), "--gpu-memory-utilization must be between 0 and 1"),
        (("--kv-cache-memory", "nan"), "--kv-cache-memory"),
        (("--dtype", "int8"), "--dtype must be one of"),
        (("--scheduling", "Static"), "--scheduling must be one of continuous, static, dynamic"),
        (("--truncate", "middle"), "--truncate must be one of left, right"),
        (("--raw", "--system", "s"), "--raw"),
        (("--template", "@/no/such/file"), "/no/such/file"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--config", "/no/such.toml"), "/no/such.toml"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_loaded_or_written(
    call: Call, tmp_path: Path, tiny_model: Path, args: tuple[object, ...], message: str
) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "x"})
    code, out, err = call("run", source, "-m", tiny_model, "-o", tmp_path / "out", *args)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not list((tmp_path / "out").glob("**/manifest.json"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "-o FOLDER"),
        (("-o", "out.jsonl", "--format", "parquet"), "contradict"),
        (("-o", "-", "--format", "parquet"), "standard output"),
        (("-o", "-", "--ordered"), "standard output"),
        (("-o", "-", "--overwrite"), "standard output"),
        (("-o", "plain"), "is a file"),
        (("-o", "plain/out"), "can't write"),
        (("-o", "in.jsonl"), "overwritten"),
        (("-o", "in.jsonl", "--overwrite"), "overwritten"),
        (("-o", "x" * 300), "File name too long"),
    ],
)
def test_an_output_that_can_not_be_is_refused(
    call: Call, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "x"})
    before = source.read_bytes()
    (tmp_path / "plain").write_text("mine")
    code, out, err = call("run", "in.jsonl", "-m", tiny_model, *args)
    assert (code, out) == (2, "")
    assert message in err
    assert source.read_bytes() == before
    assert (tmp_path / "plain").read_text() == "mine"


@pytest.mark.parametrize("command", ["run", "check", "bench"])
def test_the_name_of_a_model_that_no_file_can_have_is_one_line(call: Call, tmp_path: Path, command: str) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "x"})
    args = ("--rows", 1) if command == "bench" else (source, "-o", tmp_path / "out")
    code, _, err = call(command, *args, "-m", "x" * 300)
    assert code == 1
    assert err.splitlines()[-1].startswith(f"cbatch: {'x' * 300}: File name too long")


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        ([{"text": "x", "id": 1}], (), "Columns: text, id"),
        ([{"text": "x"}], ("--prompt-column", "question"), "'question'"),
        ([{"prompt": "x", "row": 1}], (), "--prefix"),
        ([{"prompt": "x", "a_row": 1}], ("--prefix", "a_"), "'a_row'"),
    ],
)
def test_an_input_without_prompts_or_with_taken_names_is_refused_before_the_model_is_looked_for(
    call: Call, tmp_path: Path, rows: list[Any], args: tuple[str, ...], message: str
) -> None:
    source = jsonl(tmp_path / "in.jsonl", *rows)
    for command in ("run", "check"):
        code, _, err = call(command, source, "-m", "missing-model", "-o", tmp_path / "out", *args)
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    "args", [("run", "--help"), ("run", "missing.jsonl", "-o", "out"), ("run", "x", "--top-p", "9")]
)
def test_help_and_usage_errors_import_no_torch(tmp_path: Path, args: tuple[str, ...]) -> None:
    code = "import sys\ntry:\n    from cbatch.cli import main; main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (0 if "--help" in args else 2)
    assert "Assertion" not in done.stderr


# --config


def test_a_file_of_settings_gives_defaults_that_flags_go_before(
    parsed: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'inputs = ["a.jsonl", "b.jsonl"]\nmodel = "m"\noutput = "out"\nmax-tokens = 64\ntop_p = 0.5\ntemperature = 1\n'
        'stop = ["x", "y"]\nstop-token-id = [7]\nchat = false\nenable-prefix-caching = false\n'
        "ignore-eos = true\n"
    )
    config = parsed("--config", file)
    assert config.input.inputs == ("a.jsonl", "b.jsonl")
    assert (config.engine.model, config.output.output, config.prompt.chat) == ("m", "out", False)
    assert not config.engine.enable_prefix_caching
    assert config.sampling == SamplingParams(
        max_tokens=64, top_p=0.5, temperature=1.0, stop=("x", "y"), stop_token_ids=(7,), ignore_eos=True
    )
    over = parsed("c.jsonl", "--max-tokens", 3, "--stop", "z", "--chat", "--config", file, "-m", "n")
    assert over.input.inputs == ("c.jsonl",)
    assert (over.sampling.max_tokens, over.sampling.stop, over.sampling.top_p) == (3, ("z",), 0.5)
    assert (over.prompt.chat, over.engine.model) == (True, "n")


@pytest.mark.parametrize("name", ["stop-token-id", "stop_token_id", "stop-token-ids", "stop_token_ids"])
def test_a_file_may_use_all_names_of_a_setting(parsed: Callable[..., RunConfig], tmp_path: Path, name: str) -> None:
    (tmp_path / "job.toml").write_text(f'inputs = ["a.jsonl"]\n{name} = [7, 8]\n')
    assert parsed("--config", tmp_path / "job.toml").sampling.stop_token_ids == (7, 8)


def test_a_file_may_begin_with_a_byte_order_mark_and_give_one_text_for_a_list(
    parsed: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_bytes(b'\xef\xbb\xbfinputs = "a.jsonl"\nstop = "ab"\nmax-failures = 7\n')
    config = parsed("--config", tmp_path / "job.toml")
    assert (config.input.inputs, config.sampling.stop) == (("a.jsonl",), ("ab",))
    assert config.task.max_failures == "7"


def test_what_was_given_is_known_also_where_it_equals_the_default(
    parsed: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text("top-k = 0\nenable-prefix-caching = true\nstop-token-id = []\n")
    flags = ("--temperature", 0, "--repetition-penalty", 1.0, "--max-tokens", 256)
    config = parsed("a.jsonl", *flags, "--config", tmp_path / "job.toml")
    assert config.given == {
        *("inputs", "temperature", "repetition_penalty", "max_tokens"),
        *("top_k", "enable_prefix_caching", "stop_token_ids"),
    }
    assert parsed("a.jsonl").given == {"inputs"}


def test_the_home_folder_may_be_a_tilde_in_a_file_and_in_its_name(
    parsed: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.toml").write_text('inputs = ["~/a.jsonl"]\noutput = "~/out"\n')
    config = parsed("--config=~/job.toml")
    assert config.input.inputs == (f"{tmp_path}/a.jsonl",)
    assert config.output.output == f"{tmp_path}/out"


def test_one_file_of_settings_serves_all_commands(call: Call, tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'inputs = ["{tmp_path}/in.jsonl"]\nmodel = "{tiny_model}"\nprogress = "none"\noutput = "-"\n')
    jsonl(tmp_path / "in.jsonl", {"prompt": "x"})
    code, out, err = call("check", "--config", file)
    assert (code, err) == (0, "")
    assert "1 good" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_token = 1", "unknown setting 'max_token'"),
        ("[sampling]\nmax-tokens = 1", "unknown setting 'sampling'"),
        ('config = "other.toml"', "unknown setting 'config'"),
        ("max-tokens = ", "job.toml"),
        ("max-tokens = true", "job.toml: max_tokens must be a whole number, not True"),
        ("max-tokens = 1.5", "job.toml: max_tokens must be a whole number"),
        ("max-tokens = [1]", "job.toml: max_tokens must be a whole number"),
        ("max-tokens = 2026-12-01", "job.toml: max_tokens must be a whole number"),
        ("max-tokens = {a = 1}", "job.toml: max_tokens must be a whole number"),
        ('max-tokens = "64"', "job.toml: max_tokens must be a whole number"),
        ("temperature = false", "job.toml: temperature must be a number"),
        ("data-parallel-size = 0", "job.toml: data_parallel_size must be a number, at least 1"),
        ("data-parallel-size = true", "job.toml: data_parallel_size must be a text"),
        ("max-failures = 1.5", "job.toml: max_failures must be a text"),
        ("ignore-eos = 1", "job.toml: ignore_eos must be true or false"),
        ("kv-cache-memory = true", "job.toml: kv_cache_memory must be a number"),
        ("inputs = 7", "job.toml: inputs must be a text"),
        ("stop = [true]", "job.toml: stop must be a text"),
        ('stop = [""]', "job.toml: stop must not hold an empty text"),
        ('compare = "nothing"', "job.toml: --compare: 'nothing' is none of"),
        ("max-tokens = 0", "max_tokens must be at least 1"),
        ("stop-token-ids = [-1]", "stop_token_ids must be at least 0"),
        ("stop_token_ids = 1\nstop-token-id = 2", "stop_token_ids is given twice"),
        ("max-tokens = 1\nmax_tokens = 2", "max_tokens is given twice, the second time as max_tokens"),
        ("max-num-seqs = 1\nmax-num_seqs = 1", "max_num_seqs is given twice, the second time as max-num_seqs"),
        ("max-tokens = 1\nmax-tokens = 2", "job.toml"),
        ('dtype = "int8"', "dtype must be one of"),
        ("temperature = nan", "temperature must be finite"),
        ('chat = "perhaps"', "chat must be true or false"),
        ("x = " + "[" * 9000, "job.toml"),
        ("x = " + "9" * 9000, "job.toml"),
        ("caf\udce9 = 1", "job.toml"),
    ],
)
def test_a_wrong_file_of_settings_is_refused(call: Call, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    code, _, err = call("run", "in.jsonl", "--config", file)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


# Runs

MIXED: list[Any] = [
    {"id": "a", "prompt": "one"},
    {"id": "a", "prompt": "two", "params": {"max_tokens": 2}},
    {"id": 1, "prompt": 5},
    "{broken",
    {"id": "1", "prompt": "x" * 2000},
    {"id": None, "messages": [{"role": "user", "content": None}]},
    {"prompt": "zero", "params": {"max_tokens": 0}},
    {"prompt": "float", "params": {"max_tokens": 1e9}},
    {"prompt": "true", "params": {"max_tokens": True}},
    {"prompt": "text", "params": {"max_tokens": "20"}},
    {"id": 1.5, "token_ids": []},
    {"prompt": None},
    r'{"id": "\ud83d", "prompt": "half \ud83d whole \ud83d\ude00", "meta": {"k": ["\ude00"]}}',
    '{"id": "\u2028", "prompt": "a\u2028b\u2029c\x85d", "meta": {"k": ["\u2028"]}}',
    {"id": "big", "prompt": "y", "params": {"max_tokens": 10**12}, "meta": {"k": []}},
    {"id": "last", "prompt": "z", "row": "taken"},
    {"id": "null", "prompt": "z", "params": {"max_tokens": None, "temperature": None}},
]
KINDS = [None, None, "invalid_prompt", "invalid_json", "prompt_too_long", "invalid_messages", *["invalid_params"] * 4]
KINDS += ["empty_prompt", "invalid_prompt", None, None, None, "column_collision", None]


def test_a_bad_row_costs_no_other_and_every_row_is_accounted_for(call: Call, tmp_path: Path, tiny_model: Path) -> None:
    good = [{"id": number, "prompt": "fill"} for number in range(20)]  # the first rows are looked at beforehand
    source, out = jsonl(tmp_path / "in.jsonl", *good, *MIXED), tmp_path / "out"
    code, stdout, err = call("run", source, "-m", tiny_model, "-o", out, "--max-tokens", 3)
    assert (code, stdout) == (3, "")
    found = sorted(shard(out), key=lambda record: record["row"])
    assert [record["row"] for record in found] == list(range(20 + len(MIXED)))
    assert [record["error_kind"] for record in found[20:]] == KINDS
    for number, record in enumerate(found):
        failed = record["error"] is not None
        assert (record["completion"] is None) == failed == (record["finish_reason"] == "error")
        assert not failed or f"in.jsonl:{number + 1}: " in record["error"]
        assert failed or record["completion_tokens"] > 0
    assert [record["id"] for record in found[20:23]] == ["a", "a", 1]
    assert found[21]["completion_tokens"] == 2
    half, separators, big = found[32:35]
    assert (half["id"], half["meta"], half["prompt"]) == ("\ufffd", {"k": ["\ufffd"]}, "half \ufffd whole \U0001f600")
    assert (separators["id"], separators["prompt"]) == ("\u2028", "a\u2028b\u2029c\x85d")
    assert big["prompt_tokens"] + big["completion_tokens"] <= CONTEXT
    summary = json.loads((out / ".cbatch" / "summary.json").read_text())
    assert (summary["rows"]["ok"], summary["rows"]["failed"]) == (26, 11)
    assert "26 completed, 11 failed" in err

    lines = (out / "part-00000.jsonl").read_bytes()
    code, _, err = call("run", source, "-m", tiny_model, "-o", out, "--max-tokens", 3)
    assert code == 3
    assert "0 completed, 0 failed, 37 done earlier (11 of them failed)" in err
    assert (out / "part-00000.jsonl").read_bytes() == lines


def test_other_libraries_read_the_output(call: Call, tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": number, "prompt": f"a\u2028b {number}", "tags": ["x"]} for number in range(30)]
    source, out = jsonl(tmp_path / "in.jsonl", *rows, {"id": 30, "prompt": ""}), tmp_path / "out"
    assert call("run", source, "-m", tiny_model, "-o", out, "--max-tokens", 4, "--raw", "--shard-rows", 10)[0] == 3
    parts = sorted(out.glob("part-*.jsonl"))
    assert len(parts) == 4
    lines = [line for part in parts for line in part.read_bytes().splitlines()]
    mine = sorted((json.loads(line) for line in lines), key=lambda record: record["row"])
    assert [record["id"] for record in mine] == list(range(31))
    assert sorted(map(orjson.loads, lines), key=lambda record: record["row"]) == mine
    by_arrow = [record for part in parts for record in pj.read_json(part).to_pylist()]
    assert [record["completion"] for record in sorted(by_arrow, key=lambda record: record["row"])] == [
        record["completion"] for record in mine
    ]
    by_pandas = pd.concat([pd.read_json(part, lines=True) for part in parts]).sort_values("row")
    assert by_pandas["prompt"].tolist() == [record["prompt"] for record in mine]
    loaded = datasets.load_dataset(
        "json", data_files=[str(part) for part in parts], split="train", cache_dir=str(tmp_path / "cache")
    )
    assert sorted(loaded["row"]) == list(range(31))


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet"])
@pytest.mark.parametrize("target", ["out", "out.jsonl", "out.parquet"])
def test_an_input_without_rows_gives_an_empty_output(
    call: Call, tmp_path: Path, tiny_model: Path, suffix: str, target: str
) -> None:
    source, out = tmp_path / f"in{suffix}", tmp_path / target
    if suffix == ".parquet":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), source)
    else:
        source.write_text("" if suffix == ".txt" else "\n  \n\n")
    code, _, err = call("run", source, "-m", tiny_model, "-o", out)
    assert code == 0
    assert "0 completed, 0 failed" in err
    if target == "out.parquet":
        assert "completion" in pq.read_schema(out).names
        assert pq.read_table(out).num_rows == 0
    else:
        assert (out if out.is_file() else out / "part-00000.jsonl").read_bytes() == b""


def test_rows_that_all_fail_need_no_engine(
    call: Call, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.engine.start.start_engine", None)
    source = jsonl(tmp_path / "in.jsonl", {"prompt": ""}, {"token_ids": []}, "[]")
    assert call("run", source, "-m", tiny_model, "-o", tmp_path / "out", "--raw")[0] == 3
    assert [record["error_kind"] for record in shard(tmp_path / "out")] == [
        "empty_prompt",
        "empty_prompt",
        "not_an_object",
    ]


def test_standard_input_to_standard_output(cbatch: Cbatch, tiny_model: Path) -> None:
    rows = '{"id": 1, "prompt": "a\u2028b"}\r\n\n{"id": 2, "prompt": ""}\n{broken\n{"id": 3, "prompt": "c"}'
    done = cbatch("run", "-", "-m", tiny_model, "-o", "-", "--max-tokens", 3, "--raw", stdin=rows)
    assert done.returncode == 3, done.stderr
    found = sorted(map(json.loads, done.stdout.splitlines()), key=lambda record: record["row"])
    assert [record["error_kind"] for record in found] == [None, "empty_prompt", "invalid_json", None]
    assert {record["source"] for record in found} == {"-"}
    assert found[0]["prompt"] == "a\u2028b"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_one_line_and_no_traceback(tmp_path: Path, tiny_model: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "x"})
    command = [sys.executable, "-m", "cbatch", "run", source, "-m", tiny_model, "-o", "-", "--max-tokens", "2"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(list(map(str, command)), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_holds_its_own_output(call: Call, tmp_path: Path, tiny_model: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    jsonl(tmp_path / "sub" / "b.jsonl", {"prompt": "y"})
    for _ in range(2):  # the second time there is an output
        code, _, err = call("run", tmp_path, "-m", tiny_model, "-o", tmp_path / "out", "--max-tokens", 2)
        assert code == 0, err
        assert sorted(Path(record["source"]).name for record in shard(tmp_path / "out")) == ["a.jsonl", "b.jsonl"]


def test_a_template_with_an_error_leaves_nothing_behind(call: Call, tmp_path: Path, tiny_model: Path) -> None:
    source, out = jsonl(tmp_path / "in.jsonl", {"text": "x"}), tmp_path / "out"
    for args in (("--template", "{% if"), ("--template", "{{ text }}", "--max-model-len", 10**6)):
        assert call("run", source, "-m", tiny_model, "-o", out, *args)[0] == 2
    code, _, err = call("run", source, "-m", tiny_model, "-o", out, "--template", "{{ text }}", "--max-tokens", 2)
    assert code == 0, err


@pytest.mark.parametrize("ordered", [(), ("--ordered",)])
def test_parquet_shards_share_one_schema_and_lose_nothing(
    call: Call, tmp_path: Path, tiny_model: Path, ordered: tuple[str, ...]
) -> None:
    rows: list[Any] = [{"id": number, "prompt": "x", "meta": {"lang": None}, "tags": []} for number in range(45)]
    rows[25] = {"id": 25, "prompt": "x", "late": "here", "score": 1, "meta": {"lang": "en"}, "tags": ["a"]}
    rows[30] = {"id": 30, "prompt": ""}
    rows[40] |= {"score": 1.5}
    source, out = jsonl(tmp_path / "in.jsonl", *rows), tmp_path / "out"
    args = ("-m", tiny_model, "-o", out, "--format", "parquet", "--shard-rows", 10, "--max-tokens", 2, "--raw")
    assert call("run", source, *args, *ordered)[0] == 3
    assert len(list(out.glob("part-*.parquet"))) == 5
    assert len({str(pq.read_schema(part)) for part in out.glob("part-*.parquet")}) == 1
    found = pq.ParquetDataset(out).read().to_pylist()
    assert [record["row"] for record in found] == list(range(45)) or not ordered
    found.sort(key=lambda record: record["row"])
    assert [record["id"] for record in found] == list(range(45))
    assert [record["error_kind"] for record in found] == [None] * 30 + ["empty_prompt"] + [None] * 14
    assert [record["late"] for record in found if record["late"]] == ["here"]
    assert (found[0]["meta"], found[25]["meta"], found[30]["meta"]) == ('{"lang": null}', '{"lang": "en"}', None)
    assert (found[25]["score"], found[40]["score"], found[25]["tags"]) == (1.0, 1.5, '["a"]')
    lines = {part: part.read_bytes() for part in out.iterdir() if part.is_file()}
    assert call("run", source, *args, *ordered)[0] == 3
    assert {part: part.read_bytes() for part in out.iterdir() if part.is_file()} == lines


def test_the_same_rows_as_jsonl_and_parquet_give_the_same_completions(
    call: Call, tmp_path: Path, tiny_model: Path
) -> None:
    user = {"role": "user", "content": "hi"}
    rows = [
        {"id": 1, "messages": [user]},
        {"id": 2, "messages": [{"role": "system", "content": "s", "name": "n"}, user]},
    ]
    pq.write_table(pa.table({"id": [1, 2], "messages": [row["messages"] for row in rows]}), tmp_path / "in.parquet")
    jsonl(tmp_path / "in.jsonl", *rows)
    found = []
    for suffix in ("jsonl", "parquet"):
        out = tmp_path / f"of-{suffix}-rows"
        args = ("-m", tiny_model, "-o", out, "--max-tokens", 5, "--temperature", 1, "--seed", 3)
        assert call("run", tmp_path / f"in.{suffix}", *args)[0] == 0
        by_id = {record["id"]: (record["completion"], record["prompt_tokens"]) for record in shard(out)}
        found.append(by_id)
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_openai_requests_are_answered_in_openais_shape(call: Call, tmp_path: Path, tiny_model: Path) -> None:
    def request(name: str, body: Any, url: str = "/v1/chat/completions") -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    messages = [{"role": "user", "content": "hi"}]
    source = jsonl(
        tmp_path / "in.jsonl",
        request("chat", {"model": "m", "messages": messages, "max_tokens": 3}),
        request("text", {"model": "m", "prompt": "hi", "max_tokens": 2}, "/v1/completions"),
        request("bad", {"model": "m", "messages": "hi"}),
    )
    code, _, _ = call("run", source, "-m", tiny_model, "-o", tmp_path / "out.jsonl", "--ordered")
    assert code == 3
    chat, text, bad = records(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in (chat, text, bad)] == ["chat", "text", "bad"]
    assert chat["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert chat["response"]["body"]["usage"]["completion_tokens"] == 3
    assert text["response"]["body"]["usage"]["completion_tokens"] == 2
    assert isinstance(text["response"]["body"]["choices"][0]["text"], str)
    assert bad["response"] is None
    assert bad["error"]["code"] == "invalid_messages"
