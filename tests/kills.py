"""Does to jobs what can happen to them, and finishes them: `python -m tests.kills kill 500`.

Everything is the real thing but the model, whose tokens come at once. A job starts in a tenth of a second because it is
forked off this process, which has imported all that it needs.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import datasets  # noqa: F401 what a job imports is imported here
import orjson
import pyarrow.parquet as pq
from transformers import AutoConfig, AutoTokenizer  # noqa: F401

from cbatch.cli import main
from cbatch.errors import FATAL, SOME_FAILED, USAGE
from cbatch.model.loader import locate
from cbatch.output import parquet  # noqa: F401
from tests.chain import continuation
from tests.chain_engine import decoder, replace_models
from tests.tiny import VOCAB_SIZE, make_tokenizer, save_model

NUM_ROWS, SHARD_ROWS, MAX_TOKENS, EOS = 2000, 100, 6, 2
LAYOUTS: list[list[str]] = [
    ["out"],
    ["out", "--format", "parquet"],
    ["out", "--ordered"],
    ["out.jsonl"],
    ["out.parquet", "--ordered"],
]
KILLS = 12  # of one job
SECONDS = {"start": 0.1, "rows": 0.6, "end": 0.05}  # about; kills are spread over them


replace_models(num_blocks=40, max_num_seqs=32)  # few blocks, so that sequences give way


# The rows


def row(number: int) -> dict[str, Any]:
    """Every 37th can't be completed."""
    prompt: Any = f"the rain {number} " * (1 + number % 7)
    return {"id": f"r{number}", "prompt": 7 if number % 37 == 5 else prompt, "meta": {"é\u2028": [number, None]}}


@cache
def expected() -> list[tuple[Any, ...]]:
    """Of each row its columns, completion and kind of error."""
    tokenizer, found = make_tokenizer(), list[tuple[Any, ...]]()
    decode = decoder(tokenizer)
    for number in range(NUM_ROWS):
        prompt = row(number)["prompt"]
        if isinstance(prompt, int):
            found.append((row(number), None, "invalid_prompt"))
            continue
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        made = continuation(ids, VOCAB_SIZE, lambda made: len(made) == MAX_TOKENS or made[-1:] == [EOS])
        found.append((row(number), decode(made), None))
    return found


# One job


