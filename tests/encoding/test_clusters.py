"""Encoding on clusters: the same bytes on every engine, even if workers die."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support import ROOT, read_all, run_encode

from pcrshard import EncodeOptions, encode
from pcrshard.cli.main import main
from pcrshard.encoding.clusters import dask_executor, encode_on_slurm
from pcrshard.encoding.worker_processes import run_tasks
from pcrshard.errors import (
    CorruptJpeg,
    EncodeError,
    MissingDependency,
)
from pcrshard.testing import make_jpeg

# Dask


@contextlib.contextmanager
def dask_cluster(folder, workers=2):
    """A scheduler and workers of one thread, as processes of their own: (address, processes of the
    workers).
    """
    reason = "NO DASK: pip install distributed"
    distributed = pytest.importorskip("distributed", reason=reason)
    quiet = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "start_new_session": True,
    }
    run = [sys.executable, "-W", "ignore", "-m", "distributed.cli"]
    scheduler = subprocess.Popen(
        [
            *run[:-1],
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--no-jupyter",
        ],
        **quiet,
    )
    started = []
    try:
        address = next(
            found[0] for line in scheduler.stdout if (found := re.search(r"tcp://[\d.]+:\d+", line))
        )
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", folder]
        command = [*run[:-1], "distributed.cli.dask_worker", address, *options]
        started = [
            subprocess.Popen(command, **quiet | {"stdout": subprocess.DEVNULL})
            for _ in range(workers)
        ]
        if workers:
            with distributed.Client(address, set_as_default=False) as client:
                client.wait_for_workers(workers, timeout=30)
        yield address, started
    finally:
        for process in [*started, scheduler]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        scheduler.stdout.close()


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    with dask_cluster(tmp_path_factory.mktemp("dask")) as found:
        yield found


def test_dask_writes_the_same_bytes_though_a_worker_is_killed(larger_folder, tmp_path):
    """A Dask worker killed midway costs time, not data: the folder is that of a run on this
    machine.
    """
    encode(str(larger_folder), str(tmp_path / "local"), EncodeOptions(num_shards=12), workers=1)
    killed = []

    def kill_one(done, total):
        if not killed:
            os.killpg(workers[0].pid, signal.SIGKILL)
            killed.append((done, total))

    with dask_cluster(tmp_path) as (address, workers):
        with dask_executor(address) as executor:
            run_encode(
                larger_folder,
                tmp_path / "dask",
                num_shards=12,
                executor=executor,
                progress=kill_one,
            )
    assert killed[0][0] < killed[0][1]
    assert read_all(tmp_path / "dask") == read_all(tmp_path / "local")


def test_dask_on_the_command_line(dask, synthetic_folder, dataset, tmp_path, capsys):
    """``--engine dask --scheduler ADDRESS`` encodes and resumes like any other engine."""
    address, _ = dask
    command = [
        "encode",
        str(synthetic_folder),
        str(tmp_path),
        "--num-shards",
        "4",
        "--engine",
        "dask",
        "--scheduler",
        address,
    ]
    assert main(command) == 0
    assert read_all(tmp_path) == read_all(dataset)
    (tmp_path / "data-000001.tar").unlink()
    assert main([*command, "--resume"]) == 0
    assert read_all(tmp_path) == read_all(dataset)
    assert "24 samples in 4 shards" in capsys.readouterr().out


def test_a_bad_image_on_dask_is_named(dask, larger_folder, tmp_path):
    """An error of a remote worker is the same one line as here, and no worker writes after it."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "cut.jpg").write_bytes(make_jpeg(9, 1500, 1500, quality=95)[:-30])
    for path in larger_folder.iterdir():
        (tmp_path / "src" / path.name).symlink_to(path)
    with (
        dask_executor(dask[0]) as executor,
        pytest.raises(CorruptJpeg, match=r"no EOI.*--on-error skip.*cut\.jpg"),
    ):
        run_encode(tmp_path / "src", tmp_path / "dst", num_shards=4, executor=executor)
    shutil.rmtree(tmp_path / "dst")
    time.sleep(1)
    assert not (tmp_path / "dst").exists()


def test_a_dask_scheduler_that_is_not_there():
    """An unreachable scheduler raises an error with its address within half a minute."""
    with (
        pytest.raises(EncodeError, match=r"cannot reach the Dask scheduler tcp://127\.0\.0\.1:9"),
        dask_executor("tcp://127.0.0.1:9", timeout=1),
    ):
        pass


