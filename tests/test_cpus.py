"""The default numbers of threads and workers are what the job was given, also in a container."""

import os

import pytest

from pcrshard.cpus import decoding_threads, usable_cpus
from pcrshard.encoding import worker_processes


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("", 8), ("max 100000\n", 8), ("450000 100000\n", 4), ("50000 100000\n", 1)],
)
def test_a_quota_counts(tmp_path, monkeypatch, quota, expected):
    """A job bound to eight CPUs has what a container's quota leaves, whatever the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    path = tmp_path / "sys/fs/cgroup/cpu.max"
    path.parent.mkdir(parents=True)
    path.write_text(quota)
    assert usable_cpus(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"), [(8, 1, 7), (1, 1, 1), (8, 2, 3), (8, 16, 1)]
)
def test_threads_are_the_cpus_of_a_rank(monkeypatch, cpus, ranks, expected):
    """The ranks of a node share its CPUs, and each leaves one of them to training."""
    monkeypatch.setattr("pcrshard.cpus.usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert decoding_threads() == expected


def test_workers_are_the_usable_cpus(monkeypatch):
    """In a container of one CPU, `encode` starts no worker for each of the machine's others."""
    monkeypatch.setattr(worker_processes, "usable_cpus", lambda: 1)
    results = worker_processes.run_tasks(lambda _: os.getpid(), int, [0, 1])
    assert {pid for _, pid in results} == {os.getpid()}
