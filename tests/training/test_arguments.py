"""What a new user mistypes is refused at once, by one rule: expected WHAT, got WHAT."""

import json

import numpy as np
import pytest
from torch.utils.data import Subset

from pcrshard import ImageDecoder, PCRDataset, PCRLoader, View
from pcrshard.testing import make_jpeg

MISTAKES = {
    "expected batch_size to be a whole number of at least 1, got 0": lambda d, f: PCRLoader(d, 0),
    "expected cache_bytes .* '50GB', got '1 gig'": lambda d, f: PCRDataset(
        f, cache_dir="cache", cache_bytes="1 gig"
    ),
    "expected cache_dir with cache_bytes='1GB'": lambda d, f: PCRDataset(f, cache_bytes="1GB"),
    "expected dataset to be of type PCRDataset, got <torch": lambda d, f: PCRLoader(
        Subset(d, [0]), 2
    ),
    "expected scale .*low <= high": lambda d, f: ImageDecoder(8, "random", scale=(1, 0.1)),
    "expected shuffle to be True or False or a whole number": lambda d, f: PCRLoader(
        d, 2, shuffle=0.5
    ),
    "expected views to be a list of pcrshard.View": lambda d, f: ImageDecoder(views=View(32)),
    "unexpected argument 'persistent_workers'; use threads": lambda d, f: PCRLoader(
        d, 2, persistent_workers=True
    ),
    "'bach_size'; use batch_size": lambda d, f: PCRLoader(d, 4, bach_size=1),
    "'xyz'; there are .*scan": lambda d, f: PCRDataset(f, xyz=1),
    "'slice' object": lambda d, f: d[1:3],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_say_what_was_expected(dataset, message):
    """No bare AttributeError, and nothing that is ignored in silence."""
    with pytest.raises((TypeError, ValueError), match=message):
        MISTAKES[message](PCRDataset(dataset), str(dataset))


def test_what_users_write_is_accepted(dataset, tmp_path):
    """NumPy's numbers, sizes with units, paths, sequences of any kind, and states stay JSON."""
    made = PCRDataset(
        dataset,
        scan=np.int64(2),
        fields=["cls", "jpg"],
        cache_dir=tmp_path,
        cache_bytes="1.5GiB",
        decoder=ImageDecoder(np.int64(8), scale=[0.5, 1]),
    )
    assert made.shards.options.cache.max_bytes == 3 << 29
    loader = PCRLoader(made, np.int64(2), seed=np.uint64(7), weights=np.ones(1), num_samples=4)
    assert sum(len(labels) for labels, _ in loader) == 4
    loader.set_epoch(np.int64(3))
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    assert len(made.subset({0, 2})) == len(made.subset(range(2))) == 2
    decoder = ImageDecoder(8, "random")
    assert np.array_equal(decoder(make_jpeg(), np.int64(7)), decoder(make_jpeg(), 7))
