from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.model import kv_cache
from cbatch.model.kv_cache import KVCache, LayerShape, available_memory, cache_dtype, count_blocks

CPU = torch.device("cpu")


def group(folder: Path, limit: object, used: int, inactive: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def room(root: Path, *membership: str) -> list[int]:
    file = root.parent / "membership"
    file.write_text("".join(f"{line}\n" for line in membership))
    return sorted(kv_cache._cgroup_room(root, str(file)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def test_every_limit_up_to_the_root_counts(root: Path) -> None:
    group(root / "a/b", 1000, 400)
    group(root / "a", 5000, 4800)
    assert room(root, "0::/a/b") == [200, 600]


def test_no_limit_is_no_limit(root: Path) -> None:
    group(root / "a", "max", 400)
    assert room(root, "0::/a") == []
    assert room(root, "0::/") == []
    assert room(root, "0::/gone") == []


def test_file_cache_that_can_be_dropped_is_room(root: Path) -> None:
    group(root / "a", 1000, 900, inactive=300)
    assert room(root, "0::/a") == [400]


def test_use_above_the_limit_leaves_nothing(root: Path) -> None:
    group(root / "a", 1000, 1200)
    assert room(root, "0::/a") == [0]


def test_first_version_of_cgroups(root: Path) -> None:
    group(root / "memory/job/step", 2000, 500, version=1)
    group(root / "memory", 2**63 - 4096, 10**6, version=1)
    group(root / "cpu/job", 1, 1, version=1)
    rooms = room(root, "5:cpu,cpuacct:/job", "4:memory:/job/step", "1:name=systemd:/job")
    assert rooms == [1500, 2**63 - 4096 - 10**6]


def test_a_container_that_sees_its_own_group_as_the_root(root: Path) -> None:
    group(root, 3000, 1000)
    group(root / "memory", 700, 100, version=1)
    assert room(root, "0::/docker/0123") == [2000]
    assert room(root, "4:memory:/docker/0123") == [600]


def test_other_files_do_not_matter(root: Path) -> None:
    assert room(root) == []
    assert kv_cache._cgroup_room(root, str(root / "no such file")) == []
    (root / "a").mkdir()
    (root / "a/memory.max").write_text("1000\n")  # and no memory.current
    assert room(root, "0::/a") == []


def test_available_memory_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_memory()
    assert 0 < free < 2**50
    monkeypatch.setattr(kv_cache, "_cgroup_room", lambda: [10**18, 12345])
    assert available_memory() == 12345


def nothing() -> int:
    raise AssertionError("the memory was given")


def test_blocks_by_the_memory_asked_for() -> None:
    assert count_blocks(1024, 1 / 1024, 10**9, nothing) == 1024
    assert count_blocks(1025, 1 / 1024, 10**9, nothing) == 1023
    assert count_blocks(1024, 1 / 1024, 100, nothing) == 100
    assert count_blocks(1024, 0.0, 100, nothing) == 0


def test_blocks_by_what_is_left_for_them() -> None:
    assert count_blocks(1000, None, 100, lambda: 5000) == 5
    assert count_blocks(6000, None, 100, lambda: 5000) == 0
    assert count_blocks(1000, None, 3, lambda: 5000) == 3
    assert count_blocks(1000, None, 3, lambda: -5000) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_token_takes_as_many_bytes_as_its_layer_says(dtype: torch.dtype) -> None:
    layers = [LayerShape(2, 16, 16, 0), LayerShape(1, 24, 8, 128)]
    cache = KVCache(dict(enumerate(layers)), num_blocks=3, block_size=5, dtype=dtype, device=CPU)
    for layer, k, v in zip(layers, cache.k.values(), cache.v.values(), strict=True):
        assert k.nbytes + v.nbytes == 15 * layer.bytes_per_token(dtype)
        assert k.shape == (3, 5, layer.num_kv_heads, layer.key_size)
        assert v.shape == (3, 5, layer.num_kv_heads, layer.value_size)


def test_of_int8_a_token_takes_a_scale_for_each_head_too() -> None:
    layer = LayerShape(2, 64, 48, 0)
    cache = KVCache({0: layer}, num_blocks=3, block_size=32, dtype=torch.int8, device=CPU)
    assert cache.k[0].nbytes + cache.v[0].nbytes == 96 * layer.bytes_per_token(torch.int8)
    assert layer.bytes_per_token(torch.int8) == 2 * (64 + 4 + 48 + 4)


BFLOAT16, GPU, SHAPE = torch.bfloat16, torch.device("cuda"), LayerShape(2, 64, 64, 0)


@pytest.mark.parametrize(
    ("name", "device", "capability", "layer", "message"),
    [
        ("int8", GPU, (9, 0), SHAPE, "on a GPU there is fp8"),
        ("fp8", CPU, (9, 0), SHAPE, "on a CPU there is int8"),
        ("fp8", GPU, (8, 6), SHAPE, "Some GPU has no fp8, which needs compute capability 8.9"),
        ("fp8", GPU, (9, 0), LayerShape(2, 64, 32, 0), "does not take this model's heads of 64 and 32 values"),
        ("int8", CPU, (9, 0), LayerShape(2, 24, 24, 0), "does not take this model's heads of 24 and 24 values"),
    ],
)
def test_a_cache_that_a_device_or_a_model_can_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    device: torch.device,
    capability: tuple[int, int],
    layer: LayerShape,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    config = EngineConfig(kv_cache_dtype=name)
    with pytest.raises(UsageError, match=f"--kv-cache-dtype {name}.*{message}"):
        cache_dtype(config, device, BFLOAT16, 32, [SHAPE, layer])


def test_a_cache_has_the_dtype_asked_for_or_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    for name, device, expected in (
        ("auto", CPU, BFLOAT16),
        ("int8", CPU, torch.int8),
        ("fp8", GPU, torch.float8_e4m3fn),
    ):
        assert cache_dtype(EngineConfig(kv_cache_dtype=name), device, BFLOAT16, 32, [SHAPE]) == expected
