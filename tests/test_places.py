from __future__ import annotations

import os
import pickle

import pytest
import torch

from cbatch.config import EngineConfig
from cbatch.engine.places import Place, find_places, share_cpus
from cbatch.errors import RowError, UsageError
from cbatch.machine import num_cpus, numa_nodes


def test_shares_are_even_and_within_a_node_where_that_can_be() -> None:
    nodes = [[0, 1, 2, 3], [4, 5]]
    assert share_cpus(nodes, 2) == [(0, 1, 2, 3), (4, 5)]
    assert share_cpus(nodes, 4) == [(0, 1), (2, 3), (4,), (5,)]
    assert share_cpus(nodes, 3) == [(0, 1), (2, 3), (4, 5)]
    assert sorted(map(len, share_cpus([[0, 1]], 3))) == [0, 1, 1]


def test_engines_on_cpus_have_different_ones_and_divide_the_threads() -> None:
    mine = os.sched_getaffinity(0)
    places = find_places(EngineConfig(device="cpu", threads=6, data_parallel_size="2"))
    cpus = [cpu for place in places for cpu in place.cpus]
    assert sorted(cpus) == sorted(mine)
    assert [place.num_threads for place in places] == [max(1, 6 * len(place.cpus) // len(mine)) for place in places]
    assert {place.device for place in places} == {"cpu"}
    assert len(find_places(EngineConfig(device="cpu", data_parallel_size="auto"))) == len(numa_nodes())


def test_engines_on_gpus_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for size, count in (("auto", 4), ("3", 3)):
        places = find_places(EngineConfig(threads=8, data_parallel_size=size))
        assert [str(place) for place in places] == [f"cuda:{index}" for index in range(count)]
        assert {place.num_threads for place in places} == {8 // count}
    assert [str(place) for place in find_places(EngineConfig(device="cuda:2", data_parallel_size="auto"))] == ["cuda:2"]
    for device, size in (("auto", "5"), ("cuda:1", "2")):
        with pytest.raises(UsageError, match="--data-parallel-size"):
            find_places(EngineConfig(device=device, data_parallel_size=size))


def test_one_engine_is_where_it_was_asked_to_be() -> None:
    assert find_places(EngineConfig(device="cpu", threads=3)) == [Place("cpu", 3)]
    assert find_places(EngineConfig(device="cpu")) == [Place("cpu", num_cpus())]


def test_the_error_of_a_row_passes_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RowError("kind", "a\nb")))
    assert (error.kind, str(error)) == ("kind", "a\\nb")
