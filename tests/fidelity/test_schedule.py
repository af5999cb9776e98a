"""Scans by epoch."""

import pytest

from pcrshard import PCRDataset, ScanLevel, stage
from pcrshard.errors import ScanUnavailable
from pcrshard.fidelity import ScanSchedule


def test_a_schedule_sets_the_level():
    """Milestones hold from their epoch on; before the first one, training reads everything."""
    level = ScanLevel(3)
    schedule = ScanSchedule(level, {1: 2, 4: "full", 2: 5})
    assert [schedule.step(epoch) for epoch in range(6)] == ["full", 2, 5, 5, "full", "full"]
    assert level.value == "full"


@pytest.mark.parametrize("scan", [0, "half", 2.5, 99])
def test_an_impossible_scan_is_refused_at_once(scan):
    """A typing error shows when the schedule is made, not in epoch 60."""
    with pytest.raises((TypeError, ScanUnavailable), match="expected a scan"):
        ScanSchedule(ScanLevel(), {0: 1, 60: scan})


def test_a_schedule_on_a_staged_copy(dataset, tmp_path):
    """There ``"full"`` is the highest scan of the copy, and a scan above it is refused at once."""
    stage(dataset, tmp_path, 5)
    level = ScanLevel()
    PCRDataset(tmp_path, scan=level)
    schedule = ScanSchedule(level, {1: 2, 2: "full"})
    assert [schedule.step(epoch) for epoch in range(3)] == [5, 2, 5]
    with pytest.raises(ScanUnavailable, match="scan 7, the staged copy holds scans 1 to 5"):
        ScanSchedule(level, {0: 2, 60: 7})
