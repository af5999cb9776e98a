"""The scan level is one value for the job and its workers."""

import copy
import multiprocessing

import pytest
from support import shard_entry

from pcrshard import ScanLevel
from pcrshard.errors import ScanUnavailable
from pcrshard.reading.scan_level import Followed


def _report(level, change, seen):
    seen.put(level.value)
    change.wait(30)
    seen.put(level.value)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_running_worker_sees_a_change(method):
    """The tuner raises fidelity while workers run, whatever their start method."""
    context = multiprocessing.get_context(method)
    level, change, seen = ScanLevel(2), context.Event(), context.Queue()
    process = context.Process(target=_report, args=(level, change, seen))
    process.start()
    assert seen.get(timeout=60) == 2
    level.value = "full"
    change.set()
    assert seen.get(timeout=60) == "full"
    process.join(60)
    assert process.exitcode == 0


def test_a_copied_pipeline_follows_the_same_level():
    """Copying a dataset does not cut it off from the tuner."""
    level = ScanLevel(1)
    other = copy.deepcopy(level)
    level.value = 7
    assert other.value == 7


@pytest.mark.parametrize("scan", [0, -1, 33, True, 2.0, "5", None])
def test_refuses_what_is_not_a_scan(scan):
    """A wrong scan is refused where it is set, not in a worker."""
    with pytest.raises((TypeError, ScanUnavailable), match="expected a scan"):
        ScanLevel(scan)


def test_a_level_knows_the_scans_of_its_dataset():
    """Setting a missing scan raises an error that lists the available ones."""
    level = ScanLevel(1)
    level.follow(Followed([shard_entry()], {}, "s3://photos"))
    level.value = 10
    with pytest.raises(ScanUnavailable, match=r"s3://photos: .*10 or 'full', got 12"):
        level.value = 12
    assert level.value == 10
    with pytest.raises(ScanUnavailable, match="got 12"):
        ScanLevel(12).follow(Followed([shard_entry()], {}, "photos"))


def test_a_level_of_a_staged_copy():
    """It is at the highest scan that is there unless it was set, and never goes above it."""
    level = ScanLevel()
    level.follow(Followed([shard_entry(5), shard_entry(6)], {}, "copy"))
    assert (level.value, level.highest) == (5, 5)
    for scan in (6, "full"):
        with pytest.raises(ScanUnavailable, match=f"scan {scan}, .* holds scans 1 to 5 of 10"):
            level.value = scan
        with pytest.raises(ScanUnavailable, match=f"scan {scan}"):
            ScanLevel(scan).follow(Followed([shard_entry(5)], {}, "copy"))
    level.follow(Followed([shard_entry(7)], {}, "copy"))
    level.value = 7


def test_the_dataset_with_the_fewest_scans_counts():
    """A level may be shared by several datasets."""
    level = ScanLevel(2)
    level.follow(Followed([shard_entry(5)], {}, "small"))
    level.follow(Followed([shard_entry()], {}, "large"))
    level.follow(Followed([shard_entry(num_groups=4)], {}, "coarse"))
    with pytest.raises(ScanUnavailable, match="small"):
        level.value = 6
    with pytest.raises(ScanUnavailable, match="coarse"):
        level.value = 5
