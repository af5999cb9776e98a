"""Which process of a job this is: what is given, then torch.distributed, then the launcher's
environment.
"""

import sys
import types

import pytest
from support import ROOT, run_python, run_ranks

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
        (TORCHRUN | SRUN, (1, 3)),
        ({"RANK": "1"} | SRUN, (4, 6)),
        ({"RANK": "1"}, None),
        ({"SLURM_NTASKS": "6", "SLURM_STEP_ID": "0"}, None),
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
    assert ranks.current(0, 2) == Rank(0, 2)
    assert ranks.current().world == 8


@pytest.mark.parametrize("state", [{"available": False}, {"initialized": False}])
def test_torch_without_a_process_group_says_nothing(monkeypatch, state):
    """Importing torch.distributed, or a build without it, does not hide what the launcher said."""
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(7, 8, **state))
    assert ranks.current() == Rank(0, 1)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert ranks.current() == Rank(4, 6)


def test_asking_does_not_import_torch():
    """Looking up the rank does not import torch."""
    program = (
        "import sys; from pcrshard.training import ranks; ranks.current(); "
        "sys.exit('torch' in sys.modules)"
    )
    run_python("-c", program)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_validation_that_waits_in_each_step_ends(folder, ranks):
    """With a gloo ``all_gather`` in each step, and an FSDP forward, for any number of samples, also
    resumed: no rank waits for another, every sample comes once, and too few are refused at once.
    """
    script = ROOT / "tests" / "training" / "equal_steps_ranks.py"
    assert run_ranks(script, folder, ranks=ranks).count("done") == ranks
