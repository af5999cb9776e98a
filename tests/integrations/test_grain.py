"""Samples by number, as Grain asks for them."""

import pickle
import random

import pytest
from support import read_samples

import pcrshard
from pcrshard.errors import ScanUnavailable
from pcrshard.integrations.grain import PCRSource


def expected(dataset, scan):
    return list(read_samples(dataset, scan).values())


@pytest.fixture(scope="module")
def grain():
    """Grain itself; it warns on import where JAX is absent."""
    return pytest.importorskip("grain", reason="GRAIN IS NOT INSTALLED: pip install grain")


def test_grain_reads_every_sample_and_resumes(grain, dataset):
    """A shuffled, decoded and batched epoch has each sample once, and goes on where it was."""
    from grain.sources import RandomAccessDataSource

    decoder = pcrshard.ImageDecoder(16, "random", layout="hwc")

    class Decode(grain.transforms.RandomMap):
        def random_map(self, sample, rng):
            draws = random.Random(int(rng.integers(1 << 62)))
            image = decoder(sample["jpg"], draws)
            return {"image": image, "label": sample["cls"], "key": sample["__key__"]}

    source = PCRSource(dataset, scan=2, fields=("jpg", "cls", "__key__"))
    assert isinstance(source, RandomAccessDataSource)
    epoch = grain.MapDataset.source(source).seed(1).shuffle().random_map(Decode()).batch(4)
    reader = iter(epoch.to_iter_dataset())
    seen = [next(reader) for _ in range(2)]
    state = reader.get_state()
    rest = list(reader)
    batches = [*seen, *rest]
    assert batches[0]["image"].shape == (4, 16, 16, 3)
    keys = [str(key) for batch in batches for key in batch["key"]]
    assert sorted(keys) == sorted(sample["__key__"] for sample in expected(dataset, 2))
    reader = iter(epoch.to_iter_dataset())
    reader.set_state(state)
    again = list(reader)
    assert [batch["image"].tobytes() for batch in again] == [b["image"].tobytes() for b in rest]


@pytest.mark.long
def test_grain_reads_in_worker_processes(grain, dataset):
    """The source travels to spawned workers, and a level that changes is followed there."""
    level = pcrshard.ScanLevel(2)
    source = PCRSource(dataset, scan=level, fields=("jpg",))
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    epoch = grain.MapDataset.source(source).to_iter_dataset().mp_prefetch(options)
    for scan in (2, 5):
        level.value = scan
        got = sorted(sample["jpg"] for sample in epoch)
        assert got == sorted(sample["jpg"] for sample in expected(dataset, scan))


def test_samples_are_those_of_the_shard(dataset):
    """By number, at any scan, with labels as numbers."""
    source = PCRSource(dataset, scan=2)
    samples = [source[number] for number in range(24)]
    assert samples == [s | {"cls": int(s["cls"])} for s in expected(dataset, 2)]
    assert repr(pickle.loads(pickle.dumps(source))) == repr(source)
    with pytest.raises(IndexError):
        source[24]
    with pytest.raises(ScanUnavailable):
        PCRSource(dataset, scan=11)
