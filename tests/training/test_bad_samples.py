"""Samples that cannot be read or decoded: raised, stepped over, or replaced by arithmetic."""

import itertools
import json
import logging

import pytest
import torch
import webdataset as wds
from numbered import flat, loader_of, numbered, write
from support import damage, run_encode

from pcrshard import ImageDecoder, PCRDataset, PCRLoader
from pcrshard.errors import CorruptIndex, CorruptJpeg, PCRError

SAMPLES, ROWS = 60, 6
BAD = (7, 8, 31)
DECODERS = {
    "pool": 8,
    "geometry": ImageDecoder(8, "random", return_geometry=True),
    "own size": ImageDecoder(),
}


def cut(jpeg):
    """A JPEG without its end, which no decoder decodes."""
    return jpeg[: len(jpeg) // 3]


def kept(folder, samples, rows=ROWS):
    """A dataset in which undecodable images are kept as they are."""
    with wds.TarWriter(str(folder / "source.tar")) as out:
        for sample in samples:
            out.write(sample | {"cls": str(sample["cls"]).encode()})
    how = {"on_error": "keep", "seed": None, "samples_per_shard": rows}
    run_encode(folder / "source.tar", folder / "shards", **how)
    return str(folder / "shards")


@pytest.fixture(scope="module")
def crawl(tmp_path_factory):
    """10 shards of 6; three pictures are cut off."""
    samples = numbered(SAMPLES)
    for number in BAD:
        samples[number]["jpg"] = cut(samples[number]["jpg"])
    return kept(tmp_path_factory.mktemp("crawl"), samples)


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """10 shards of 6, the index of one of them damaged."""
    folder = tmp_path_factory.mktemp("lost")
    write(folder, numbered(SAMPLES), ROWS)
    damage(folder / "data-000004.tar", 1100)
    return str(folder)


def expected(number):
    """The label that comes in place of one."""
    return {7: 9, 8: 9, 31: 32}.get(number, number)


def labels(batches):
    return [batch["cls"].tolist() for batch in batches]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 2}, {"num_workers": 1}], ids=str)
def test_bad_samples_are_replaced(crawl, caplog, name, options):
    """Each batch keeps its shape and its place: a bad picture is that of the next good sample of
    the shard, with its label; each is logged once and counted.
    """
    how = {"shuffle": False, "drop_last": False, "decoder": DECODERS[name]}
    loader = PCRLoader(
        PCRDataset(crawl, decoder=how.pop("decoder"), on_error="replace"), 8, **how, **options
    )
    single = PCRDataset(crawl, decoder=DECODERS[name])
    with caplog.at_level(logging.WARNING):
        for epoch in range(2):
            batches = list(loader)
            assert flat(labels(batches)) == list(map(expected, range(SAMPLES)))
            assert loader.stats().num_replaced == 3 * (epoch + 1)
    assert sorted(loader.stats().replaced) == ["k007", "k008", "k031"]
    assert len([each for each in caplog.records if "replaced" in each.message]) == 3
    if name == "pool":
        pixels = torch.cat([batch["jpg"] for batch in batches])
        for number in (6, 7, 8, 9, 31):
            assert torch.equal(pixels[number], single[expected(number)]["jpg"])
    if name == "geometry":
        pixels, where = batches[0]["jpg"]
        assert pixels.shape == (8, 3, 8, 8)
        assert where.size[7].tolist() == single[9]["jpg"].geometry.size.tolist()


