from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cbatch.bench import contender, plot, process, result
from cbatch.bench.contender import Contender, Outcome, check
from cbatch.bench.peers import interpreters
from cbatch.bench.timeline import Piece, timeline
from cbatch.bench.workload import Item, Workload, make, read_file
from cbatch.config import PEERS, SCHEDULES, EngineConfig
from cbatch.errors import UsageError
from cbatch.settings import as_flags
from tests.conftest import Cbatch
from tests.tiny import make_tokenizer

TWO = Workload("two", [Item([1, 2, 3], 5), Item([1, 2, 9, 9], 1)])


class Numbers:
    """A tokenizer with one token for each character."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


# Workloads


def test_a_workload_is_the_same_each_time() -> None:
    tokenizer = make_tokenizer()
    for kind in ("ragged", "prefix", "fixed"):
        assert make(kind, 5, tokenizer, 512) == make(kind, 5, tokenizer, 512)
    digests = {make(kind, 5, tokenizer, 512).about()["sha256"] for kind in ("ragged", "prefix", "fixed")}
    assert len(digests) == 3


def test_ragged_lengths_have_a_heavy_tail_within_their_bounds() -> None:
    workload = make("ragged", 2000, Numbers(), 2048)
    prompts = sorted(len(item.token_ids) for item in workload.items)
    outputs = sorted(item.max_tokens for item in workload.items)
    assert 110 < prompts[1000] < 130
    assert 68 < outputs[1000] < 82
    assert 8 <= prompts[0] < 30 < 700 < prompts[-1] <= 1024
    assert 4 <= outputs[0] < 10 < 500 < outputs[-1] <= 768
    assert sum(outputs) / 2000 > 1.3 * outputs[1000]


def test_prefix_rows_share_a_beginning_and_nothing_more() -> None:
    workload = make("prefix", 50, Numbers(), 2048)
    assert len({tuple(item.token_ids[:512]) for item in workload.items}) == 1
    assert len({tuple(item.token_ids[:540]) for item in workload.items}) > 40
    assert all(520 <= len(item.token_ids) <= 640 for item in workload.items)


def test_fixed_rows_are_128_in_and_128_out() -> None:
    workload = make("fixed", 10, Numbers(), 2048)
    assert {(len(item.token_ids), item.max_tokens) for item in workload.items} == {(128, 128)}
    assert len({tuple(item.token_ids) for item in workload.items}) == 10


@pytest.mark.parametrize("context", [64, 300, 1024])
@pytest.mark.parametrize("kind", ["ragged", "prefix", "fixed"])
def test_a_workload_fits_a_short_context(kind: str, context: int) -> None:
    workload = make(kind, 300, Numbers(), context)
    assert 8 <= workload.longest <= context
    assert min(item.max_tokens for item in workload.items) >= 1


def test_a_workload_is_read_back_from_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(TWO.lines())
    assert read_file(str(path), None, 512).items == TWO.items
    assert read_file(str(path), 1, 512).items == TWO.items[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"token_ids": [1], "params": {}}', "a workload's rows have"),
        ('{"token_ids": [1], "params": {"max_tokens": true}}', "a workload's rows have"),
        ('{"prompt": "hello", "params": {"max_tokens": 3}}', "a workload's rows have"),
        ('{"token_ids": [1, 2], "params": {"max_tokens": 15}}', "exceed the model's context of 16"),
        ("{", "rows.jsonl"),
        ("", "has no rows"),
    ],
)
def test_a_file_that_is_no_workload_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=re.escape(message)):
        read_file(str(path), None, 16)


def test_the_least_work_counts_a_shared_beginning_once() -> None:
    work = TWO.work
    assert work.computed == len({(1,), (1, 2), (1, 2, 3), (1, 2, 9), (1, 2, 9, 9)}) + 4  # decoded after the first
    assert work.sampled == 6
    assert work.read == (3 + 4 + 5 + 6 + 7) + 4


# Results

COST = {"flops_per_token": 10, "flops_per_sampled": 20, "kv_bytes_per_token": 7}
CEILINGS = {"flops": 100.0, "block_bytes_per_second": 29.0, "bytes_per_second": 50.0}


def outcome(generation: float, **figures: Any) -> Outcome:
    return Outcome("", generation + 2, 1.5, generation, 1024**3, figures)


def ours(generation: float) -> Outcome:
    return outcome(
        generation,
        cost=COST,
        work={"bytes": 100, "flops": 300},
        mean_batch_occupancy=1.5,
        kv_cache_use={"mean": 0.25, "most": 0.5},
    )


def printed(summary: dict[str, Any], **terminal: Any) -> str:
    screen = io.StringIO()
    result.print_table(result.table(summary), Console(file=screen, color_system=None, **terminal))
    return screen.getvalue()


def test_medians_and_ratios_over_the_runs() -> None:
    found = result.summarize(
        {"cbatch": [ours(2.0), ours(4.0), ours(3.0)], "vllm": [outcome(6.0), outcome(1.0), outcome(9.0)]}, TWO, CEILINGS
    )
    median = found["cbatch"]["median"]
    assert median["output_tokens_per_second"] == 6 / 3
    assert median["total_tokens_per_second"] == 13 / 3
    assert median["wall_seconds"] == 5
    assert median["first_completion_seconds"] == 1.5
    assert (median["mean_occupancy"], median["kv_cache_use"], median["peak_memory_bytes"]) == (1.5, 0.25, 1024**3)
    assert median["mbu"] == pytest.approx(100 / 3 / 50)
    assert median["mfu"] == pytest.approx(300 / 3 / 100)
    least = (9 * 10 + 6 * 20) / 100 + 29 * 7 / 29
    assert median["roofline_share"] == pytest.approx(least / 3)
    assert median["speedup_of_cbatch"] == 1
    other = found["vllm"]["median"]
    assert other["output_tokens_per_second"] == 1
    assert other["roofline_share"] == pytest.approx(least / 6)
    assert other["speedup_of_cbatch"] == 2
    assert other["mbu"] is other["mean_occupancy"] is None
    assert [run["generation_seconds"] for run in found["vllm"]["runs"]] == [6, 1, 9]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_one_bad_run_makes_a_contender_invalid() -> None:
    found = result.summarize({"cbatch": [ours(2.0)] * 2, "vllm": [outcome(1.0), Outcome("row 3 ...")]}, TWO, CEILINGS)
    assert found["cbatch"]["valid"]
    assert (found["vllm"]["valid"], found["vllm"]["median"]) == (False, {})
    shown = printed(found)
    assert re.search(r"^valid +yes +INVALID$", shown, re.MULTILINE)
    assert re.search(r"^output tokens/s +3\.0 +-$", shown, re.MULTILINE)
    assert "vllm is invalid: row 3 ..." in result.notes(found, CEILINGS)


def test_without_a_valid_run_of_cbatch_the_others_are_shown() -> None:
    found = result.summarize({"cbatch": [Outcome("it broke")], "vllm": [outcome(2.0)]}, TWO, {})
    assert found["vllm"]["median"]["output_tokens_per_second"] == 3
    assert "3.0" in printed(found)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_every_figure_is_whole_however_narrow_the_terminal(width: int) -> None:
    measures = result.measures(ours(2.0), TWO, CEILINGS, 1.0) | {"speedup_of_cbatch": 1.0}
    measured = {"median": dict.fromkeys(measures, 123_456.7), "valid": True, "problem": ""}
    summary = dict.fromkeys(("cbatch", *SCHEDULES, *PEERS), measured)
    on_terminal, in_file = (printed(summary, width=width, force_terminal=value) for value in (True, False))
    figures = [line.split()[-6:] for line in in_file.splitlines()]
    assert [line.split()[-6:] for line in on_terminal.splitlines() if line.split()[-6:] in figures] == figures
    assert len(figures) == 13


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(1, 1), (0, 5)], ""),
        ([(0, 5)], "missing"),
        ([(0, 5), (1, 1), (0, 5)], "there twice"),
        ([(0, 4), (1, 1)], "row 0 has 4 tokens instead of 5"),
        ([(0, 6), (1, 1)], "row 0 has 6 tokens instead of 5"),
        ([(0, None), (1, 1)], "row 0 has None tokens"),
        ([(0, 5), (1, 1), (2, 1)], "there is no row 2"),
    ],
)
def test_only_exactly_the_tokens_asked_for_are_valid(rows: list[tuple[int, Any]], problem: str) -> None:
    found = check([{"row": row, "completion_tokens": tokens} for row, tokens in rows], TWO)
    assert problem in found
    assert bool(found) == bool(problem)


# Processes


FIGURES, FAILED = '{"seconds": {"generation": 0.5}}', '{"row": 1, "completion_tokens": 0, "error": "too long"}'


def python(code: str) -> Contender:
    return Contender("code", [sys.executable, "-c", code])


def test_a_contender_is_timed_line_by_line() -> None:
    code = (
        "import json, sys, time\n"
        "for row, tokens in ((1, 1), (0, 5)):\n"
        "    print(json.dumps({'row': row, 'completion_tokens': tokens}), flush=True)\n"
        "    time.sleep(0.05)\n"
        f"print({FIGURES!r}, 'a warning', sep='\\n', file=sys.stderr)\n"
    )
    found = contender.run(python(code), TWO)
    assert (found.problem, found.generation) == ("", 0.5)
    assert 0 < found.first < found.wall


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; sys.exit('out of luck')", "exit code 1; it gave no figures; out of luck"),
        ("print('hello')", "it gave no figures"),
        (f"import sys; print('hello'); print({FIGURES!r}, file=sys.stderr)", "a line of output is no completion: None"),
        (
            f"import sys; print('{{}}'); print({FIGURES!r}, file=sys.stderr); sys.exit(3)",
            "exit code 3; a line of output",
        ),
        (f"import sys; print({FAILED!r}); print({FIGURES!r}, file=sys.stderr)", "row 1 failed: too long"),
    ],
)
def test_a_contender_that_fails_is_invalid_and_says_why(code: str, problem: str) -> None:
    assert contender.run(python(code), TWO).problem.startswith(problem)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_memory_is_that_of_all_processes() -> None:
    hog = "x = b'1' * 100_000_000; import time; time.sleep(1)"
    both = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {hog!r}]); {hog}; p.wait()"
    single = process.run([sys.executable, "-c", hog], os.environ).peak_memory
    double = process.run([sys.executable, "-c", both], os.environ).peak_memory
    assert single
    assert double
    assert single > 100_000_000
    assert double > 200_000_000


def test_what_a_contender_leaves_behind_is_ended() -> None:
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True)"
    finished = process.run([sys.executable, "-c", code], os.environ)  # it would wait for the child's end of the pipe
    assert len(finished.lines) == 1


def test_an_interrupted_benchmark_leaves_nothing_running(tmp_path: Path) -> None:
    child = (
        f"import os, time; print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True); time.sleep(600)"
    )
    code = (
        f"import os, sys; from cbatch.bench import process; process.run([sys.executable, '-c', {child!r}], os.environ)"
    )
    outer = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    outer.send_signal(signal.SIGINT)
    assert outer.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# Settings and peers


def test_engine_settings_are_passed_on_as_flags() -> None:
    engine = EngineConfig(model="m", dtype="float32", max_num_seqs=3, enable_prefix_caching=False)
    assert as_flags(engine) == ["--model=m", "--dtype=float32", "--max-num-seqs=3", "--no-enable-prefix-caching"]
    assert as_flags(EngineConfig()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--compare", "static,llama"), "--compare: 'llama' is none of static, dynamic, transformers"),
        (("--python", "vllm"), "must be NAME=PATH"),
        (("--python", "perl=/bin/sh"), "must be NAME=PATH"),
        (("--python", "vllm=/no/such/python"), "there is no such program"),
        (("--plot", "picture.png"), "must end in .html"),
        (("--scheduling", "static"), "--compare"),
        (("--workload", "nowhere.jsonl"), "no such file"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--json", "/dev/null/result.json"), "can't be written"),
    ],
)
def test_wrong_settings_are_one_line(args: tuple[str, ...], message: str, tiny_model: Path, cbatch: Cbatch) -> None:
    done = cbatch("bench", "-m", tiny_model, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_interpreters_are_named_by_peer() -> None:
    assert interpreters((f"vllm={sys.executable}",)) == {"vllm": sys.executable}


# From end to end


@pytest.fixture(scope="module")
def benched(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, cbatch: Cbatch) -> Any:
    """A benchmark of two schedules and a peer, with one peer that is not installed; the folder it wrote into."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "python").write_text("#!/bin/sh\nexit 1\n")  # has no module at all
    (folder / "python").chmod(0o755)
    done = cbatch(
        *("bench", "-m", tiny_model, "--rows", 6, "--repeat", 1, "--compare", "static,transformers,vllm"),
        *("--python", f"vllm={folder / 'python'}", "--max-num-seqs", 4, "--threads", 1),
        *("--json", folder / "result.json", "--plot", folder / "plot.html"),
        CBATCH_CACHE=str(folder / "cache"),
    )
    return done, folder