@dataclass
class Job:
    """A folder with an input, and a command that is run there again and again."""

    folder: Path
    layout: list[str]
    largest: int = resource.RLIM_INFINITY  # file that the next runs may write, in bytes
    stderr: int = -1

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        model()
        (self.folder / "in.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(NUM_ROWS)))

    def start(self, *more: str) -> int:
        """A run in a process of its own; its id."""
        if self.stderr >= 0:
            os.close(self.stderr)
        self.stderr, end = os.pipe()
        if pid := os.fork():
            os.close(end)
            return pid
        try:
            os.chdir(self.folder)
            for number, stream in ((0, os.open(os.devnull, os.O_RDONLY)), (1, end), (2, end)):
                os.dup2(stream, number)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest, self.largest))
            sys.argv = [
                "cbatch",
                "run",
                "in.jsonl",
                "-m",
                str(model()),
                "-o",
                *self.layout,
                "--shard-rows",
                str(SHARD_ROWS),
            ]
            sys.argv += ["--max-tokens", str(MAX_TOKENS), "--progress", "plain", *more]
            main()
        except SystemExit as exit:
            os._exit(exit.code if isinstance(exit.code, int) else 99)
        except BaseException:
            traceback.print_exc()
        os._exit(98)

    def run(self, *more: str) -> int:
        """A run to its end; its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(*more), 0)[1])

    def finish(self) -> None:
        """Run to the end, and find everything there."""
        code = self.run()
        assert code == SOME_FAILED, (code, self.said())
        self.check_end()

    def said(self) -> str:
        """What the last run, which has ended, wrote to standard error."""
        with os.fdopen(self.stderr) as stream:
            self.stderr = -1
            return stream.read()

    @property
    def output(self) -> Path:
        return self.folder / self.layout[0]

    @property
    def state(self) -> Path:
        return (
            self.output / ".cbatch"
            if self.output.suffix == ""
            else self.output.with_name(f".{self.output.name}.cbatch")
        )

    def finals(self) -> list[Path]:
        return sorted(self.output.glob("part-*")) if self.output.suffix == "" else [self.output][: self.output.exists()]

    def records(self) -> list[dict[str, Any]]:
        """Those under final names, all of which are whole, in the order in which they stand."""
        found: list[dict[str, Any]] = []
        for path in self.finals():
            if path.suffix == ".parquet":
                found += [{**record, "meta": json.loads(record["meta"]), "prompt": json.loads(record["prompt"])} for record in
                          pq.read_table(path).to_pylist()]  # fmt: skip
                continue
            content = path.read_bytes()
            assert content.endswith(b"\n"), path
            found += [orjson.loads(line) for line in content.removesuffix(b"\n").split(b"\n")]
        return found

    def growing(self) -> list[Path]:
        return sorted(self.state.glob("part-*.jsonl"))

    def done(self) -> set[int]:
        """The rows of which there is a whole record, published or not."""
        rows, lines = set[int](), list[bytes]()
        for path in [*self.growing(), *self.finals()]:
            try:
                if path.suffix == ".parquet":
                    rows |= set(pq.read_table(path, columns=["row"])["row"].to_pylist())
                else:
                    lines += path.read_bytes().split(b"\n")[:-1]
            except FileNotFoundError:  # renamed meanwhile
                continue
        return rows | {orjson.loads(line)["row"] for line in lines}

    def size(self) -> int:
        """Changes when something is written."""
        try:
            return sum(path.stat().st_size for path in [*self.growing(), *self.finals()])
        except FileNotFoundError:  # renamed meanwhile
            return -1

    def content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in [*self.finals(), *self.growing()]}

    def check(self) -> None:
        """After a kill: what is published is whole and right, and no row is in it twice."""
        found = self.records()
        assert len({record["row"] for record in found}) == len(found)
        assert all(summary(record) == expected()[record["row"]] for record in found)

    def check_end(self) -> None:
        found = self.records()
        in_order = found if "--ordered" in self.layout else sorted(found, key=lambda record: record["row"])
        assert [record["row"] for record in in_order] == list(range(NUM_ROWS))
        assert [summary(record) for record in in_order] == expected()
        kept = {"lock", "manifest.json", "summary.json", *(f"part-{n:05d}.idx" for n in range(len(self.finals())))}
        left = {path.name for path in self.state.iterdir()}
        assert left == kept, (self.layout, left ^ kept)


def summary(record: dict[str, Any]) -> tuple[Any, ...]:
    return {name: record[name] for name in ("id", "prompt", "meta")}, record["completion"], record["error_kind"]


@cache
def model() -> Path:
    """A model folder, which has been checked once: what that imports is there in all processes that are forked later."""
    folder = save_model(Path(tempfile.mkdtemp(prefix="cbatch-model-")))
    locate(str(folder)).check()
    return folder


# Killing


def tear(job: Job, rng: random.Random) -> str:
    """Do to the end of the growing files what a kill in the middle of a write, or the loss of power, does to them."""
    how = rng.choice(["record", "newline", "index", "zeros", "no index"])
    for path in job.growing():
        size, index = path.stat().st_size, path.with_suffix(".idx")
        last = len(path.read_bytes().removesuffix(b"\n").rpartition(b"\n")[2]) + 1
        if how in ("record", "newline") and size:
            os.truncate(path, size - (rng.randint(1, last) if how == "record" else 1))
        elif how == "zeros":
            with path.open("ab") as file:
                file.write(bytes(rng.randint(1, 5000)))
        elif how == "index" and index.exists():
            os.truncate(index, rng.randint(0, index.stat().st_size))
        elif how == "no index":
            index.unlink(missing_ok=True)
    return how


def kill(job: Job, pid: int, rng: random.Random) -> int | None:
    """Kill a run; its exit code if it ended before that.

    Some kills come while it starts, most after its first write and anywhere in what is left to do, some when all rows
    are written.
    """
    size, num_done = job.size(), len(job.done())
    moment = rng.choices(["start", "rows", "end"], [25, 60, 15])[0]
    left = SECONDS["rows"] * (1 - num_done / NUM_ROWS) * rng.choice([0.2, 1]) if moment == "rows" else SECONDS[moment]
    seconds, deadline = rng.uniform(0, left), None
    while deadline is None or time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if deadline is None and (
            moment == "start" or (job.size() != size if moment == "rows" else len(job.done()) == NUM_ROWS)
        ):
            deadline = time.monotonic() + seconds
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == -signal.SIGKILL else code


def kill_and_finish(job: Job, rng: random.Random, most: int, tally: Counter[str]) -> int:
    """Kill a job again and again until it ends; how often it was killed."""
    kills = 0
    while kills < most:
        before = job.done()
        code = kill(job, job.start(*(["--retry-failed"] if rng.random() < 0.2 else [])), rng)
        job.check()
        if code is not None:
            break
        kills += 1
        done = job.done()
        tally["at the end" if len(done) == NUM_ROWS else "before a row" if done == before else "among the rows"] += 1
        if rng.random() < 0.3:
            tally["torn: " + tear(job, rng)] += 1
    job.finish()
    return kills


def kill_jobs(folder: Path, kills: str, seed: str) -> None:
    """Kill jobs of all layouts in turn, `kills` times together, and print at which moments."""
    rng, tally, layouts = random.Random(seed), Counter[str](), cycle(LAYOUTS)
    while left := int(kills) - tally["kills"]:
        job = Job(folder / f"job-{tally['jobs']}", next(layouts))
        tally["kills"] += kill_and_finish(job, rng, min(KILLS, left), tally)
        tally["jobs"] += 1
        shutil.rmtree(job.folder)
    print(json.dumps(tally))


# Disks and inputs


def expect_words(job: Job, codes: Sequence[int], words: str) -> None:
    """Run a job that can't go on, and hear why in one line; what is published stays right."""
    code, said = job.run(), job.said()
    assert code in codes, (code, said)
    if code != SOME_FAILED:
        assert words in said.splitlines()[-1], said
        assert "Traceback" not in said
    job.check()


