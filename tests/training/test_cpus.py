"""The default number of decoding threads is what the job was given, also in a container."""

import os

import pytest

from pcrshard.training.cpus import available_cpus, decoding_threads

CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, CPUS),
        ({"cpu.max": "damaged\n"}, CPUS),
        ({}, CPUS),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path, quotas, expected):
    """A container limited to one CPU counts one, whatever the machine has."""
    for name, text in quotas.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_cpus(str(tmp_path)) == expected


def test_affinity_counts(tmp_path):
    """A task bound to one CPU counts one, and the default is at least one thread."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert available_cpus(str(tmp_path)) == 1
        assert decoding_threads({}, str(tmp_path)) == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_ranks_of_a_node_share_its_cpus(tmp_path):
    """Ranks of one node divide its CPUs instead of each starting a thread per CPU."""
    root = str(tmp_path)
    assert decoding_threads({}, root) == max(CPUS - 1, 1)
    assert decoding_threads({"LOCAL_WORLD_SIZE": str(CPUS)}, root) == 1
