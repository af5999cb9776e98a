"""The job scripts on a real SLURM cluster of one node: encode, stage, train, stop and go on."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from slurm import cluster_fixture, is_alive  # noqa: F401
from support import ROOT, read_all, wait_for

from pcrshard import EncodeOptions, encode
from pcrshard.testing import make_jpeg

SUBMIT = ROOT / "scripts" / "slurm" / "submit"


@pytest.fixture
def jobs(cluster, tmp_path):
    """``jobs(job, *arguments, options=...)`` submits a job script from a folder of its own."""
    environment = cluster.environment | {
        "PYTHON_BIN": os.path.dirname(sys.executable),
        "PYTHONWARNINGS": "ignore",
    }

    def submit(job, *arguments, options=(), **extra):
        line = [SUBMIT, "test-cluster", job, *options, *(["--"] if options else []), *arguments]
        return cluster.run(*line, cwd=tmp_path, env=environment | extra)

    return submit


def log_of(folder, job):
    return "".join(path.read_text() for path in folder.glob(f"*{job}*.log"))


def test_ranks_are_those_of_srun(cluster, tmp_path):
    """Every task of a plain srun knows its rank, with 2 tasks and with 4."""
    code = "from pcrshard.training import ranks; print(*ranks.current())"
    for tasks in (2, 4):
        said = cluster.run("srun", f"--ntasks={tasks}", sys.executable, "-c", code, cwd=tmp_path)
        assert sorted(said.splitlines()) == [f"{rank} {tasks}" for rank in range(tasks)]


def test_encode_array_and_stage(cluster, jobs, synthetic_folder, dataset, tmp_path):
    """An array of four tasks makes the dataset of one run, again changes nothing, and is staged."""
    dst = tmp_path / "dst"
    job = jobs("encode", synthetic_folder, dst, "--num-shards", "4", options=["--array=0-3"])
    again = jobs(
        "encode",
        synthetic_folder,
        dst,
        "--num-shards",
        "4",
        options=["--array=2", f"--dependency=afterany:{job}"],
        PARTS="4",
    )
    staged = jobs(
        "stage", dst, tmp_path / "staged", "--scan", "2", options=[f"--dependency=afterok:{again}"]
    )
    cluster.wait(staged)
    assert read_all(dst) == read_all(dataset), log_of(tmp_path, job)
    assert log_of(tmp_path, job).count("24 samples in 4 shards") >= 1
    assert "24 samples in 4 shards" in log_of(tmp_path, again)
    copies = list((tmp_path / "staged").glob("*.tar"))
    assert len(copies) == 4
    assert all(path.stat().st_size < (dst / path.name).stat().st_size for path in copies)


def test_an_array_task_of_another_array_is_refused(cluster, jobs, synthetic_folder, tmp_path):
    """Task 3 submitted alone would be part 3 of 4: the number of parts that are there is named."""
    dst = tmp_path / "dst"
    first = jobs(
        "encode", synthetic_folder, dst, "--num-shards", "8", options=["--array=0"], PARTS="8"
    )
    second = jobs(
        "encode",
        synthetic_folder,
        dst,
        "--num-shards",
        "8",
        options=["--array=3", f"--dependency=afterany:{first}"],
    )
    cluster.wait(second, ("FAILED",))
    assert "expected parts of 8, as those that are there, got part 3/4" in log_of(tmp_path, second)


# Training


@pytest.fixture(scope="module")
def small_dataset(tmp_path_factory):
    """96 images in 8 shards."""
    folder = tmp_path_factory.mktemp("train")
    for i in range(96):
        path = folder / "src" / "abc"[i % 3] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(i, 48, 40))
    encode(str(folder / "src"), str(folder / "pcr"), EncodeOptions(num_shards=8), workers=1)
    return folder / "pcr"


def rows(run):
    """The log of a training, by step."""
    path = pathlib.Path(run, "log.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sequence(run):
    """Steps with loss and keys; nothing logged twice."""
    return [(row["step"], row["loss"].hex(), row["keys"]) for row in rows(run)]


def stop(cluster, job, run, steps):
    """Send the signal of the time limit after some steps."""
    begin = len(rows(run))
    wait_for(lambda: len(rows(run)) >= begin + steps, 40)
    cluster.run("scancel", "--signal=USR1", "--batch", job)


def test_a_requeued_job_goes_on_exactly(cluster, jobs, small_dataset, tmp_path):
    """A job stopped at its limit, requeued and continued with 4 tasks equals an unbroken one."""
    options = ["--batch", "8", "--epochs", "15", "--exact", "--log-keys"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    reference = jobs("train", small_dataset, whole, *options)
    job = jobs("train", small_dataset, run, *options)
    stop(cluster, job, run, 3)
    wait_for(lambda: "goes back into the queue" in log_of(tmp_path, job), 30)
    assert 3 <= len(rows(run)) < 180, log_of(tmp_path, job)
    stop(cluster, job, run, 3)
    wait_for(lambda: cluster.state(job) == "PENDING", 30)
    cluster.run("scancel", job)
    last = jobs("train", small_dataset, run, *options, options=["--ntasks=4"])
    cluster.wait(reference)
    cluster.wait(last)
    assert [row["world"] for row in rows(run)] == sorted(row["world"] for row in rows(run))
    assert {row["world"] for row in rows(run)} == {2, 4}
    assert sequence(run) == sequence(whole)
    assert len(sequence(run)) == 180
    assert all(
        len({key for _, _, keys in sequence(run)[epoch * 12 : epoch * 12 + 12] for key in keys})
        == 96
        for epoch in range(15)
    )


@pytest.mark.long
@pytest.mark.parametrize("tasks", [2, 4])
def test_a_real_time_limit(cluster, jobs, small_dataset, tmp_path, tasks):
    """SLURM stops a job at its time limit and starts it again; the bits are those of one run."""
    options = ["--batch", "8", "--log-keys", "--size", "8"]
    how = [f"--ntasks={tasks}"]
    run = tmp_path / "run"
    job = jobs(
        "train",
        small_dataset,
        run,
        *options,
        "--epochs",
        "1000000",
        options=[*how, "--time=1", "--signal=B:USR1@30"],
    )
    wait_for(lambda: "goes back into the queue" in log_of(tmp_path, job), 150)
    wait_for(lambda: cluster.state(job) == "RUNNING", 60)
    stop(cluster, job, run, 10)
    wait_for(lambda: cluster.state(job) == "PENDING", 30)
    cluster.run("scancel", job)
    done = len(rows(run))
    whole = tmp_path / "whole"
    epochs = -(-done // 12)
    cluster.wait(
        jobs("train", small_dataset, whole, *options, "--epochs", str(epochs), options=how),
        seconds=300,
    )
    assert sequence(run) == sequence(whole)[:done]


# The course's listing

COURSE = """
import os, sys
import pcrshard
import webdataset as wds
from pcrshard.training import ranks

