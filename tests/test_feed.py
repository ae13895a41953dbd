from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from cbatch.config import SamplingParams
from cbatch.errors import Fatal, RowError
from cbatch.rows.feed import Feed
from cbatch.rows.request import Completion, Request, Row

PARAMS = SamplingParams()


def rows(numbers: Iterator[int] | range) -> Iterator[Row]:
    return (Row("in.jsonl", number, f"in.jsonl:{number + 1}", {}, 2) for number in numbers)


def build(row: Row) -> Request | None:
    return Request(row, [5], PARAMS, 0)


def feed(
    numbers: Iterator[int] | range, make: Callable[[Row], Request | None] = build, capacity: int = 4
) -> tuple[Feed, list[Completion]]:
    failed: list[Completion] = []
    return Feed(rows(numbers), make, failed.append, capacity), failed


def all_of(requests: Feed) -> list[int]:
    found = []
    while not requests.ended:
        if request := requests.take(wait=True):
            found.append(request.row.index)
    return found


def wait_for_end_of(name: str = "reader") -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(timeout=10)
            assert not thread.is_alive()


@pytest.mark.parametrize("capacity", [1, 4, 1000])
def test_every_row_comes_once_and_in_order(capacity: int) -> None:
    requests, failed = feed(range(100), capacity=capacity)
    assert all_of(requests) == list(range(100))
    assert failed == []
    assert requests.take(wait=True) is None
    assert requests.empty()


def test_no_more_than_its_capacity_is_read_ahead() -> None:
    read, full = [], threading.Event()

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            read.append(number)
            if number == 4:
                full.set()
            yield number

    requests, _ = feed(numbers(), capacity=4)
    assert full.wait(10)
    with requests:
        pass  # and read no further
    wait_for_end_of()
    assert len(read) == 5  # four in the queue, one in hand


def test_a_row_that_can_not_become_a_request_fails_and_costs_no_other() -> None:
    def make(row: Row) -> Request | None:
        if row.index % 3 == 1:
            raise RowError("invalid_prompt", f"{row.where}: no")
        return build(row)

    requests, failed = feed(range(9), make)
    assert all_of(requests) == [0, 2, 3, 5, 6, 8]
    assert [completion.row.index for completion in failed] == [1, 4, 7]
    assert {(output.finish_reason, output.text) for completion in failed for output in completion.outputs} == {
        ("error", None)
    }
    assert str(failed[0].error) == "in.jsonl:2: no"


def test_rows_that_are_done_are_passed_over() -> None:
    requests, failed = feed(range(10), lambda row: build(row) if row.index == 7 else None)
    assert all_of(requests) == [7]
    assert failed == []


def test_an_input_of_which_nothing_is_left_is_empty() -> None:
    def refuse(row: Row) -> Request | None:
        raise RowError("invalid_prompt", f"{row.where}: no")

    assert feed(range(0))[0].empty()
    assert feed(range(50), lambda _: None)[0].empty()
    requests, failed = feed(range(50), refuse)
    assert requests.empty()
    assert len(failed) == 50


def test_looking_whether_it_is_empty_takes_nothing_away() -> None:
    requests, _ = feed(range(3))
    assert not requests.empty()
    assert not requests.empty()
    assert all_of(requests) == [0, 1, 2]


def test_without_waiting_there_may_be_nothing_now() -> None:
    gate = threading.Event()

    def numbers() -> Iterator[int]:
        assert gate.wait(10)
        yield 0

    requests, _ = feed(numbers())
    assert requests.take(wait=False) is None
    assert not requests.ended
    gate.set()
    assert all_of(requests) == [0]


@pytest.mark.parametrize("error", [Fatal("this row has changed"), OSError("gone"), KeyboardInterrupt()])
def test_what_ends_the_reading_is_raised_after_the_rows_before_it(error: BaseException) -> None:
    def make(row: Row) -> Request | None:
        if row.index == 2:
            raise error
        return build(row)

    requests, _ = feed(range(9), make)
    assert [request.row.index for request in (requests.take(wait=True), requests.take(wait=True)) if request] == [0, 1]
    with pytest.raises(type(error)):
        all_of(requests)
    assert requests.ended


def test_stopping_ends_the_thread_though_nobody_takes_anything() -> None:
    requests, _ = feed(itertools.count(), capacity=2)
    with requests:
        pass
    wait_for_end_of()
