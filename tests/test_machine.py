"""What a machine says of itself, written into a folder as /proc and /sys would have it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from cbatch import machine
from cbatch.errors import UsageError
from cbatch.machine import available_memory, cpu_has_bfloat16, cpu_name, num_cpus, numa_nodes, resolve_device

GIB = 1024**3


def write(root: Path, path: str, content: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{content}\n")


def join(root: Path, *membership: str) -> None:
    """Make this process a member of cgroups, on a machine that has 1 GiB of free memory."""
    write(root, "proc/self/cgroup", "\n".join(membership))
    write(root, "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {1024**2} kB")


def limit_memory(root: Path, cgroup: str, limit: object, used: int, inactive: int = 0) -> None:
    names = ("limit_in_bytes", "usage_in_bytes") if cgroup.startswith("memory") else ("max", "current")
    for name, value in zip(names, (limit, used), strict=True):
        write(root, f"sys/fs/cgroup/{cgroup}/memory.{name}", value)
    write(root, f"sys/fs/cgroup/{cgroup}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7")


# Memory


def test_every_memory_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    limit_memory(tmp_path, "a/b", 1000, 400)
    limit_memory(tmp_path, "a", 5000, 4800)
    join(tmp_path, "0::/a/b")
    assert available_memory(tmp_path) == 200
    join(tmp_path, "0::/a")
    limit_memory(tmp_path, "a", 5000, 4000)
    assert available_memory(tmp_path) == 1000
    join(tmp_path, "0::/a/b")
    assert available_memory(tmp_path) == 600


@pytest.mark.parametrize("path", ["a", "", "gone"])
def test_no_limit_is_no_limit(tmp_path: Path, path: str) -> None:
    limit_memory(tmp_path, "a", "max", 400)
    join(tmp_path, f"0::/{path}")
    assert available_memory(tmp_path) == GIB


def test_file_cache_that_can_be_dropped_is_room(tmp_path: Path) -> None:
    limit_memory(tmp_path, "a", 1000, 900, inactive=300)
    join(tmp_path, "0::/a")
    assert available_memory(tmp_path) == 400


def test_use_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    limit_memory(tmp_path, "a", 1000, 1200)
    join(tmp_path, "0::/a")
    assert available_memory(tmp_path) == 0


def test_memory_in_the_first_version_of_cgroups(tmp_path: Path) -> None:
    limit_memory(tmp_path, "memory/job/step", 2000, 500)
    limit_memory(tmp_path, "memory", 2**63 - 4096, 10**6)
    write(tmp_path, "sys/fs/cgroup/cpu/job/memory.limit_in_bytes", 1)
    write(tmp_path, "sys/fs/cgroup/cpu/job/memory.usage_in_bytes", 1)
    join(tmp_path, "5:cpu,cpuacct:/job", "4:memory:/job/step", "1:name=systemd:/job")
    assert available_memory(tmp_path) == 1500
    join(tmp_path, "4:memory:/")
    assert available_memory(tmp_path) == GIB


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    limit_memory(tmp_path, "", 3000, 1000)
    limit_memory(tmp_path, "memory", 700, 100)
    join(tmp_path, "0::/docker/0123")
    assert available_memory(tmp_path) == 2000
    join(tmp_path, "4:memory:/docker/0123")
    assert available_memory(tmp_path) == 600


def test_files_that_are_not_there_do_not_matter(tmp_path: Path) -> None:
    assert 0 < available_memory(tmp_path) < 2**50
    assert num_cpus(tmp_path) == num_cpus(tmp_path / "no such folder") >= 1
    join(tmp_path, "0::/a")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", 1000)  # and no memory.current
    assert available_memory(tmp_path) == GIB


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory() < 2**50


# CPUs


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cpus")
def test_cpus_are_those_allowed_within_the_quota_of_every_cgroup(tmp_path: Path) -> None:
    assert num_cpus(tmp_path) == 8
    join(tmp_path, "0::/slurm/job_7/step_0/task_0")
    for cgroup, quota, expected in (
        ("slurm/job_7/step_0/task_0", "max 100000", 8),
        ("", "1600000 100000", 8),
        ("slurm", "500000 100000", 5),
        ("slurm/job_7", "250000 100000", 3),  # the job's own: two and a half
        ("slurm/job_7/step_0", "max 100000", 3),
        ("slurm/job_8", "100000 100000", 3),  # another job's
        ("slurm/job_7/step_0/task_0", "1000 100000", 1),
    ):
        write(tmp_path, f"sys/fs/cgroup/{cgroup}/cpu.max", quota)
        assert num_cpus(tmp_path) == expected


@pytest.mark.usefixtures("eight_cpus")
def test_cpus_in_the_first_version_of_cgroups(tmp_path: Path) -> None:
    join(tmp_path, "4:memory:/job", "5:cpu,cpuacct:/job/step", "0::/")
    for cgroup, quota, expected in (
        ("cpu/job/step", -1, 8),
        ("memory/job", 100000, 8),
        ("cpu/job", 450000, 5),
        ("cpu", 200000, 2),
    ):
        write(tmp_path, f"sys/fs/cgroup/{cgroup}/cpu.cfs_quota_us", quota)
        write(tmp_path, f"sys/fs/cgroup/{cgroup}/cpu.cfs_period_us", 100000)
        assert num_cpus(tmp_path) == expected


@pytest.mark.usefixtures("eight_cpus")
def test_a_container_may_have_a_quota_at_its_root(tmp_path: Path) -> None:
    join(tmp_path, "0::/docker/0123")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "300000 100000")
    assert num_cpus(tmp_path) == 3


def test_cpus_without_affinity_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.allowed_cpus() == []
    assert num_cpus(tmp_path) == 6


def nodes(root: Path, *cpu_lists: str, siblings: dict[int, str] | None = None) -> Path:
    """What Linux says of NUMA nodes and of CPUs that share a core."""
    for number, cpus in enumerate(cpu_lists):
        write(root, f"sys/devices/system/node/node{number}/cpulist", cpus)
    for cpu, text in (siblings or {}).items():
        write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    return root


@pytest.mark.usefixtures("eight_cpus")
def test_nodes_hold_the_cpus_that_may_be_used_with_those_of_a_core_side_by_side(tmp_path: Path) -> None:
    assert numa_nodes(nodes(tmp_path / "a", "0-3,8-11", "4-7,12-15")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numa_nodes(nodes(tmp_path / "b", "0-7", "8-15", "")) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    assert numa_nodes(nodes(tmp_path / "c", "0-7", siblings=siblings)) == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert numa_nodes(tmp_path / "nothing") == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_name_and_abilities_of_a_cpu(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name : Some CPU\nflags : fpu avx512f amx_bf16 sse2\n")
    assert (cpu_name(tmp_path), cpu_has_bfloat16(tmp_path)) == ("Some CPU", True)
    write(tmp_path, "proc/cpuinfo", "processor : 0\nFeatures : fp asimd bf16x\n")
    assert not cpu_has_bfloat16(tmp_path)
    assert not cpu_has_bfloat16(tmp_path / "nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_has_a_cpu() -> None:
    assert cpu_name() != ""
    assert 1 <= num_cpus() <= len(os.sched_getaffinity(0))


# GPUs


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    for there, auto in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert resolve_device("auto") == auto
        assert resolve_device("cpu") == "cpu"
    assert resolve_device("cuda:1") == "cuda:1"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    with pytest.raises(UsageError, match="Tesla T4: has no matrix units for bfloat16"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        resolve_device("cuda:0")
    with pytest.raises(UsageError, match="--device"):
        resolve_device("tpu")
