"""What ``scan=`` may be."""

import numpy as np
import pytest

from pcrshard.arguments import is_integer
from pcrshard.errors import ScanUnavailable
from pcrshard.format.scan import FULL, check_scan, check_scan_type


@pytest.mark.parametrize("scan", [1, 10, np.int64(3), np.uint8(10)])
def test_a_scan_is_a_number(scan):
    """NumPy's integers are as good as Python's, and come out as Python's."""
    assert check_scan(scan, 10) == int(scan)
    assert type(check_scan(scan, 10)) is int
    assert check_scan_type(scan) is None


@pytest.mark.parametrize("num_groups", [1, 10, 32])
def test_full_comes_after_the_last_scan(num_groups):
    """``"full"`` is one more than the last scan: it adds the tail."""
    assert check_scan(FULL, num_groups) == num_groups + 1
    assert check_scan_type(FULL) is None


@pytest.mark.parametrize("scan", [0, -1, 11, 1 << 40])
def test_scans_out_of_range(scan):
    """A missing scan raises an error that lists the available scans."""
    with pytest.raises(ScanUnavailable, match="1 to 10"):
        check_scan(scan, 10)


@pytest.mark.parametrize("scan", [True, 2.0, "5", None])
def test_scans_of_a_wrong_type(scan):
    """A scan of a wrong type is a TypeError."""
    with pytest.raises(TypeError, match="expected a scan"):
        check_scan(scan, 10)


@pytest.mark.parametrize("scan", [True, np.True_, 2.0, "5", "FULL", None, [1]])
def test_a_wrong_type_is_refused_before_a_shard_is_open(scan):
    """A typing error in a job's options is found at its start."""
    assert not is_integer(scan)
    with pytest.raises(TypeError, match="expected a scan number or 'full'"):
        check_scan_type(scan)


@pytest.mark.parametrize("scan", [0, -1, np.int8(-3)])
def test_a_scan_below_one_is_refused_before_a_shard_is_open(scan):
    """No shard has such a scan."""
    with pytest.raises(ValueError, match="1 or more"):
        check_scan_type(scan)