@pytest.mark.long
def test_dask_clusters_that_fail(larger_folder, tmp_path):
    """A dead scheduler, a task that kills its workers, and a cluster without workers each raise a
    clear error instead of hanging.
    """
    with dask_cluster(tmp_path) as (address, _):
        pids = [
            int(path.parent.name)
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
            if _is_scheduler(path)
        ]

        def kill_scheduler(done, total):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        with (
            pytest.raises(EncodeError, match=r"lost the Dask cluster.*--resume"),
            dask_executor(address) as executor,
        ):
            run_encode(
                larger_folder,
                tmp_path / "dst",
                num_shards=12,
                executor=executor,
                progress=kill_scheduler,
            )
    with dask_cluster(tmp_path, workers=5) as (address, _):
        with (
            pytest.raises(EncodeError, match=r"lost the Dask cluster.*KilledWorker"),
            dask_executor(address) as executor,
        ):
            list(run_tasks(os._exit, {0: 0}, executor=executor))
    with dask_cluster(tmp_path, workers=0) as (address, _):
        with (
            pytest.raises(EncodeError, match=r"lost the Dask cluster.*workers"),
            dask_executor(address, timeout=2),
        ):
            pass


def _is_scheduler(path):
    """Whether a process is a Dask scheduler that this one started."""
    with contextlib.suppress(OSError):
        parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
        return b"dask_scheduler" in path.read_bytes() and int(parent) == os.getpid()
    return False


def test_a_missing_package_is_named(monkeypatch, synthetic_folder, tmp_path):
    """If a package is missing, the error says what to install."""
    for name in ("distributed", "submitit", "submitit.slurm", "submitit.slurm.slurm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"pip install 'pcrshard\[dask\]'"):
        dask_executor("x").__enter__()
    with pytest.raises(MissingDependency, match=r"pip install 'pcrshard\[slurm\]'"):
        encode_on_slurm(str(synthetic_folder), str(tmp_path))


# SLURM


@pytest.fixture
def on_cluster(cluster, monkeypatch, tmp_path):
    """This process uses the test cluster, and works in a folder of its own."""
    pytest.importorskip("submitit", reason="NO SUBMITIT: pip install submitit")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    # Jobs import this checkout, and the functions of this module.
    paths = (ROOT, ROOT / "tests", pathlib.Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return cluster


def on_slurm(src, dst, **how):
    """Encode on the test cluster, of which nobody else uses a partition."""
    return encode_on_slurm(str(src), str(dst), EncodeOptions(num_shards=12), poll=0.3, **how)


def test_slurm_on_the_command_line(on_cluster, synthetic_folder, dataset, tmp_path):
    """``--engine slurm`` runs the parts in SLURM jobs, and leaves the same dataset and nothing
    else; another number of jobs resumes it.
    """
    command = ["encode", str(synthetic_folder), str(tmp_path / "dst"), "--num-shards", "4"]
    command += ["--engine", "slurm", "--workers", "2"]
    for option in ("partition=test", "time=10", "cpus_per_task=2"):
        command += ["--slurm-option", option]
    assert main(command) == 0
    assert read_all(tmp_path / "dst") == read_all(dataset)
    assert list((tmp_path / "cwd").iterdir()) == []
    assert main(command) == 1
    (tmp_path / "dst" / "data-000001.tar").unlink()
    assert main([*command, "--resume", "--workers", "3"]) == 0
    assert read_all(tmp_path / "dst") == read_all(dataset)


def test_a_slurm_job_near_its_time_limit_goes_on(on_cluster, larger_folder, tmp_path):
    """A job that gets the signal of the time limit goes back into the queue and keeps what it had;
    progress is that of the journals.
    """
    (tmp_path / "src").mkdir()
    for number, path in enumerate([*larger_folder.iterdir()] * 5):
        (tmp_path / "src" / f"{number}.jpg").symlink_to(path)
    options = EncodeOptions(num_shards=40)
    calls = []

    def signal_once(done, total):
        if done and not any(calls):
            on_cluster.run("scancel", "--signal=USR2", "--name=pcrshard-encode")
        calls.append(done)

    dst = str(tmp_path / "dst")
    encode_on_slurm(str(tmp_path / "src"), dst, options, jobs=1, progress=signal_once, poll=0.1)
    assert calls == sorted(calls)
    assert len(set(calls)) > 2
    encode(tmp_path / "src", tmp_path / "local", options, workers=1)
    assert read_all(dst) == read_all(tmp_path / "local")


def test_a_slurm_job_that_fails_is_told_with_its_log(on_cluster, mixed_folder, tmp_path):
    """The error of a bad image comes back with its text, and the logs are kept."""
    with pytest.raises(EncodeError, match=r"(?s)a SLURM job failed.*CorruptJpeg|expected a JPEG"):
        encode_on_slurm(str(mixed_folder), str(tmp_path / "dst"), jobs=2, poll=0.3)
    assert list(pathlib.Path.cwd().glob("pcrshard-slurm-*/*_log.err"))


def test_options_that_sbatch_refuses(on_cluster, synthetic_folder, tmp_path):
    """Options that sbatch refuses raise its own message."""
    with pytest.raises(EncodeError, match=r"cannot submit SLURM jobs.*partition"):
        on_slurm(synthetic_folder, tmp_path / "dst", sbatch={"partition": "none"})
