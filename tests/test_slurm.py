"""The job scripts on a real SLURM cluster of one node: encode, stage, train, stop and go on."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from support import ROOT, read_all, read_log, wait_for

from pcrshard import ShardWriter
from pcrshard.testing import make_jpeg

SUBMIT = ROOT / "scripts" / "slurm" / "submit"
MINIMAL = str(ROOT / "scripts" / "slurm" / "train_minimal.py")
trains = pytest.mark.changed("scripts/slurm", "conf/slurm")


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


def run_local(*line, **variables):
    """Run a command here, with these variables; returns what it said and its status."""
    environment = os.environ | variables
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


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
    encode_line = ["encode", synthetic_folder, dst, "--num-shards", "4"]
    job = jobs(*encode_line, options=["--array=0-3"])
    after = ["--array=2", f"--dependency=afterany:{job}"]
    again = jobs(*encode_line, options=after, PARTS="4")
    after = [f"--dependency=afterok:{again}"]
    staged = jobs("stage", dst, tmp_path / "staged", "--scan", "2", options=after)
    cluster.wait(staged)
    assert read_all(dst) == read_all(dataset), log_of(tmp_path, job)
    for each in (job, again):
        assert "samples: 24\nshards: 4\n" in log_of(tmp_path, each)
    copies = list((tmp_path / "staged").glob("*.tar"))
    assert len(copies) == 4
    assert all(path.stat().st_size < (dst / path.name).stat().st_size for path in copies)


# Training


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """96 images in three classes without names, 8 shards."""
    folder = tmp_path_factory.mktemp("pictures")
    with ShardWriter(folder, samples_per_shard=12) as writer:
        for i in range(96):
            writer.write({"__key__": f"k{i}", "jpg": make_jpeg(i, 48, 40), "cls": i % 3})
    return folder


def sequence(run):
    """Steps with keys; nothing logged twice."""
    return [(row["step"], row["keys"]) for row in read_log(run)]


def stop(cluster, job, run, steps):
    """Send the signal of the time limit after some steps."""
    begin = len(read_log(run))
    wait_for(lambda: len(read_log(run)) >= begin + steps, 120)
    cluster.run("scancel", "--signal=USR1", "--batch", job)


@trains
def test_a_requeued_job_goes_on_exactly(cluster, jobs, pictures, tmp_path):
    """A job stopped at its limit, requeued, and continued with one task reads what an unbroken one
    of one task reads; only the sums of gradients are rounded differently.
    """
    options = ["--batch", "8", "--epochs", "10"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    reference = subprocess.Popen(
        [sys.executable, MINIMAL, pictures, whole, *options],
        env=os.environ | alone | {"PYTHONPATH": str(ROOT)},
    )
    job = jobs("train", pictures, run, *options, TRAIN=MINIMAL)
    stop(cluster, job, run, 3)
    wait_for(lambda: "goes back into the queue" in log_of(tmp_path, job), 30)
    assert 3 <= len(read_log(run)) < 120, log_of(tmp_path, job)
    stop(cluster, job, run, 3)
    wait_for(lambda: cluster.state(job) == "PENDING", 30)
    cluster.run("scancel", job)
    last = jobs("train", pictures, run, *options, options=["--ntasks=1"], TRAIN=MINIMAL)
    cluster.wait(last, seconds=240)
    assert reference.wait(240) == 0
    worlds = [row["world"] for row in read_log(run)]
    assert worlds == sorted(worlds, reverse=True)
    assert set(worlds) == {2, 1}
    assert sequence(run) == sequence(whole)
    assert len(sequence(run)) == 120
    losses, unbroken = ([row["loss"] for row in read_log(each)] for each in (run, whole))
    assert losses == pytest.approx(unbroken, rel=1e-3)
    for epoch in range(10):
        keys = [key for *_, own in sequence(run)[12 * epoch : 12 * epoch + 12] for key in own]
        assert len(set(keys)) == 96


# scripts/train.py, which `submit CLUSTER train` runs


@trains
def test_the_training_job_stages_to_its_scratch_folder(cluster, jobs, pictures, tmp_path):
    """Two tasks train from a copy of scan 2, say where they are, and may go on where they ended."""
    settings = ["batch_size=16", "size=32", "workers=0", "epochs=2", f"data.val={pictures}"]
    settings += [f"out={tmp_path / 'run'}", "data.val_scan=2", "progress=0.2"]
    scratch = tmp_path / "scratch"
    job = jobs("staged_train", pictures, "2", *settings, JOBSCRATCH=str(scratch))
    cluster.wait(job, seconds=120)
    log = log_of(tmp_path, job)
    assert [row["scan"] for row in read_log(tmp_path / "run")] == [2, 2], log
    assert [row["step"] for row in read_log(tmp_path / "run")] == [3, 6]
    assert " images/s, loss=" in log
    assert "scan=2" in log
    assert f"{scratch}/pcrshard" in (tmp_path / "run" / "config.yaml").read_text()
    assert all(
        path.stat().st_size < (pictures / path.name).stat().st_size
        for path in (scratch / "pcrshard").glob("*.tar")
    )


# Before anything is submitted


WRONG = {
    "cluster": (["mars", "train"], {}, "expected a cluster of jean-zay test-cluster, got mars"),
    "job": (
        ["jean-zay", "play"],
        {},
        "expected a job of encode stage staged_train train, got play",
    ),
    "path": (["../slurm/jean-zay", "train"], {}, "expected a cluster"),
    "GPU": (["jean-zay", "train"], {"GPU": "a1000"}, "expected GPU=v100, a100, h100 or p4"),
    "project": (["jean-zay", "stage"], {"IDRPROJ": ""}, "your project"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_unknown_is_not_submitted(what, tmp_path):
    """An unknown cluster, job, GPU, or project raises an error that lists the valid ones."""
    arguments, variables, message = WRONG[what]
    variables = {"IDRPROJ": "abc", "WORK": str(tmp_path)} | variables
    run = run_local(SUBMIT, *arguments, "data.train=x", **variables)
    assert run.returncode != 0
    assert message in run.stderr


def test_wheels_are_installed_without_root_or_registry(tmp_path):
    """The jobs' Python finds what lies in a folder of wheels; new ones replace old ones."""
    variables = {
        "PYTHON_BIN": os.path.dirname(sys.executable),
        "PCRSHARD_WHEELS": str(tmp_path / "wheels"),
        "PCRSHARD_PACKAGES": str(tmp_path / "packages"),
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }
    line = (ROOT / "scripts" / "slurm" / "install", "test-cluster")
    assert "no wheel in" in run_local(*line, **variables).stderr
    for version in ("1", "2"):
        write_wheel(tmp_path / "wheels", "probe", version)
        (tmp_path / "wheels" / "libprobe.so.0").write_text(version)
        done = run_local(*line, **variables)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "packages" / "probe.py").read_text() == f"version = {version}\n"
        assert (tmp_path / "packages" / "lib" / "libprobe.so.0").read_text() == version


