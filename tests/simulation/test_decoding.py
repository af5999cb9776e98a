"""What decoding costs on this machine."""

from pcrshard.reading.shard import Shard
from pcrshard.simulation.decoding import image_seconds


def test_a_time_for_each_scan(shard_urls):
    """Some microseconds to some milliseconds for a small image; nothing for a field without one."""
    shard = Shard(shard_urls[0])
    for scan in (1, "full"):
        assert 1e-6 < image_seconds(shard, scan, num_images=3) < 0.1
    assert image_seconds(shard, 1, field="none") == 0