def limit_files(folder: Path) -> None:
    """A limit to the size of files (RLIMIT_FSIZE) that is raised bit by bit."""
    for number, layout in enumerate(LAYOUTS[::2]):
        job = Job(folder / str(number), layout)
        for job.largest in (0, 300, 3000, 17_000, 60_000):
            expect_words(job, (FATAL, USAGE, SOME_FAILED), "File too large")
        job.largest = resource.RLIM_INFINITY
        job.finish()


def fill_disk(folder: Path) -> None:
    """A disk (tmpfs) that is full, becomes larger bit by bit, and can't be written for a while; root only."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        print("can't mount a disk")
        return
    try:
        for name, *more in LAYOUTS[::2]:
            job = Job(folder, [f"disk/{name}", *more])
            for size in (8, 12, 24, 60):
                subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
                expect_words(job, (FATAL, USAGE), "No space left on device")
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            expect_words(job, (USAGE,), "can't write there: Read-only file system")
            subprocess.run(["mount", "-o", "remount,rw,size=8m", str(disk)], check=True)
            job.finish()
            shutil.rmtree(job.state)
            for path in job.finals():
                path.unlink()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    print("on a disk")


def lose_input(folder: Path) -> None:
    """An input that is gone when the job is to go on, and comes back."""
    for number, layout in enumerate(LAYOUTS[::4]):
        job = Job(folder / str(number), layout)
        pid = job.start()
        while len(job.done()) < 50:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (job.folder / "in.jsonl").rename(job.folder / "elsewhere")
        before = job.content()
        expect_words(job, (USAGE,), "in.jsonl: no such file")
        assert job.content() == before
        (job.folder / "elsewhere").rename(job.folder / "in.jsonl")
        pid, size = job.start(), job.size()
        while job.size() == size:
            time.sleep(0.001)
        (job.folder / "in.jsonl").unlink()  # it is open, so it can be read to its end
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == SOME_FAILED
        job.check_end()


def race(folder: Path) -> None:
    """Several runs of one command that start at the same time."""
    for number, layout in enumerate(LAYOUTS[::4]):
        runs = [Job(folder / str(number), layout) for _ in range(4)]
        pids = [job.start() for job in runs]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert sorted(codes) == [USAGE, USAGE, USAGE, SOME_FAILED]
        assert sum("another cbatch job is writing there" in job.said() for job in runs) == 3
        runs[0].check_end()


if __name__ == "__main__":
    what = {"kill": kill_jobs, "limit": limit_files, "fill": fill_disk, "lose": lose_input, "race": race}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as scratch:
        what(Path(scratch), *sys.argv[2:])  # type: ignore[operator]
