"""What ``scan=`` may be."""

import numpy as np
import pytest

from pcrshard.arguments import is_integer
from pcrshard.errors import ScanUnavailable
from pcrshard.format.scan import FULL, check_scan


@pytest.mark.parametrize("scan", [1, 10, np.int64(3), np.uint8(10)])
def test_a_scan_is_a_number(scan):
    """NumPy's integers are as good as Python's, and come out as Python's."""
    assert check_scan(scan, 10) == int(scan)
    assert type(check_scan(scan, 10)) is int


@pytest.mark.parametrize("num_groups", [1, 10, 32])
def test_full_comes_after_the_last_scan(num_groups):
    """``"full"`` is one more than the last scan: it adds the tail."""
    assert check_scan(FULL, num_groups) == num_groups + 1


@pytest.mark.parametrize("scan", [0, -1, 11, 1 << 40])
def test_scans_out_of_range(scan):
    """A missing scan raises an error that lists the available scans."""
    with pytest.raises(ScanUnavailable, match="1 to 10"):
        check_scan(scan, 10)


@pytest.mark.parametrize("scan", [True, np.True_, 2.0, "5", "FULL", None, [1]])
def test_scans_of_a_wrong_type(scan):
    """A scan of a wrong type is a TypeError."""
    assert not is_integer(scan)
    with pytest.raises(TypeError, match="expected a scan of 1 to 10 or 'full'"):
        check_scan(scan, 10)
