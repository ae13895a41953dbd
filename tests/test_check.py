from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from cbatch.check import check
from cbatch.config import (
    DisplayConfig,
    EngineConfig,
    InputConfig,
    OutputConfig,
    PromptConfig,
    RunConfig,
    SamplingParams,
)
from cbatch.errors import UsageError
from cbatch.model.ceilings import Ceilings
from cbatch.model.ops import Backend
from cbatch.watch.report import duration
from tests.conftest import Cbatch
from tests.tiny import make_tokenizer

GOOD: list[Any] = [{"id": number, "prompt": "word " * (number + 1)} for number in range(20)]
BAD: list[Any] = [{"prompt": ""}, {"prompt": 5}, "{broken", {"prompt": "x" * 2000}, {"prompt": "x", "params": {"n": 1}}]


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def config(
    model: Path,
    *inputs: Path,
    output: str = "",
    limit: int | None = None,
    engine: dict[str, Any] | None = None,
    **prompt: Any,
) -> RunConfig:
    return RunConfig(
        InputConfig(tuple(map(str, inputs)), limit=limit),
        PromptConfig(**{"chat": False, **prompt}),
        SamplingParams(max_tokens=10),
        EngineConfig(model=str(model), **engine or {}),
        OutputConfig(output=output),
        DisplayConfig(),
    )


def test_good_rows_are_counted_and_the_first_prompt_is_shown(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config(tiny_model, write(tmp_path / "in.jsonl", *GOOD), chat=True, system="Be brief.")) == 0
    out = capsys.readouterr().out
    assert "20: 20 good, 0 bad" in out
    shown = out.split("as the model sees it:\n")[1]
    assert shown == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nword <|im_end|>\n<|im_start|>assistant\n\n"
    )


