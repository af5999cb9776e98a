"""The default number of decoding threads is what the job was given, also in a container."""

import os

import pytest

from pcrshard.training.cpus import decoding_threads


@pytest.mark.parametrize(
    ("quota", "ranks", "expected"),
    [
        (None, 1, 7),
        ("max 100000\n", 1, 7),
        ("damaged\n", 1, 7),
        ("450000 100000\n", 1, 3),
        ("50000 100000\n", 1, 1),
        (None, 2, 3),
        (None, 16, 1),
    ],
)
def test_threads_are_the_cpus_of_a_rank(tmp_path, monkeypatch, quota, ranks, expected):
    """A job bound to eight CPUs leaves one to training; a container's quota counts, whatever the
    machine has, and the ranks of a node share its CPUs.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if quota is not None:
        path = tmp_path / "sys/fs/cgroup/cpu.max"
        path.parent.mkdir(parents=True)
        path.write_text(quota)
    assert decoding_threads({"LOCAL_WORLD_SIZE": str(ranks)}, str(tmp_path)) == expected