def test_a_benchmark_from_end_to_end(benched: Any) -> None:
    done, folder = benched
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "result.json").read_text())
    assert list(found["contenders"]) == ["cbatch", "static", "transformers"]
    for measured in found["contenders"].values():
        assert measured["valid"], measured["problem"]
        median = measured["median"]
        assert median["output_tokens_per_second"] * median["generation_seconds"] == pytest.approx(
            found["workload"]["output_tokens"]
        )
        assert 0 < median["first_completion_seconds"] <= median["wall_seconds"]
        assert median["generation_seconds"] < median["wall_seconds"]
    ours = found["contenders"]["cbatch"]["median"]
    assert 1 < ours["mean_occupancy"] <= 4
    assert 0 < ours["kv_cache_use"] < 1
    assert found["engine"]["max_num_seqs"] == 4
    assert re.search(r"^output tokens/s( +[\d,.]+){3}$", done.stdout, re.MULTILINE)


def test_a_peer_that_is_not_installed_is_skipped_by_name(benched: Any) -> None:
    done, folder = benched
    line = next(line for line in done.stderr.splitlines() if line.startswith("vllm is skipped"))
    assert "pip install vllm" in line
    assert json.loads((folder / "result.json").read_text())["skipped"] == {"vllm": line}


def test_the_page_has_a_curve_for_each_schedule(benched: Any) -> None:
    _, folder = benched
    text = (folder / "plot.html").read_text()
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(pictures) == 2
    for picture in pictures:
        curves = {curve.get("class"): curve.get("points") for curve in picture.iter("polyline")}
        assert list(curves) == ["continuous", "static"]
        assert all(len(points.split()) >= 2 for points in curves.values() if points is not None)


