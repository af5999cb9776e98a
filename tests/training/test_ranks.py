"""Which process of a job this is: what is given, then torch.distributed, then the launcher's
environment.
"""

import json
import os
import subprocess
import sys
import types

import pytest

from pcrshard.training import ranks
from pcrshard.training.ranks import Rank

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3"}
SRUN = {"SLURM_PROCID": "4", "SLURM_NTASKS": "6", "SLURM_STEP_ID": "0"}
VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """The tests may themselves run in a job."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def distributed(rank, world, *, available=True, initialized=True):
    """A stand-in for ``torch.distributed``."""
    return types.SimpleNamespace(
        is_available=lambda: available,
        is_initialized=lambda: initialized,
        get_rank=lambda: rank,
        get_world_size=lambda: world,
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, (1, 3)),
        (SRUN, (4, 6)),
        ({"SLURM_PROCID": "4", "SLURM_NTASKS": "6"}, (4, 6)),
        (TORCHRUN | SRUN, (1, 3)),
        ({"RANK": "1"} | SRUN, (4, 6)),
        ({"WORLD_SIZE": "8"} | SRUN, (4, 6)),
        ({"RANK": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, (0, 6)),
        ({"SLURM_NTASKS": "6", "SLURM_STEP_ID": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_STEP_ID": "0"}, (0, 6)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "3"}, (0, 1)),
    ],
)
def test_the_environment_of_launchers(environment, expected):
    """torchrun's variables come before srun's, and half a pair says nothing."""
    assert ranks.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        (SRUN, False),
        (TORCHRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, False),
    ],
)
def test_a_batch_script_without_srun_is_told(environment, warned, caplog):
    """A script that sbatch runs is one process of a job of several tasks: it hears that it reads
    one task's part.
    """
    ranks.from_environment(environment)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert all("srun" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "3", "WORLD_SIZE": "3"},
        {"RANK": "-1", "WORLD_SIZE": "3"},
        {"RANK": "one", "WORLD_SIZE": "3"},
        {"RANK": "", "WORLD_SIZE": "3"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "1.0", "WORLD_SIZE": "3"},
        {"SLURM_PROCID": "6", "SLURM_NTASKS": "6"},
        TORCHRUN | {"RANK": "9"} | SRUN,
    ],
)
def test_nonsense_is_refused(environment):
    """An impossible rank raises an error that names the variables, not a silent 0 of 1."""
    with pytest.raises(
        ValueError, match=r"expected (RANK|SLURM_PROCID) below (WORLD_SIZE|SLURM_NTASKS), got '"
    ):
        ranks.from_environment(environment)


def test_what_is_given_comes_first(monkeypatch):
    """An explicit rank wins over everything, torch.distributed over the environment.

    And alone a process is 0 of 1.
    """
    assert ranks.current() == Rank(0, 1)
    for name, value in (TORCHRUN | SRUN).items():
        monkeypatch.setenv(name, value)
    assert ranks.current() == Rank(1, 3)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(7, 8))
    assert ranks.current() == Rank(7, 8)
    assert ranks.current((0, 2)) == Rank(0, 2)
    assert ranks.current().world == 8


@pytest.mark.parametrize("state", [{"available": False}, {"initialized": False}])
def test_torch_without_a_process_group_says_nothing(monkeypatch, state):
    """Importing torch.distributed, or a build without it, does not hide what the launcher said."""
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(7, 8, **state))
    assert ranks.current() == Rank(0, 1)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert ranks.current() == Rank(4, 6)


@pytest.mark.parametrize("given", [(1, 1), (-1, 2), (0, 0), (5, 2)])
def test_a_given_rank_must_be_one(given):
    """An invalid explicit rank is refused where it is passed."""
    with pytest.raises(ValueError, match="expected a rank from 0"):
        ranks.current(given)


def test_agrees_with_the_helper_of_idris(monkeypatch):
    """On Jean Zay ``idr_torch.rank`` and ``idr_torch.size`` are srun's variables.

    And so are ours.
    """
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    # What idr_torch computes: https://github.com/idriscnrs/idr_torch
    idr_torch = types.SimpleNamespace(
        rank=int(os.environ["SLURM_PROCID"]), size=int(os.environ["SLURM_NTASKS"])
    )
    assert ranks.current() == (idr_torch.rank, idr_torch.size)


def test_asking_does_not_import_torch():
    """Looking up the rank does not import torch."""
    program = (
        "import sys; from pcrshard.training import ranks; ranks.current(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


JOB = """
import json, os, sys
import torch, torch.distributed
from pcrshard import PCRDataset, PCRLoader
from pcrshard.training import ranks


def main():
    before = ranks.current()
    torch.distributed.init_process_group("gloo")
    after = ranks.current()
    os.environ.pop("RANK")
    assert ranks.current() == after, "torch.distributed knows it without the environment"
    os.environ["RANK"] = str(after.rank)
    seen = {}
    for workers in (0, 1):
        loader = PCRLoader(PCRDataset(sys.argv[1]), 3, num_workers=workers)
        seen[workers] = [key for batch in loader for key in batch["__key__"]]
    torch.distributed.destroy_process_group()
    with open(f"{sys.argv[2]}/{after.rank}.json", "w") as file:
        json.dump({"before": before, "after": after, "seen": seen}, file)


if __name__ == "__main__":
    main()
"""


def test_torchrun(dataset, tmp_path):
    """Under torchrun each rank reads its own part, whatever starts its workers."""
    (tmp_path / "job.py").write_text(JOB)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
    ]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        str(tmp_path / "job.py"),
        str(dataset),
        str(tmp_path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["before"] for one in found] == [one["after"] for one in found] == [[0, 2], [1, 2]]
    for workers in ("0", "1"):
        parts = [one["seen"][workers] for one in found]
        assert parts == [one["seen"]["0"] for one in found]
        assert len(parts[0]) == len(parts[1]) == 12
        assert len({*parts[0], *parts[1]}) == 24
