"""The Huffman tables of T.81 annex K.3."""

import numpy as np
import turbojpeg

from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.standard_tables import STANDARD_TABLES


def test_they_are_the_tables_that_libjpeg_writes():
    """A frame of Motion JPEG decodes as with any other decoder."""
    jpeg = bytes(turbojpeg.TurboJPEG().encode(np.zeros((8, 8, 3), np.uint8)))
    ((*tables, _),) = map_jpeg(jpeg).scan_ranges
    assert b"".join(jpeg[start:stop] for start, stop in tables) == STANDARD_TABLES
