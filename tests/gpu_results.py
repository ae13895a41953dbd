"""One check of the GPU path after another, timed, in a table."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cbatch.model.ops import Backend

_BUDGET_SECONDS = 470  # nothing new is begun after this


@dataclass
class Result:
    name: str
    ok: bool
    figure: str = ""
    error: str = ""
    seconds: float = 0.0


class Check:
    """The settings of a run, and the results so far."""

    def __init__(self, backend: Backend, dry: bool, only: str, path: str | None) -> None:
        self.backend, self.dry, self.only, self.path = backend, dry, only, path
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.results: list[Result] = []
        self.started_at = time.perf_counter()
        self.bandwidth = self.flops = 0.0

    def run(self, name: str, work: Callable[[], str]) -> None:
        """Do one check; `work` returns its figures, or raises an error."""
        late = self.seconds_left < 0
        if self.only not in name or late:
            if late:
                self.results.append(Result(name, False, error="not begun: out of time"))
            return
        started_at = time.perf_counter()
        try:
            result = Result(name, True, work())
        except Exception as error:  # the table tells; the others go on
            traceback.print_exc()
            result = Result(
                name, False, error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            self.free()
        result.seconds = time.perf_counter() - started_at
        self.results.append(result)
        print(
            f"{'ok  ' if result.ok else 'FAIL'} {result.seconds:6.1f} s  {name}: {result.figure or result.error}",
            flush=True,
        )

        self.save()

    def save(self) -> None:
        """Write the results so far, so that a run that is killed leaves them."""
        if self.path:
            content = json.dumps(
                {"dry_run": self.dry, "results": [asdict(result) for result in self.results]}, indent=1
            )
            Path(self.path).write_text(content)

    def free(self) -> None:
        """Give back memory that is no longer used; engines and graphs refer to each other in cycles."""
        gc.collect()
        if not self.dry:
            with suppress(Exception):  # after a fault of the device nothing works any more
                torch.cuda.empty_cache()

    @property
    def seconds_left(self) -> float:
        return _BUDGET_SECONDS - (time.perf_counter() - self.started_at)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeat: int = 20) -> float:
        """Median seconds of a call on the device, after warming up."""
        if self.dry:
            started_at = time.perf_counter()
            work()
            return time.perf_counter() - started_at
        for _ in range(3):
            work()
        times = []
        for _ in range(repeat):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return sorted(times)[len(times) // 2]

    def table(self) -> str:
        """All results, one a line, and how many there are."""
        width = max(len(result.name) for result in self.results)
        lines = [
            f"{'ok  ' if result.ok else 'FAIL'}  {result.name:<{width}}  {result.figure or result.error}"
            for result in self.results
        ]
        passed = sum(result.ok for result in self.results)
        seconds = time.perf_counter() - self.started_at
        return "\n".join([*lines, f"{passed} passed, {len(lines) - passed} failed, {seconds:.0f} s"])