rank, world_size = ranks.current()  # idr_torch.rank, idr_torch.world_size

def my_splitter(paths):
    paths = list(paths)
    return paths[rank::world_size]

def transform(image):
    return image[:, :16, :16]

paths, train_dataset_len, global_batch_size = sys.argv[1], 96, 16
train_dataset = wds.WebDataset(paths, nodesplitter=my_splitter, shardshuffle=True)\\
                                  {scan}.shuffle(1000)\\
                                  .decode("torchrgb")\\
                                  .to_tuple("jpg", "cls")\\
                                  .map_tuple(transform, lambda x: x)\\
                                  .batched(global_batch_size // world_size)\\
                                  .with_length(train_dataset_len)
nbatches = train_dataset_len // global_batch_size
train_loader = wds.WebLoader(train_dataset, batch_size=None, num_workers=2,
                             persistent_workers=True, prefetch_factor=2).slice(nbatches)
train_loader.length = nbatches

if __name__ == "__main__":
    for epoch in range(2):
        batches = list(train_loader)
        assert len(batches) == train_loader.length == nbatches, len(batches)
        for images, labels in batches:
            assert images.shape == (global_batch_size // world_size, 3, 16, 16)
    print(rank, sum(int(labels.sum()) for images, labels in batches))
"""


@pytest.mark.parametrize("tasks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_listing_of_the_course(cluster, small_dataset, tmp_path, tasks):
    """The course's loader with ``.pcr_scan(5)`` gives every sample once over all ranks."""
    script = tmp_path / "course.py"
    script.write_text(COURSE.replace("{scan}", ".pcr_scan(5)"))
    environment = cluster.environment | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    paths = f"{small_dataset}/data-{{000000..000007}}.tar"
    said = cluster.run(
        "srun", f"--ntasks={tasks}", sys.executable, script, paths, cwd=tmp_path, env=environment
    )
    assert sum(int(line.split()[1]) for line in said.splitlines()) == sum(i % 3 for i in range(96))


def test_the_listing_in_the_documentation_is_the_tested_one():
    """docs/slurm.md shows the same calls."""
    shown = (ROOT / "docs" / "slurm.md").read_text()
    calls = re.findall(r"(?:^ {20,}|\{scan\}|= wds)(\.\w+\()", COURSE, re.MULTILINE)
    assert len(calls) >= 8
    for call in calls:
        assert call in shown, call


def test_every_cluster_has_every_option():
    """A configuration that lacks what a script needs would fail on the cluster only."""
    found = list((ROOT / "conf" / "slurm").glob("*.conf"))
    assert found
    for conf in found:
        code = (
            f"set -eu; . {conf}; declare -F setup; "
            "for name in all encode stage train; do declare -p ${name}_options; done"
        )
        run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{conf}: {run.stderr}"


def test_the_cluster_ends_with_everything(tmp_path):
    """Nothing of the test cluster stays: no process, no folder."""
    from slurm import cluster as start

    with start() as found:
        folder = found.folder
        pids = [
            int((folder / f"{name}.pid").read_text()) for name in ("munge", "slurmctld", "slurmd")
        ]
        found.run("sbatch", "--wrap", "sleep 1000", cwd=tmp_path)
        time.sleep(0.5)
    assert not folder.exists()
    assert not any(is_alive(pid) for pid in pids)
