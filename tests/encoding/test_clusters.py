"""Encoding on clusters: the same bytes on every engine, even if workers die."""

import contextlib
import functools
import os
import pathlib
import shutil
import signal
import sys
import time

import pytest
from support import ROOT, read_all, run_encode, write_files

from pcrshard import EncodeOptions, encode
from pcrshard.cli.main import main
from pcrshard.encoding.clusters import dask_executor, encode_on_slurm
from pcrshard.encoding.worker_processes import run_tasks
from pcrshard.errors import CorruptJpeg, EncodeError, MissingDependency
from pcrshard.testing import make_jpeg

# Dask


@contextlib.contextmanager
def dask_cluster(workers=2):
    """A scheduler, and worker processes of one thread, which are started again if they die."""
    distributed = pytest.importorskip("distributed", reason="NO DASK: pip install distributed")
    how = {"threads_per_worker": 1, "dashboard_address": ":0"}
    with distributed.LocalCluster(n_workers=workers, **how) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dask():
    with dask_cluster() as cluster:
        yield cluster


def test_dask_writes_the_same_bytes_though_a_worker_is_killed(
    dask, larger_folder, larger_dataset, tmp_path
):
    """A Dask worker killed midway costs time, not data: the folder is that of a run on this
    machine.
    """
    pids = [worker.pid for worker in dask.workers.values()]
    killed = []

    def kill_one(done, total):
        if not killed:
            os.kill(pids[0], signal.SIGKILL)
            killed.append((done, total))

    how = {"num_shards": 12, "progress": kill_one}
    with dask_executor(dask.scheduler_address) as executor:
        run_encode(larger_folder, tmp_path, executor=executor, **how)
    assert killed[0][0] < killed[0][1]
    assert read_all(tmp_path) == read_all(larger_dataset)


def test_dask_on_the_command_line(dask, synthetic_folder, dataset, tmp_path, capsys):
    """``--engine dask --scheduler ADDRESS`` encodes and resumes like any other engine."""
    command = ["encode", str(synthetic_folder), str(tmp_path), "--num-shards", "4"]
    command += ["--engine", "dask", "--scheduler", dask.scheduler_address]
    assert main(command) == 0
    assert read_all(tmp_path) == read_all(dataset)
    (tmp_path / "data-000001.tar").unlink()
    assert main([*command, "--resume"]) == 0
    assert read_all(tmp_path) == read_all(dataset)
    assert "samples: 24\nshards: 4\n" in capsys.readouterr().out


def test_a_bad_image_on_dask_is_named(dask, larger_folder, tmp_path):
    """An error of a remote worker is the same one line as here, and no worker writes after it."""
    cut = make_jpeg(9, 1500, 1500, quality=95)[:-30]
    src = write_files(tmp_path / "src", {"cut.jpg": cut})
    for path in larger_folder.iterdir():
        (src / path.name).symlink_to(path)
    with (
        dask_executor(dask.scheduler_address) as executor,
        pytest.raises(CorruptJpeg, match=r"no EOI.*--on-error skip.*cut\.jpg"),
    ):
        run_encode(src, tmp_path / "dst", num_shards=4, executor=executor)
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
    lost = functools.partial(pytest.raises, EncodeError)
    with dask_cluster() as cluster, lost(match=r"lost the Dask cluster.*--resume"):
        how = {"num_shards": 12, "progress": lambda *_: cluster.sync(cluster.scheduler.close)}
        with dask_executor(cluster.scheduler_address) as executor:
            run_encode(larger_folder, tmp_path / "dst", executor=executor, **how)
    with dask_cluster() as cluster, lost(match=r"lost the Dask cluster.*KilledWorker"):
        with dask_executor(cluster.scheduler_address) as executor:
            list(run_tasks(os._exit, int, [0], executor=executor))
    with dask_cluster(workers=0) as cluster, lost(match=r"lost the Dask cluster.*workers"):
        with dask_executor(cluster.scheduler_address, timeout=2):
            pass


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


@pytest.mark.long
def test_a_slurm_job_near_its_time_limit_goes_on(on_cluster, larger_folder, tmp_path):
    """A job that gets the signal of the time limit goes back into the queue and keeps what it had;
    progress is that of the journals.
    """
    jpegs = [path.read_bytes() for path in larger_folder.iterdir()]
    files = {f"{number}.jpg": jpeg for number, jpeg in enumerate(jpegs * 5)}
    src, dst = str(write_files(tmp_path / "src", files)), str(tmp_path / "dst")
    options = EncodeOptions(num_shards=40)
    calls = []

    def signal_once(done, total):
        if total != len(files):  # the sample that is read before the jobs
            return
        if done and not any(calls):
            on_cluster.run("scancel", "--signal=USR2", "--name=pcrshard-encode")
        calls.append(done)

    encode_on_slurm(src, dst, options, jobs=1, progress=signal_once, poll=0.1)
    assert calls == sorted(calls)
    assert len(set(calls)) > 2
    encode(src, tmp_path / "local", options, workers=1)
    assert read_all(dst) == read_all(tmp_path / "local")


def test_a_slurm_job_that_fails_is_told_with_its_log(on_cluster, mixed_folder, tmp_path):
    """The error of a bad image comes back with its text, and the logs are kept."""
    with pytest.raises(EncodeError, match=r"(?s)a SLURM job failed.*CorruptJpeg|expected a JPEG"):
        encode_on_slurm(str(mixed_folder), str(tmp_path / "dst"), jobs=2, poll=0.3)
    assert list(pathlib.Path.cwd().glob("pcrshard-slurm-*/*_log.err"))


def test_options_that_sbatch_refuses(on_cluster, synthetic_folder, tmp_path):
    """Options that sbatch refuses raise its own message."""
    with pytest.raises(EncodeError, match=r"cannot submit SLURM jobs.*partition"):
        encode_on_slurm(str(synthetic_folder), str(tmp_path / "dst"), sbatch={"partition": "none"})
