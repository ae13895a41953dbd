from __future__ import annotations

import pytest

from cbatch.config import SamplingParams
from cbatch.engine.backlog import Backlog
from cbatch.rows.request import Request, Row


class Source:
    """Requests of which `there` have come so far."""

    ended = False

    def __init__(self, requests: list[Request], there: int | None = None) -> None:
        self.requests, self.there = requests, len(requests) if there is None else there
        self.waits: list[bool] = []

    def take(self, wait: bool) -> Request | None:
        self.waits.append(wait)
        if not self.there:
            return None
        self.there -= 1
        return self.requests.pop(0)


def make_request(index: int, token_ids: list[int], max_tokens: int = 16) -> Request:
    return Request(Row("prompts", index, "", {}, 1), token_ids, SamplingParams(max_tokens=max_tokens), random_key=0)


def indices(requests: list[Request]) -> list[int]:
    return [request.row.index for request in requests]


def some(count: int) -> list[Request]:
    return [make_request(index, [1]) for index in range(count)]


@pytest.mark.parametrize(("num_waiting", "num_taken"), [(0, 40), (1, 39), (9, 31), (10, 0), (11, 0), (40, 0), (100, 0)])
def test_a_window_is_filled_when_fewer_wait_than_a_step_could_admit(num_waiting: int, num_taken: int) -> None:
    assert len(Backlog(10, 100, "input").take(Source(some(90)), num_waiting, is_idle=False)) == num_taken


@pytest.mark.parametrize("order", ["input", "auto"])
def test_what_has_not_come_is_not_waited_for(order: str) -> None:
    source = Source(some(9), there=3)
    assert indices(Backlog(10, 100, order).take(source, 0, is_idle=False)) == [0, 1, 2]
    assert not any(source.waits)
    assert Backlog(10, 100, order).take(source, 3, is_idle=False) == []


@pytest.mark.parametrize("there", [0, 1, 5])
def test_only_the_first_request_has_a_moment_to_come_and_only_if_nothing_else_is_to_do(there: int) -> None:
    source = Source(some(9), there)
    assert len(Backlog(10, 100, "auto").take(source, 0, is_idle=True)) == there
    assert source.waits == [True] + [False] * there


def test_a_source_that_has_ended_is_not_asked() -> None:
    source = Source(some(9))
    source.ended = True
    assert Backlog(10, 100, "auto").take(source, 0, is_idle=True) == []
    assert source.waits == []


def test_the_order_of_the_input_is_kept_if_asked_for() -> None:
    requests = [make_request(0, [9], 1), make_request(1, [1], 64), make_request(2, [5], 8)]
    assert indices(Backlog(10, 100, "input").take(Source(requests), 0, is_idle=False)) == [0, 1, 2]


def test_the_longest_go_first_and_those_that_begin_alike_side_by_side() -> None:
    requests = [
        make_request(0, [7, 7], 8),
        make_request(1, [1, 2], 64),
        make_request(2, [3, 4], 64),
        make_request(3, [1, 2, 9], 62),  # about as many
        make_request(4, [7], 1),
    ]
    assert indices(Backlog(10, 100, "auto").take(Source(requests), 0, is_idle=False)) == [1, 3, 2, 0, 4]


def test_no_more_is_expected_of_a_row_than_fits() -> None:
    requests = [make_request(0, [1] * 92, 1000), make_request(1, [1], 32), make_request(2, [1] * 200, 1000)]
    assert indices(Backlog(10, 100, "auto").take(Source(requests), 0, is_idle=False)) == [1, 0, 2]


def test_each_window_is_ordered_by_itself() -> None:
    source = Source([make_request(index, [1], max_tokens=4**index) for index in range(6)])
    backlog = Backlog(1, 10_000, "auto")
    assert indices(backlog.take(source, 0, is_idle=False)) == [3, 2, 1, 0]
    assert indices(backlog.take(source, 0, is_idle=False)) == [5, 4]
