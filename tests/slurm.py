"""A real SLURM cluster of one node for the tests: munged, slurmctld and slurmd of this test run
alone, on free ports, in a folder of its own.
"""

import contextlib
import getpass
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile

import pytest
from support import is_alive, wait_for

CPUS = 8  # configured in SLURM, possibly more than exist: tasks share the cores
PROGRAMS = [
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
    "scancel",
    "scontrol",
    "sinfo",
]
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """
ClusterName=pcrshard
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
# A requeued job waits until the credential of its first run is out; five seconds is the least that
# SLURM takes, 120 its default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=2
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The cluster, and what tests ask of it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        # A test run may itself be a SLURM job; its jobs must not take that job's variables for
        # their own.
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_"))
        }
        self.environment = clean | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command, check=True, **options):
        """Run a command with this cluster's SLURM; returns its output."""
        options = {"env": self.environment, "timeout": 60} | options
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, **options
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def state(self, job):
        """A job's state in SLURM's word."""
        shown = dict(
            field.partition("=")[::2]
            for field in self.run("scontrol", "show", "job", job, "-o").split()
        )
        return shown["JobState"]

    def wait(self, job, seconds=60.0):
        """Wait for a job to complete; fails at once where it ends otherwise."""
        ends = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        wait_for(lambda: self.state(job) in ends, seconds, pause=0.1)
        assert self.state(job) == "COMPLETED", self.logs()

    def logs(self):
        """The ends of the daemons' logs."""
        return "\n".join(
            f"{log}: {log.read_text(errors='replace')[-600:]}" for log in self.folder.glob("*.log")
        )


@contextlib.contextmanager
def cluster():
    """Start the cluster; end it, its jobs and its folder."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        pytest.skip(f"NO SLURM: {', '.join(lacking)} not found: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip(
            "NO SLURM: slurmd needs root to start jobs; run the tests as root, in a container say"
        )
    folder = tempfile.mkdtemp(prefix="pcrshard-slurm-", dir="/tmp")  # a socket's path must be short
    os.chmod(folder, 0o755)
    found = Cluster(folder)
    try:
        _start(found)
        yield found
    finally:
        _stop(found)


def _start(found):
    folder = found.folder
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    with contextlib.ExitStack() as taken:  # ports that nobody listens on now
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        controller, node = (each.getsockname()[1] for each in sockets)
    text = CONF.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        controller=controller,
        node=node,
        cpus=CPUS,
    )
    (folder / "slurm.conf").write_text(text)
    environment = {"env": found.environment | {"PATH": PATH}}
    options = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options["socket"] = "socket"
    files = [f"--{option}={folder}/munge.{name}" for option, name in options.items()]
    found.run("munged", "--force", *files, **environment)
    found.run("slurmctld", **environment)
    found.run("slurmd", **environment)
    idle = ("sinfo", "--noheader", "--format=%t")
    wait_for(lambda: found.run(*idle, check=False) == "idle", 15)
    assert found.run(*idle) == "idle", found.logs()


def _stop(found):
    """End jobs, then the daemons in the reverse order."""
    if (found.folder / "slurmd.pid").exists():
        kill = ("--quiet", "--signal=KILL", "--full", "--user", getpass.getuser())
        found.run("scancel", *kill, check=False)
    for name in ("slurmd", "slurmctld", "munge"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((found.folder / f"{name}.pid").read_text())
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: not is_alive(pid), 5)  # called in this round only
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(found.folder, ignore_errors=True)


@pytest.fixture(scope="module", name="cluster")
def cluster_fixture():
    """A cluster for the tests of a module."""
    with cluster() as found:
        yield found
