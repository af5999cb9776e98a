"""The default numbers of threads and workers are what the job was given, also in a container."""

import os

import pytest

from pcrshard.cpus import decoding_threads, usable_cpus
from pcrshard.encoding import worker_processes


@pytest.mark.parametrize(
    ("quota", "ranks", "cpus", "expected"),
    [
        (None, 1, 8, 7),
        ("max 100000\n", 1, 8, 7),
        ("damaged\n", 1, 8, 7),
        ("450000 100000\n", 1, 4, 3),
        ("50000 100000\n", 1, 1, 1),
        (None, 2, 8, 3),
        (None, 16, 8, 1),
    ],
)
def test_threads_are_the_cpus_of_a_rank(tmp_path, monkeypatch, quota, ranks, cpus, expected):
    """A job bound to eight CPUs leaves one to training; a container's quota counts, whatever the
    machine has, and the ranks of a node share its CPUs.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if quota is not None:
        path = tmp_path / "sys/fs/cgroup/cpu.max"
        path.parent.mkdir(parents=True)
        path.write_text(quota)
    assert usable_cpus(str(tmp_path)) == cpus
    assert decoding_threads({"LOCAL_WORLD_SIZE": str(ranks)}, str(tmp_path)) == expected


def test_workers_are_the_usable_cpus(monkeypatch):
    """In a container of one CPU, `encode` starts no worker for each of the machine's others."""
    monkeypatch.setattr(worker_processes, "usable_cpus", lambda: 1)
    results = worker_processes.run_tasks(lambda _: os.getpid(), {0: 0, 1: 1})
    assert {pid for _, pid in results} == {os.getpid()}
