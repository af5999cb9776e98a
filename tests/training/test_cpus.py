"""How many threads decode by default: what the job was really given, in containers, too."""

import math
import os

import pytest

from pcrshard.training.cpus import available_cpus, cgroup_quota, decoding_threads


def system(folder, membership, **quotas):
    """The files of a system; names of quotas are paths with __ for /."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(membership)
    for name, text in quotas.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("membership", "quotas", "expected"),
    [
        ("0::/job\n", {"job__cpu_max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a__b__cpu_max": "max 100000\n", "a__cpu_max": "300000 100000\n"}, 3),
        ("0::/outside/of/container\n", {"cpu_max": "200000 100000\n"}, 2),
        ("0::/\n", {}, math.inf),
        ("0::/job\n", {"job__cpu_max": "damaged\n"}, math.inf),
    ],
)
def test_the_quota_of_a_control_group_counts(tmp_path, membership, quotas, expected):
    """A container limited to two CPUs counts two, whatever the machine has."""
    assert cgroup_quota(system(tmp_path, membership, **quotas)) == expected


@pytest.mark.parametrize(("quota", "expected"), [("250000\n", 2.5), ("-1\n", math.inf)])
def test_the_first_version_of_control_groups_counts(tmp_path, quota, expected):
    """The quota of cgroup v1, which clusters still use, counts as well."""
    root = system(tmp_path, "4:cpu,cpuacct:/slurm/job\n2:memory:/slurm/job\n")
    group = tmp_path / "sys/fs/cgroup/cpu/slurm/job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota(root) == expected


def test_affinity_counts(tmp_path):
    """A task bound to one CPU counts one, and the default is at least one thread."""
    root = system(tmp_path, "0::/\n")
    mine = os.sched_getaffinity(0)
    assert available_cpus(root) == len(mine)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert available_cpus(root) == 1
        assert decoding_threads({}, root) == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_ranks_of_a_node_share_its_cpus(tmp_path):
    """Ranks of one node divide its CPUs instead of each starting a thread per CPU."""
    root = system(tmp_path, "0::/\n")
    cpus = available_cpus(root)
    assert decoding_threads({}, root) == max(cpus - 1, 1)
    assert decoding_threads({"LOCAL_WORLD_SIZE": str(cpus)}, root) == 1
    assert decoding_threads({"LOCAL_WORLD_SIZE": "all"}, root) == max(cpus - 1, 1)
