"""The scan level is one value for the job and its workers."""

import copy
import multiprocessing

import pytest

from pcrshard import ScanLevel
from pcrshard.errors import ScanUnavailable
from pcrshard.reading.scan_level import ScanRange


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
    with pytest.raises(ValueError, match="expected a scan"):
        ScanLevel(scan)


def test_a_level_knows_the_scans_of_its_dataset():
    """Setting a missing scan raises an error that lists the available ones."""
    level = ScanLevel(1)
    level.follow(ScanRange(10, "full", "s3://photos"))
    level.value = 10
    with pytest.raises(ScanUnavailable, match=r"1 to 10 or 'full' for s3://photos, got 12"):
        level.value = 12
    assert level.value == 10
    with pytest.raises(ScanUnavailable, match="got 12"):
        ScanLevel(12).follow(ScanRange(10, "full", "photos"))


def test_a_level_of_a_staged_copy():
    """It is at the highest scan that is there unless it was set, and never goes above it."""
    copy = ScanRange(10, 5, "copy")
    level = ScanLevel()
    level.follow(copy)
    assert (level.value, level.highest) == (5, 5)
    with pytest.raises(ScanUnavailable, match="1 to 5, which the staged copy holds"):
        level.value = "full"
    with pytest.raises(ScanUnavailable, match="got 'full'"):
        ScanLevel("full").follow(copy)
    level.follow(ScanRange(10, 7, "copy"))
    level.value = 7


def test_the_dataset_with_the_fewest_scans_counts():
    """A level may be shared by several datasets."""
    level = ScanLevel(2)
    level.follow(ScanRange(10, 5, "small"))
    level.follow(ScanRange(10, "full", "large"))
    with pytest.raises(ScanUnavailable, match="small"):
        level.value = 6
