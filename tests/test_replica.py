from __future__ import annotations

from typing import Any

import pytest

from cbatch.config import SamplingParams
from cbatch.engine.protocol import Facts, Orders, Report
from cbatch.engine.replica import Replica
from cbatch.rows.request import Completion, Output, Request, Row
from cbatch.watch.stats import EngineStats

FACTS = Facts("cpu", "float32", 16, 1024, 512, has_eos=True, notes=())


class Process:
    """Stands in for a process: keeps what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[Orders] = []
        self.stopped = False

    def send(self, orders: Orders) -> None:
        self.sent.append(orders)

    def stop(self) -> None:
        self.stopped = True

    def end(self) -> str:
        return "SIGKILL"


@pytest.fixture
def replica() -> Any:
    return Replica("CPU 0", Process)  # type: ignore[arg-type]


def make_requests(count: int) -> list[Request]:
    rows = [Row("prompts", index, f"row {index}", {"prompt": "hello"}, 1) for index in range(count)]
    return [Request(row, [1, 2], SamplingParams(), random_key=0) for row in rows]


def report(requests: list[Request], num_running: int, stats: EngineStats | None = None) -> Report:
    """A report that completes these requests."""
    rows = [Row(request.row.source, request.row.index, request.row.where, {}, 1) for request in requests]
    return Report([Completion(row, (Output("text"),)) for row in rows], num_running, stats)


def fill(replica: Any, requests: list[Request]) -> int:
    """Give requests, one by one, while there is room; how many it took."""
    count = 0
    while replica.has_room:
        replica.give([requests.pop(0)])
        count += 1
    return count


def test_a_replica_gets_nothing_before_its_model_is_loaded(replica: Any) -> None:
    assert not replica.has_room
    replica.facts = FACTS
    assert replica.has_room


def test_a_replica_gets_a_little_more_than_it_runs(replica: Any) -> None:
    replica.facts, requests = FACTS, make_requests(90)
    given = requests[:]
    assert fill(replica, requests) == 2  # an eighth of what it can run
    list(replica.take_in(report([], num_running=2)))
    assert fill(replica, requests) == 2
    list(replica.take_in(report(given[:2], num_running=4)))
    assert fill(replica, requests) == 6  # 4 run and twice the 2 that ended come on top; 2 are held
    list(replica.take_in(report([], num_running=8)))
    assert fill(replica, requests) == 4  # half of what runs
    assert replica.num_held_sequences == len(replica.held) == 12


def test_a_row_of_several_sequences_takes_the_room_of_several(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "num_sequences", 4)
    replica.facts, requests = FACTS, make_requests(90)
    given = requests[:]
    assert fill(replica, requests) == 1
    list(replica.take_in(report([], num_running=4)))
    assert fill(replica, requests) == 1
    list(replica.take_in(report(given[:1], num_running=8)))
    assert replica.num_held_sequences == 4
    assert fill(replica, requests) == 3  # 8 run and twice the 4 that ended come on top


def test_rows_travel_without_their_columns_and_come_back_with_them(replica: Any) -> None:
    replica.facts, [request] = FACTS, make_requests(1)
    replica.give([request])
    replica.send()
    replica.send()
    [orders] = replica.process.sent
    assert [sent.row.data for sent in orders.requests] == [{}]
    [completion] = replica.take_in(report([request], num_running=1))
    assert completion.row == request.row
    assert not replica.held


def test_suspects_run_alone(replica: Any) -> None:
    replica.facts, requests = FACTS, make_requests(2)
    replica.give(requests, are_suspects=True)
    assert not replica.has_room
    list(replica.take_in(report(requests[:1], num_running=2)))
    assert not replica.has_room
    list(replica.take_in(report(requests[1:], num_running=1)))
    assert replica.has_room


def test_time_that_is_short_is_told_and_stops_an_engine_that_loads(replica: Any) -> None:
    replica.send(is_near=True)
    assert replica.process.stopped
    assert not replica.process.sent
    replica.start()
    replica.facts = FACTS
    replica.send(is_near=True, is_past=True)
    assert replica.process.sent == [Orders([], is_near=True, is_past=True)]


def test_a_death_counts_until_a_row_is_completed_and_statistics_stay(replica: Any) -> None:
    replica.facts, requests = FACTS, make_requests(2)
    replica.give(requests)
    list(replica.take_in(report(requests[:1], 2, EngineStats(num_steps=7, num_running=2))))
    for num_deaths in (1, 2):
        assert replica.end() == "SIGKILL"
        assert replica.num_deaths == num_deaths
        replica.start()
        assert not replica.held
        assert not replica.num_held_sequences
    assert [stats.num_steps for stats in replica.stats] == [7, 0, 0]
    assert not any(stats.num_running for stats in replica.stats)
    replica.give(requests)
    list(replica.take_in(report(requests, 2)))
    assert replica.num_deaths == 0
