"""Lossless transcoding with any scan script."""

import random

import numpy as np
import pytest
from oracle import scan_ends, standard_scans

from pcrshard import native
from pcrshard.jpeg.markers import map_jpeg, read_segment
from pcrshard.testing import make_jpeg


def random_script(rng, components):
    """A legal script: random bands, depths and order, each component's bits from the highest on."""
    script = []
    al = rng.randint(0, 2)
    everything = tuple(range(components))
    dc = [(everything, 0, 0, 0, al)] + [(everything, 0, 0, a + 1, a) for a in range(al - 1, -1, -1)]
    chains = [dc[1:]]
    for component in everything:
        cuts = sorted(rng.sample(range(2, 63), rng.randint(0, 3)))
        for first, stop in zip([1, *cuts], [*cuts, 64], strict=True):
            depth = rng.randint(0, 4)
            chain = [((component,), first, stop - 1, 0, depth)]
            chains.append(
                chain
                + [((component,), first, stop - 1, a + 1, a) for a in range(depth - 1, -1, -1)]
            )
    script.append(dc[0])
    while any(chains):
        script.append(rng.choice([chain for chain in chains if chain]).pop(0))
    return script


def test_jpegtran_writes_the_same_bytes(photos, jpegtran):
    """A scan of everything gives the very baseline file that jpegtran writes, and libjpeg's own
    script its progressive file.
    """
    for name, source in photos[::2]:
        scans = standard_scans(source)
        baseline = native.rescan(source, [(scans[0].components, 0, 63, 0, 0)]).jpeg
        assert baseline == jpegtran(source, "-copy", "none", "-optimize"), name
        expected = jpegtran(source, "-copy", "none", "-progressive")
        assert native.rescan(source, scans).jpeg == expected, name
        assert native.rescan(baseline, scans, "portable").jpeg == expected, name


def test_any_script_keeps_the_pixels(photos):
    """Random legal scripts give as many scans as asked and the same pixels, whatever the input."""
    rng = random.Random(4)
    for name, source in photos[::3]:
        scans = standard_scans(source)
        script = random_script(rng, len(scans[0].components))
        result = native.rescan(source, script).jpeg
        assert len(scan_ends(result)) == len(script), name
        assert np.array_equal(native.decode([result]), native.decode([source])), (name, script)
        assert native.rescan(result, scans).jpeg == native.rescan(source, scans).jpeg, name


def test_the_core_says_where_scans_begin(photos):
    """A scan begins with its tables and its data follow its header, so that a prefix can be cut
    anywhere without reading the file again.
    """
    rng = random.Random(6)
    for name, source in photos[::9]:
        script = random_script(rng, len(standard_scans(source)[0].components))
        jpeg, starts, data, _ = native.rescan(source, script)
        found = map_jpeg(jpeg)
        assert starts == [*(ranges[0][0] for ranges in found.scan_ranges), found.eoi], name
        headers = [read_segment(jpeg, ranges[-1][0]) for ranges in found.scan_ranges]
        assert data == [header.stop for header in headers], name


def test_prefixes_of_random_scripts_match_libjpeg(photos, oracle):
    """Every prefix of a random script decodes to libjpeg's pixels."""
    rng = random.Random(5)
    for name, source in photos[::9]:
        script = random_script(rng, len(standard_scans(source)[0].components))
        result = native.rescan(source, script).jpeg
        for end in scan_ends(result):
            got = native.decode([result[:end]])
            assert np.array_equal(got, oracle(result[:end] + b"\xff\xd9")), (name, script, end)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s[:-1], "sends everything"),
        (lambda s: [s[1], s[0], *s[2:]], "DC before AC"),
        (lambda s: [s[0], *s], "each bit"),
        (lambda s: [((0, 1, 2), 0, 5, 0, 1), *s[1:]], "DC alone"),
        (lambda s: [((0, 7), 0, 0, 0, 1), *s[1:]], "component indexes"),
        (lambda s: [((2, 1, 0), 0, 0, 0, 1), *s[1:]], "component indexes"),
        (lambda s: [((0, 1, 2), 0, 0, 0, 14), *s[1:]], "Al"),
    ],
)
def test_bad_scripts_are_refused(change, match):
    """A script that breaks T.81 G.1.1.1, or does not send everything, is a ValueError."""
    source = make_jpeg()
    with pytest.raises(ValueError, match=match):
        native.rescan(source, change(standard_scans(source)))
