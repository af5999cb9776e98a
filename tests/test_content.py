"""Nothing is reused because of a name and a size: whatever was corrected is read, or refused."""

import random
import shutil

import pytest
from support import read_samples

from pcrshard import PrefixCache, Shard, ShardWriter, open_dataset, stage
from pcrshard.errors import PCRError
from pcrshard.testing import make_jpeg

NAME = "data-000000.tar"
# Masks and a picture kept whole, of one size: in two of a hundred cases would sizes differ.
FIELDS = ("mask.png", "png", "txt", "npz")


def write(folder, content):
    """A shard whose fields have these contents; everything else is equal."""
    with ShardWriter(folder, kinds={"mask.png": "mask"}) as writer:
        for i in range(3):
            writer.write({"__key__": f"k{i}", "jpg": make_jpeg(i, 24, 24)} | content)
    return folder


def contents(samples):
    return [{name: sample[name] for name in FIELDS if name in sample} for sample in samples]


@pytest.mark.parametrize("repaints", [15, pytest.param(400, marks=pytest.mark.long)])
def test_repainted_content_of_the_same_size(tmp_path, repaints):
    """A cache, a staged copy and a prefix that grows show the corrected dataset or refuse the old
    one, at every scan, with and without pcr.json; they never mix the two.
    """
    rng = random.Random(7)
    for number in range(repaints):
        field = rng.choice(FIELDS)
        old, new = ({field: rng.randbytes(300)} for _ in range(2))
        if field == "txt":
            old, new = ({field: f"{rng.random():.10f}"[:9].encode()} for _ in range(2))
        folder = tmp_path / str(number)
        first, second = write(folder / "old", old), write(folder / "new", new)
        place = shutil.copytree(first, folder / "place")
        scan = rng.choice([3, 8, "full"])
        low = rng.choice([0, 1, 2])
        entry = open_dataset(place)[0].shards[0] if rng.random() < 0.5 else None
        caches = [PrefixCache(str(folder / "cache")), None]
        before = [Shard(place / NAME, entry=entry, cache=cache) for cache in caches]
        grown = [shard.load(low) for shard in before]
        stage(place, folder / "copy", low or 1)
        shutil.rmtree(place)
        shutil.copytree(second, place)

        for shard, prefix in zip(before, grown, strict=True):
            try:
                found = contents(shard.change_scan(prefix, scan).samples())
            except PCRError:
                continue
            # Where all groups that it lacked are equal, the prefix is wholly the old one.
            assert found in ([old] * 3, [new] * 3)
        entry = open_dataset(place)[0].shards[0] if rng.random() < 0.5 else None
        seen = [Shard(place / NAME, entry=entry, cache=cache).samples(scan) for cache in caches]
        try:
            stage(place, folder / "copy", scan)
        except PCRError as error:
            assert "older version" in str(error)
        else:
            seen.append(read_samples(folder / "copy", scan).values())
        for samples in seen:
            assert contents(samples) == [new] * 3


def test_a_shard_of_another_encode_in_the_folder_is_refused(tmp_path):
    """One shard replaced by that of another run, equal in name and size, is an error by name."""
    first = write(tmp_path / "old", {"png": bytes(300)})
    second = write(tmp_path / "new", {"png": b"\1" * 300})
    assert (first / NAME).stat().st_size == (second / NAME).stat().st_size
    shutil.copy(second / NAME, first / NAME)
    index, urls = open_dataset(first)
    with pytest.raises(PCRError, match=rf"it was replaced, or the index is old.*{NAME}"):
        Shard(urls[0], entry=index.shards[0]).load(1)
