"""Python without a GIL: it stays off, and threads may share what a job reads with."""

import concurrent.futures
import os
import random
import subprocess
import sys
import sysconfig

import pytest
from numbered import numbered, write

from pcrshard import ImageDecoder, PCRDataset

THREADS = 8


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_gil_stays_off():
    """An extension that does not say that it needs no GIL switches it on for the whole process."""
    script = "import pcrshard.native.pool, sys; "
    script += "sys.exit(sys._is_gil_enabled())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-W", "error", "-c", script]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """64 images in 8 shards."""
    return write(tmp_path_factory.mktemp("shards"), numbered(64), 8)


def test_threads_share_a_dataset_a_cache_and_a_decoder(shards, tmp_path):
    """Eight threads that read the same shards through one small cache, each in an order of its own,
    and decode by one decoder, get the pixels of one thread alone.
    """
    decoder = ImageDecoder(24, "random", flip=0.5)
    dataset = PCRDataset(shards, cache_dir=str(tmp_path), cache_bytes=100_000)

    def read(seed):
        rng = random.Random(seed)
        found = {}
        for shard in rng.sample(range(8), 8):
            scan = rng.choice([1, 3, "full"])
            prefix = dataset.shards.open(shard).load(scan)
            assert all(decoder(sample["jpg"], 1).size for sample in prefix.at(1).samples())
            prefix = dataset.shards.open(shard).load(2)
            for row in rng.sample(range(8), 8):
                sample = prefix.sample(row)
                found[sample["cls"]] = decoder(sample["jpg"], 1).tobytes()
        return found

    expected = read(0)
    assert len(expected) == 64
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        assert all(found == expected for found in pool.map(read, range(1, THREADS + 1)))
