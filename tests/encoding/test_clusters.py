"""Encoding on clusters: the same bytes whatever runs the shards, whoever dies meanwhile."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from encode_support import (
    die_once,
)
from slurm import cluster_fixture  # noqa: F401
from support import ROOT, read_all, run_encode, wait_for

from pcrshard import EncodeOptions, encode
from pcrshard.cli.main import main
from pcrshard.encoding.clusters import Patience, SlurmPool, open_engine
from pcrshard.encoding.worker_processes import run_tasks
from pcrshard.errors import (
    CorruptJpeg,
    EncodeError,
    MissingDependency,
)
from pcrshard.testing import make_jpeg


def slow(seconds, value):
    time.sleep(seconds)
    return value


def signal_once(flag, value):
    """Announce the time limit to this process, the first time."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGUSR2)
    return value


def bad(text):
    raise CorruptJpeg(text)


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
        with open_engine("dask", scheduler=address) as executor:
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


def test_a_bad_image_on_dask_is_named(dask, tmp_path):
    """An error of a remote worker is the same one line as here."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "cut.jpg").write_bytes(make_jpeg(9)[:-30])
    with (
        pytest.raises(CorruptJpeg, match=r"no EOI.*--on-error skip.*cut\.jpg"),
        open_engine("dask", scheduler=dask[0]) as executor,
    ):
        run_encode(tmp_path / "src", tmp_path / "dst", executor=executor)


def test_a_dask_scheduler_that_is_not_there():
    """The message names the address, after half a minute at most."""
    with (
        pytest.raises(EncodeError, match=r"cannot reach the Dask scheduler tcp://127\.0\.0\.1:9"),
        open_engine("dask", scheduler="tcp://127.0.0.1:9", patience=Patience(connect=1)),
    ):
        pass


@pytest.mark.long
def test_dask_clusters_that_fail(larger_folder, tmp_path):
    """A scheduler that dies, a task that kills its workers, a cluster without workers: each is an
    error that says so, and nobody waits for ever.
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
            pytest.raises(EncodeError, match=r"lost the Dask scheduler.*--resume"),
            open_engine("dask", scheduler=address) as executor,
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
            pytest.raises(EncodeError, match="killed several Dask workers"),
            open_engine("dask", scheduler=address) as executor,
        ):
            list(run_tasks(executor, os._exit, {0: 0}))
    with dask_cluster(tmp_path, workers=0) as (address, _):
        with (
            pytest.raises(EncodeError, match="has no workers"),
            open_engine("dask", scheduler=address, patience=Patience(connect=2)),
        ):
            pass


def _is_scheduler(path):
    """Whether a process is a Dask scheduler that this one started."""
    with contextlib.suppress(OSError):
        parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
        return b"dask_scheduler" in path.read_bytes() and int(parent) == os.getpid()
    return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "dask"], "dask worker ADDRESS"),
        (["--engine", "dask", "--scheduler", "tcp://x:1", "--workers", "3"], "brings its own"),
        (["--scheduler", "tcp://x:1"], "--scheduler needs --engine dask"),
        (["--engine", "dask", "--slurm-option", "a=b"], "--slurm-option needs --engine slurm"),
    ],
)
def test_options_that_do_not_fit(synthetic_folder, tmp_path, capsys, options, message):
    """An option that another engine would need is refused, and nothing is written."""
    assert main(["encode", str(synthetic_folder), str(tmp_path / "dst"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(("engine", "package"), [("dask", "distributed"), ("slurm", "submitit")])
def test_a_missing_package_is_named(engine, package, monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.slurm", None)
    with (
        pytest.raises(MissingDependency, match=rf"pip install 'pcrshard\[{engine}\]'"),
        open_engine(engine, scheduler="x" if engine == "dask" else None),
    ):
        pass


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


QUICK = Patience(results=0.05, queue=0.3)


def test_slurm_on_the_command_line(on_cluster, synthetic_folder, dataset, tmp_path):
    """``--engine slurm`` runs the shards in SLURM jobs, and leaves the same dataset and nothing
    else.
    """
    command = ["encode", str(synthetic_folder), str(tmp_path / "dst"), "--num-shards", "4"]
    command += ["--engine", "slurm", "--workers", "2"]
    for option in ("partition=test", "time=10", "tasks_per_node=2"):
        command += ["--slurm-option", option]
    assert main(command) == 0
    assert read_all(tmp_path / "dst") == read_all(dataset)
    assert list((tmp_path / "cwd").iterdir()) == []


def test_tasks_of_a_lost_slurm_job_run_again(on_cluster, tmp_path):
    """A job that is killed midway (a lost node, a time limit) costs its task some time."""
    flag = tmp_path / "flag"
    with SlurmPool(2, {}, QUICK) as pool:
        futures = [pool.submit(die_once, str(flag), i, "hang") for i in range(8)]
        # All others end while one job hangs: it is not waited for.
        wait_for(lambda: sum(future.done() for future in futures) == 7, seconds=40)
        queue = ("squeue", "--array", "--noheader", "--format=%i")
        wait_for(lambda: len(on_cluster.run(*queue).split()) == 1)
        on_cluster.run("scancel", on_cluster.run(*queue))
        assert [future.result(40) for future in futures] == list(range(8))


def test_a_killed_slurm_worker_is_replaced(on_cluster, tmp_path):
    """So does a job whose process is killed."""
    flag = str(tmp_path / "flag")
    with SlurmPool(1, {}, QUICK) as pool:
        assert [
            future.result(40) for future in [pool.submit(die_once, flag, i) for i in range(3)]
        ] == [0, 1, 2]


def test_errors_of_slurm_jobs_come_back(on_cluster):
    """A task's error is raised here with its text, and the logs are kept."""
    with pytest.raises(CorruptJpeg, match="the text"), SlurmPool(1, {}, QUICK) as pool:
        pool.submit(bad, "the text").result(30)
    assert list(pathlib.Path(pool.folder, "jobs").glob("*_log.err"))


def test_jobs_that_cannot_start_end_the_run(on_cluster, tmp_path, monkeypatch):
    """Jobs that fail before they do anything are tried a few times, then their log is shown."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no-such-module >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with (
        pytest.raises(EncodeError, match=r"(?s)ended 3 times.*no-such-module"),
        SlurmPool(1, {}, QUICK) as pool,
    ):
        pool.submit(slow, 0, 0).result(60)


def test_a_job_whose_time_is_almost_up_leaves_tasks_to_others(on_cluster, tmp_path):
    """The signal before the time limit ends a job after its task; what it had left runs
    elsewhere.
    """
    with SlurmPool(1, {}, QUICK) as pool:
        futures = [pool.submit(signal_once, str(tmp_path / "flag"), i) for i in range(20)]
        assert len({future.result(60) for future in futures}) == 20
        assert len(list(pathlib.Path(pool.folder, "jobs").glob("*_log.out"))) > 4


def test_many_tasks_need_few_jobs(on_cluster):
    """Starting a job takes seconds or minutes, so that jobs do several tasks each."""
    with SlurmPool(2, {}, QUICK) as pool:
        assert list(pool.map(abs, range(-96, 0))) == list(range(96, 0, -1))
        assert len(list(pathlib.Path(pool.folder, "jobs").glob("*_log.out"))) <= 8


def test_options_that_sbatch_refuses(on_cluster):
    """The message is sbatch's own."""
    with (
        pytest.raises(EncodeError, match=r"cannot submit SLURM jobs.*partition"),
        SlurmPool(1, {"partition": "none"}, QUICK) as pool,
    ):
        pool.submit(slow, 0, 0).result(30)