def test_random_access_replaces_too(crawl, lost):
    """``dataset[i]`` has the same replacements, so that any DataLoader works."""
    dataset = PCRDataset(crawl, decoder=8, on_error="replace")
    assert [sample["cls"] for sample in dataset] == list(map(expected, range(SAMPLES)))
    dataset = PCRDataset(lost, decoder=8, on_error="replace")
    assert [dataset[number]["cls"] for number in (23, 24, 29, 30)] == [23, 30, 35, 30]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_epochs_with_bad_samples_are_whole_and_resume(crawl, world):
    """On any number of ranks: the planned number of equal batches, each good sample at least once;
    a job that is stopped and resumed has the same batches.
    """
    how = {"seed": 3, "drop_last": False, "world_size": world, "decoder": 8}

    def job(rank):
        dataset = PCRDataset(crawl, decoder=8, on_error="replace")
        return PCRLoader(dataset, 4, seed=3, drop_last=False, world_size=world, rank=rank)

    whole = [list(job(rank)) for rank in range(world)]
    assert {len(batches) for batches in whole} == {len(job(0))}
    seen = set(flat(flat(map(labels, whole))))
    assert seen >= set(range(SAMPLES)) - set(BAD)
    for rank in range(world):
        first, second = job(rank), job(rank)
        begun = list(itertools.islice(first, 2))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for own, other in zip([*begun, *second], whole[rank], strict=True):
            assert own["cls"].tolist() == other["cls"].tolist()
            assert torch.equal(own["jpg"], other["jpg"])
    assert how


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 2}, {"num_workers": 2}], ids=str)
def test_a_lost_shard_is_replaced_by_its_neighbor(lost, options):
    """A shard that cannot be read costs its own samples; the epoch ends with all batches."""
    dataset = PCRDataset(lost, decoder=8, on_error="replace")
    loader = PCRLoader(dataset, 6, shuffle=False, **options)
    found = flat(labels(loader))
    assert found == [number + 6 if 24 <= number < 30 else number for number in range(SAMPLES)]
    [(name, message)] = loader.stats().replaced.items()
    assert name.endswith("data-000004.tar")
    assert "data-000004.tar" in message
    assert loader.stats().num_replaced == 6
    with pytest.raises(CorruptIndex):
        list(loader_of(lost, 6))


def test_too_many_bad_samples_are_an_error(tmp_path):
    """If more than a quarter of an epoch cannot be read, something else is wrong."""
    samples = numbered(24)
    for sample in samples[::3]:
        sample["jpg"] = cut(sample["jpg"])
    folder = kept(tmp_path, samples)
    loader = PCRLoader(PCRDataset(folder, decoder=8, on_error="replace"), 4)
    with pytest.raises(CorruptJpeg) as raised:
        list(loader)
    assert "more than 25%" in "".join(raised.value.__notes__)


def test_a_shard_of_bad_samples_only(tmp_path):
    """If no sample of a shard is good, the error of the sample is raised."""
    samples = numbered(12)
    for sample in samples[:3]:
        sample["jpg"] = cut(sample["jpg"])
    folder = kept(tmp_path, samples, 3)
    with pytest.raises(PCRError, match="k001"):
        PCRDataset(folder, decoder=8, on_error="replace")[1]


def test_a_function_decides(crawl):
    """A function gets each error; what is not True or False is refused."""
    seen = []

    def choose(error):
        seen.append(error.key)
        return error.key != "k031"

    dataset = PCRDataset(crawl, decoder=8, on_error=choose)
    assert dataset[7]["cls"] == 9
    with pytest.raises(CorruptJpeg, match="k031"):
        dataset[31]
    assert seen == ["k007", "k031"]
    for wrong in (None, 1, "replace"):
        with pytest.raises(TypeError, match="expected on_error to return True"):
            PCRDataset(crawl, decoder=8, on_error=lambda _, wrong=wrong: wrong)[7]
    with pytest.raises(TypeError, match="expected on_error to be 'raise', 'replace'"):
        PCRDataset(crawl, on_error=3)
    with pytest.raises(ValueError, match="expected on_error to be 'raise', 'replace'"):
        PCRDataset(crawl, on_error="skip")


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 2}, {"num_workers": 1}], ids=str)
def test_a_bad_batch_can_be_stepped_over(crawl, options):
    """The error says how to go on: the state with ``skip=1`` is behind the bad batch, and the other
    batches of the epoch are those of a run without it.
    """
    loader = PCRLoader(PCRDataset(crawl, decoder=8), 5, shuffle=False, **options)
    seen = []
    with pytest.raises(CorruptJpeg) as raised:
        seen.extend(loader)
    assert "skip=1" in "".join(raised.value.__notes__)
    while True:
        loader.load_state_dict(loader.state_dict(), skip=1)
        try:
            seen.extend(loader)
        except CorruptJpeg:
            continue
        break
    assert flat(labels(seen)) == [n for n in range(SAMPLES) if n // 5 not in (1, 6)]
    assert loader.epoch == 1
    state = loader.state_dict()
    loader.load_state_dict(state, skip=100)
    assert loader.epoch == 2


def test_random_crops_leave_the_generator_alone_without_need(crawl):
    """Samples without random crops do not advance torch's generator."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    _ = PCRDataset(crawl, decoder=8)[0], PCRDataset(crawl, scan=0)[0]
    assert torch.equal(torch.get_rng_state(), before)
    _ = PCRDataset(crawl, decoder=ImageDecoder(8, "random"))[0]
    assert not torch.equal(torch.get_rng_state(), before)
