"""Which sample goes into which shard: fair, repeatable, refused before anything is written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm import cluster_fixture  # noqa: F401

from pcrshard import EncodeOptions
from pcrshard.encoding.shard_plan import plan_shards
from pcrshard.encoding.sources import FieldRef, SampleRef
from pcrshard.errors import (
    EncodeError,
)

SAMPLES = [SampleRef(str(i), (FieldRef("jpg", f"{i}.jpg"),)) for i in range(300)]


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 300),
    seed=st.none() | st.integers(0, 2**64),
    how=st.sampled_from(["num_shards", "samples_per_shard", None]),
    data=st.data(),
)
def test_plan_is_a_fair_partition(total, seed, how, data):
    """Every sample is in exactly one shard, sizes differ by at most one, and the same seed gives
    the same plan.
    """
    samples = SAMPLES[:total]
    number = data.draw(st.integers(1, total))
    options = EncodeOptions(seed=seed, **({how: number} if how else {}))
    shards = plan_shards(samples, options)
    flat = [sample for shard in shards for sample in shard]
    assert sorted(flat) == sorted(samples)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert shards == plan_shards(samples, options)
    if how == "num_shards":
        assert len(shards) == number
    if how == "samples_per_shard":
        assert max(map(len, shards)) <= number
    if seed is None:
        assert flat == samples


def test_plan_depends_on_the_seed():
    """Another seed is another shuffle."""
    assert plan_shards(SAMPLES, EncodeOptions(seed=0)) != plan_shards(
        SAMPLES, EncodeOptions(seed=1)
    )


def test_more_shards_than_samples():
    """An empty shard is never made."""
    with pytest.raises(EncodeError, match="at most 3 shards for 3 samples, got 4"):
        plan_shards(SAMPLES[:3], EncodeOptions(num_shards=4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_shards": 0},
        {"samples_per_shard": -1},
        {"num_shards": 1, "samples_per_shard": 1},
        {"name": "a/b"},
        {"name": ""},
        {"name": "x" * 65},
        {"on_error": "ignore"},
        {"reencode_quality": 0},
        {"reencode_quality": 101},
        {"resize_short": 0},
    ],
)
def test_wrong_options(wrong):
    """Options are refused when they are made, not after hours."""
    with pytest.raises(EncodeError):
        EncodeOptions(**wrong)
