from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.config import SamplingParams
from cbatch.engine.recovery import Recovery
from cbatch.errors import Fatal
from cbatch.rows.request import Completion, Request, Row


def make_requests(count: int) -> list[Request]:
    rows = [Row("prompts", index, f"in.jsonl:{index + 1}", {}, 1) for index in range(count)]
    return [Request(row, [1, 2], SamplingParams(), random_key=0) for row in rows]


def dead(requests: list[Request], suspects: bool = False, num_deaths: int = 1) -> Any:
    """A replica that has died and held these requests."""
    held = dict(enumerate(requests))
    return SimpleNamespace(name="CPU 3", held=held, holds_suspects=suspects, num_deaths=num_deaths)


def test_the_requests_of_a_dead_replica_are_suspects_in_groups() -> None:
    notes: list[str] = []
    recovery, requests = Recovery(notes.append), make_requests(20)
    assert recovery.died(dead(requests), "SIGKILL") is None
    groups = []
    while recovery.has_suspects:
        groups.append(recovery.next_suspects())
    assert sorted(map(len, groups)) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert [request for group in groups for request in group] == requests
    assert notes == ["The engine on CPU 3 died (SIGKILL) with 20 rows; it starts again."]


def test_a_replica_that_held_nothing_leaves_no_suspects() -> None:
    recovery = Recovery(lambda _: None)
    assert recovery.died(dead([]), "SIGKILL") is None
    assert not recovery.has_suspects


def test_a_lone_request_is_to_blame_only_if_it_was_a_suspect() -> None:
    recovery, requests = Recovery(lambda _: None), make_requests(1)
    assert recovery.died(dead(requests), "SIGKILL") is None
    assert recovery.next_suspects() == requests
    failed = recovery.died(dead(requests, suspects=True), "exit code 9")
    assert isinstance(failed, Completion)
    assert failed.error
    assert failed.error.kind == "worker_died"
    assert str(failed.error) == ("in.jsonl:1: the engine died with this row, also when it had no other (exit code 9)")
    assert failed.num_prompt_tokens == 2
    assert not recovery.has_suspects


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100])
def test_every_request_that_kills_its_engine_is_found_and_no_other(count: int) -> None:
    recovery, requests = Recovery(lambda _: None), make_requests(count)
    deadly = {0, count // 2, count - 1}
    failed, completed = [], []
    recovery.died(dead(requests), "SIGKILL")
    while recovery.has_suspects:
        group = recovery.next_suspects()
        if not deadly.intersection(request.row.index for request in group):
            completed += group
        elif completion := recovery.died(dead(group, suspects=True), "SIGKILL"):
            failed.append(completion.row.index)
    assert sorted(failed) == sorted(deadly)
    assert sorted([*failed, *(request.row.index for request in completed)]) == list(range(count))


def test_a_replica_that_keeps_dying_ends_the_run() -> None:
    recovery = Recovery(lambda _: None)
    for num_deaths in range(1, 8):
        recovery.died(dead([], num_deaths=num_deaths), "exit code 9")
    with pytest.raises(Fatal, match="CPU 3 died 8 times and completed no row in between, the last time by exit code 9"):
        recovery.died(dead([], num_deaths=8), "exit code 9")
