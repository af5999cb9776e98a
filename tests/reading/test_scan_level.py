"""The scan level is one value for the job and its workers."""

import copy
import multiprocessing

import pytest

from pcrshard import ScanLevel


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