def test_lengths_add_up_to_what_the_tokenizer_counts(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(config(tiny_model, write(tmp_path / "in.jsonl", *GOOD)))
    out = capsys.readouterr().out
    lengths = [len(make_tokenizer()(row["prompt"])["input_ids"]) for row in GOOD]
    assert f"{sum(lengths):,} in prompts: {min(lengths)} to {max(lengths):,}, " in out
    bars = re.findall(r"^ +([\d,]+) to ([\d,]+) #* +(\d+)$", out, re.MULTILINE)
    assert sum(int(count) for *_, count in bars) == len(GOOD)
    for low, high, count in bars:
        assert sum(int(low) <= length <= int(high.replace(",", "")) for length in lengths) == int(count)


def test_bad_rows_are_listed_with_their_place_and_reason(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", *GOOD, *BAD, {"prompt": "x", "row": 1})
    assert check(config(tiny_model, source)) == 3
    out = capsys.readouterr().out
    kinds = ("empty_prompt", "invalid_prompt", "invalid_json", "prompt_too_long", "invalid_params", "column_collision")
    for number, kind in enumerate(kinds, 21):
        assert f"{kind}: {source}:{number}: " in out
    assert "26: 20 good, 6 bad" in out


def test_a_long_list_of_bad_rows_is_cut(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(config(tiny_model, write(tmp_path / "in.jsonl", *[{"prompt": ""}] * 50))) == 3
    out = capsys.readouterr().out
    assert out.count("empty_prompt: ") == 20
    assert "... and 30 more" in out
    assert "50: 0 good, 50 bad (50 empty_prompt)" in out


def test_in_a_cache_of_int8_rows_take_less(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 layers of 2 heads of 8, keys and values: 256 bytes a token in float32, 96 as bytes with their scales."""
    for kind, bytes_per_token in (("auto", 256), ("int8", 96)):
        engine = {"dtype": "float32", "kv_cache_dtype": kind, "kv_cache_memory": 1}
        check(config(tiny_model, write(tmp_path / "in.jsonl", *GOOD), engine=engine))
        assert f"about {2**30 // (128 * bytes_per_token):,} blocks fit here" in capsys.readouterr().out
    with pytest.raises(UsageError, match="fp8 is not for this device"):
        check(config(tiny_model, tmp_path / "in.jsonl", engine={"kv_cache_dtype": "fp8"}))


def test_the_memory_is_that_of_a_run_with_as_many_engines(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `run` allocates if it could use it all: half of what is free beside the weights, for all engines together."""
    monkeypatch.setattr("cbatch.engine.plan.available_memory", lambda: 2**30)
    source, weights = write(tmp_path / "in.jsonl", *GOOD), (tiny_model / "model.safetensors").stat().st_size
    for num_engines, together in (("1", ""), ("2", ", in 2 engines together")):
        engine = {"dtype": "float32", "device": "cpu", "data_parallel_size": num_engines}
        check(config(tiny_model, source, engine=engine))
        line = capsys.readouterr().out
        assert f"estimate from the model's files{together}, " in line
        [fit] = re.findall(r"about ([\d,]+) blocks fit here beside weights of 0.00 GiB", line)
        expected = (2**30 - int(num_engines) * weights) // 2 // (128 * 256)
        assert abs(int(fit.replace(",", "")) - expected) <= int(num_engines)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "on a CPU there is int8"),
        ({"kv_cache_dtype": "int8", "dtype": "float16"}, "it does not go with --dtype float16"),
        ({"device": "tpu"}, "--device must be auto, cpu or cuda"),
        ({"quantization": "int8"}, "--quantization int8: no C compiler"),
    ],
)
def test_an_engine_that_can_not_be_is_refused_as_a_run_would(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], message: str
) -> None:
    if "quantization" in engine:
        monkeypatch.setattr("cbatch.model.ops.choose", lambda _device: Backend("no C compiler"))
    source = write(tmp_path / "in.jsonl", *GOOD)
    with pytest.raises(UsageError, match=message):
        check(config(tiny_model, source, engine={"device": "cpu", **engine}))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_input_without_rows_is_no_error(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    assert check(config(tiny_model, source)) == 0
    assert "0: 0 good, 0 bad" in capsys.readouterr().out


def test_it_looks_at_the_rows_a_run_would_take(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", *GOOD)
    write(tmp_path / "out" / "part-00000.jsonl", {"prompt": "x", "completion": "y"})
    assert check(config(tiny_model, tmp_path, output=str(tmp_path / "out"))) == 0
    assert check(config(tiny_model, tmp_path, output=str(tmp_path / "out"), limit=7)) == 0
    out = capsys.readouterr().out
    assert "20: 20 good" in out
    assert "7: 7 good" in out


def test_nothing_is_written(tiny_model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *GOOD)
    check(config(tiny_model, source, output=str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("prompt", [{"template": "{% if"}, {"max_model_len": 10**6}])
def test_settings_that_can_not_be_are_refused(tiny_model: Path, tmp_path: Path, prompt: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check(config(tiny_model, write(tmp_path / "in.jsonl", *GOOD), **prompt))


def test_dummy_weights_are_not_needed(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    source = write(tmp_path / "in.jsonl", *GOOD)
    assert check(config(bare, source, engine={"load_format": "dummy"})) == 0
    assert "KV cache" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no weights"):
        check(config(bare, source))


def test_the_command_prints_the_report_and_nothing_else_on_any_terminal(
    cbatch: Cbatch, tiny_model: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "caf\u00e9"}, *GOOD)
    for encoding, shown in (("utf-8", "caf\u00e9"), ("ascii", "caf\\xe9")):
        done = cbatch("check", source, "-m", tiny_model, "--raw", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"First prompt ({source}:1, raw), as the model sees it:\n{shown}\n" in done.stdout


def test_the_time_is_estimated_as_a_range(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one operation a microsecond and reading for nothing: two for each weight in a layer and each token, and the head."""
    known = Ceilings(bytes_per_second=1e30, block_bytes_per_second=1e30, flops=1e6)
    monkeypatch.setattr("cbatch.engine.estimate.ceilings", lambda *_: known)
    check(config(tiny_model, write(tmp_path / "in.jsonl", *GOOD), engine={"dtype": "float32", "device": "cpu"}))
    out = capsys.readouterr().out
    with safe_open(tiny_model / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    head = next(size for name, size in sizes.items() if "embed_tokens" in name)
    in_layers = sum(size for name, size in sizes.items() if "embed_tokens" not in name and "lm_head" not in name)
    [num_prompt] = re.findall(r"Tokens      ([\d,]+) in prompts", out)
    num_prompt, num_new = int(num_prompt.replace(",", "")), 20 * 10
    least = 2 * (num_prompt + num_new / 4) * in_layers / 1e6 + 2 * num_new / 4 * head / 1e6
    most = 2 * (num_prompt + num_new) * in_layers / 1e6 + 2 * num_new * head / 1e6
    assert f"Time        about {duration(least)} to {duration(3 * most)} after loading." in out
    assert "completions have 2 tokens on average" in out
    assert "if they have 10, the most they may" in out
