"""Scans by epoch."""

import pytest

from pcrshard import ScanLevel
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