def write_wheel(folder, name, version):
    """A wheel of one module, by the format's specification; it replaces older ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    name_and_version = f"Name: {name}\nVersion: {version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\n{name_and_version}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version}\n")
        for file, text in about.items():
            wheel.writestr(f"{name}-{version}.dist-info/{file}", text)


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


@trains
def test_the_listing_of_the_course(cluster, pictures, tmp_path):
    """The course's loader with ``.pcr_scan(5)`` gives every sample once over all ranks."""
    script = tmp_path / "course.py"
    script.write_text(COURSE.replace("{scan}", ".pcr_scan(5)"))
    environment = cluster.environment | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    paths = f"{pictures}/data-{{000000..000007}}.tar"
    said = cluster.run(
        "srun", "--ntasks=2", sys.executable, script, paths, cwd=tmp_path, env=environment
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
    names = [path.stem for path in (ROOT / "scripts" / "slurm").glob("*.slurm")]
    assert found
    assert len(names) == 4
    for conf in found:
        code = (
            f"set -eu; . {conf}; declare -F setup; "
            f"for name in all {' '.join(names)}; do declare -p ${{name}}_options; done"
        )
        run = run_local("bash", "-c", code, IDRPROJ="abc", WORK="work")
        assert run.returncode == 0, f"{conf}: {run.stderr}"