# Timelines and pictures


def marks(*counters: tuple[float, int, int, int]) -> list[dict[str, Any]]:
    names = ("seconds", "steps", "occupancy", "generated_tokens")
    return [dict(zip(names, values, strict=True)) | {"to_first_step": 1.0} for values in counters]


def test_a_timeline_has_what_came_between_its_marks() -> None:
    figures = {"steps": 40, "mean_batch_occupancy": 2.0, "tokens": {"completion": 70}}
    run = Outcome(
        generation=4.0,
        figures=figures,
        marks=marks((2, 10, 40, 40), (2.5, 10, 40, 50), (3, 30, 60, 60), (9, 40, 80, 70)),
    )
    assert timeline(run) == [Piece(0, 1, 4.0, 40.0), Piece(1, 2, 1.0, 20.0), Piece(2, 4.0, 2.0, 5.0)]


def test_a_run_too_short_for_marks_has_one_piece() -> None:
    figures = {"steps": 4, "mean_batch_occupancy": 2.0, "tokens": {"completion": 8}}
    assert timeline(Outcome(generation=0.5, figures=figures)) == [Piece(0, 0.5, 2.0, 16.0)]


def test_a_long_timeline_is_thinned_without_losing_a_token() -> None:
    many = marks(*((1 + k / 10, k, 3 * k, 7 * k) for k in range(1, 5001)))
    figures = {"steps": 5000, "mean_batch_occupancy": 3.0, "tokens": {"completion": 35_000}}
    pieces = timeline(Outcome(generation=500.0, figures=figures, marks=many))
    assert len(pieces) <= 122
    assert sum(piece.tokens_per_second * (piece.end - piece.start) for piece in pieces) == pytest.approx(35_000)


@pytest.mark.parametrize("highest", [0.01, 0.4, 1.0, 3, 9.9, 10, 37, 99, 100, 128, 4095, 123_456])
def test_ticks_are_round_and_few(highest: float) -> None:
    found = plot.ticks(highest)
    assert found[0] == 0
    assert 4 <= len(found) - 1 <= 10
    assert found[-1] <= highest
    for tick in found[1:2]:
        assert float(f"{tick:.0e}") == pytest.approx(tick)
