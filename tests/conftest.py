"""Shared fixtures: real data, synthetic datasets, outside tools."""

import functools
import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import tarfile

import pytest
import servers
from hypothesis import HealthCheck, settings
from support import ROOT, run_tool, write_files

import pcrshard
from pcrshard.testing import make_jpeg
from pcrshard.training.shard_set import _OPENED

pytest_plugins = ["slurm"]
# A fork server that has the imports makes a process in milliseconds.
_MODULES = ["torch", "torch._dynamo", "torch.distributed.fsdp", "webdataset", "pcrshard"]
multiprocessing.set_forkserver_preload(
    [*_MODULES, "pcrshard.upkeep.stage", "fsspec.implementations.http"]
)
# A loaded machine is slow to draw and to run examples, which is no failure.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")


def _data_folder():
    folder = pathlib.Path(os.environ.get("PCRSHARD_DATA", ROOT.parent / "shared" / "data"))
    return folder if (folder / "photos.tar").exists() else None


# Files that take long, or wait long.
FIRST = [
    "test_docs.py",
    "test_evidence.py",
    "test_slurm.py",
    "test_hostile.py",
    "test_clusters.py",
    "test_lightning_resume.py",
    "test_remote.py",
    "test_prefetch.py",
    "test_compiled.py",
    "test_resume.py",
]


@functools.cache
def _changed(*paths):
    return subprocess.run([ROOT / "scripts" / "changed", *paths], check=False).returncode == 0


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("changed"):
            if not _changed(*mark.args):
                item.add_marker("long")
    # Long files are begun first, so that none is left to one process at the end.
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else 99)


def pytest_configure(config):
    # A run in the background of a shell ignores SIGINT, and so would every process that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """What is there before a module stays; to look through it takes half of a second each time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_classes_of_other_tests():
    """A test's datasets are not compared with those of others."""
    _OPENED.here.clear()


@pytest.fixture(scope="session")
def data_folder():
    """The folder of real photographs."""
    folder = _data_folder()
    if folder is None:
        pytest.skip(
            "NO REAL PHOTOGRAPHS: set PCRSHARD_DATA to a folder with photos.tar, classify.tar "
            "and odd/"
        )
    return folder


@pytest.fixture(scope="session")
def photos(data_folder, tmp_path_factory):
    """photos.tar, unpacked: photos/SET/CLASS/FILE."""
    target = tmp_path_factory.mktemp("photos")
    with tarfile.open(data_folder / "photos.tar") as tar:
        tar.extractall(target, filter="data")
    return target / "photos"


@pytest.fixture(scope="session")
def synthetic_folder(tmp_path_factory):
    """24 synthetic JPEGs in two classes: color, gray and CMYK."""
    modes = {5: "L", 6: "CMYK"}
    files = {
        f"{('dog', 'cat')[i % 2]}/{i:03d}.jpg": make_jpeg(
            i, 40 + i, 64 - i, modes.get(i, "RGB"), quality=90
        )
        for i in range(24)
    }
    return write_files(tmp_path_factory.mktemp("synthetic"), files)


@pytest.fixture(scope="session")
def dataset(synthetic_folder, tmp_path_factory):
    """The synthetic folder as 4 shards; read only."""
    target = tmp_path_factory.mktemp("dataset")
    pcrshard.encode(synthetic_folder, target, pcrshard.EncodeOptions(num_shards=4), workers=1)
    return target


@pytest.fixture(scope="session")
def shard_urls(dataset):
    """The URLs of the synthetic dataset's shards."""
    return sorted(str(path) for path in dataset.glob("*.tar"))


@pytest.fixture(scope="session")
def djpeg():
    """Decode by djpeg, the oracle: PNM bytes; asserts that it neither fails nor warns."""

    def decode(jpeg):
        result = run_tool("djpeg", "-pnm", data=jpeg)
        assert result.returncode == 0, result.stderr
        assert result.stderr == b""
        return result.stdout

    return decode


@pytest.fixture(scope="session")
def jpegtran():
    """Transcode by jpegtran, the oracle."""

    def transcode(jpeg, *options):
        result = run_tool("jpegtran", *options, data=jpeg)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return transcode


@pytest.fixture(scope="session")
def s3():
    """Return moto's server; each test writes under a name of its own."""
    with servers.s3() as server:
        yield server
