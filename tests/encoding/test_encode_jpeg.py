"""One JPEG to pieces: lossless, and complete up to any scan."""

import mutants
import numpy as np
import pytest

from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.errors import CorruptJpeg, UnsupportedJpeg
from pcrshard.format.scan_script import Q95, STANDARD
from pcrshard.jpeg import pixels
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.native import rescan
from pcrshard.testing import make_jpeg

EOI = b"\xff\xd9"


@pytest.mark.parametrize("script", [STANDARD, Q95], ids=lambda script: script.name)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_pieces_are_the_image(mode, script):
    """Joined again, the pieces have the source's pixels; each prefix of them is an image, too."""
    jpeg = make_jpeg(3, 50, 70, mode=mode)
    image = encode_jpeg(jpeg, script)
    *groups, tail = image.pieces
    assert (image.height, image.width, len(groups)) == (50, 70, script.num_groups)
    color = "cmyk" if mode == "CMYK" else "rgb"
    whole = b"".join(groups) + tail + EOI
    assert np.array_equal(pixels.decode(whole, color), pixels.decode(jpeg, color))
    for scan in range(1, script.num_groups):
        prefix = b"".join(groups[:scan]) + EOI
        assert pixels.decode(prefix, color).shape == pixels.decode(jpeg, color).shape


def test_what_no_decoder_needs_is_in_the_tail():
    """A comment is kept, but no scan pays for it."""
    comment = b"\xff\xfe\x00\x07hello"
    jpeg = make_jpeg()
    *groups, tail = encode_jpeg(jpeg[:2] + comment + jpeg[2:]).pieces
    assert tail == comment
    assert tuple(groups) == encode_jpeg(jpeg).pieces[:-1]


@pytest.mark.parametrize("sampling", [0x11, 0x22, 0x21, 0x44])
def test_sampling_factors_of_one_component_mean_nothing(sampling):
    """A gray image that says 2x2 is encoded to the same bytes as one that says 1x1."""
    jpeg = bytearray(make_jpeg(1, 40, 56, "L"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 11] = 0x11
    expected = encode_jpeg(bytes(jpeg)).pieces
    jpeg[frame + 11] = sampling
    assert encode_jpeg(bytes(jpeg)).pieces == expected


@pytest.mark.parametrize(
    ("count", "seed"), [(400, 0), pytest.param(12000, 1, marks=pytest.mark.long)]
)
def test_damage_is_judged_once(count, seed, jpegtran):
    """jpegtran accepts every damaged JPEG that is encoded and produces the same bytes; the verdict
    and its reason are the same with and without AVX2.
    """
    assert jpegtran(make_jpeg(), "-copy", "none")
    damaged = list(mutants.mutants(count, seed))
    assert [text for text in map(mutants.difference, damaged) if text] == []
    refused = [mutants.judge(jpeg)[0] for jpeg in damaged]
    accepted = refused.count(None)
    assert count / 8 < accepted < 7 * count / 8
    assert sum("native core" in text for text in refused if text) > count / 8


def test_what_only_the_core_sees_is_refused():
    """A run of zeros that leaves its block, which libjpeg passes over, is damage."""
    damaged = next(
        jpeg for jpeg in mutants.mutants(400) if "none that fits" in str(mutants.judge(jpeg)[0])
    )
    with pytest.raises(CorruptJpeg, match="expected Huffman codes of scan"):
        encode_jpeg(damaged)


@pytest.mark.parametrize("kind", range(10))
def test_every_kind_of_source_is_encoded(kind):
    """Restarts, arithmetic coding, frames of Motion JPEG, and heights that come late included."""
    source = mutants.sources()[kind]
    assert mutants.judge(source)[0] is None
    assert mutants.difference(source) is None


def join_grays(widths):
    """A JPEG of which each component is a gray one of this width, in a scan of its own."""
    grays = [make_jpeg(seed, 8, width, "L") for seed, width in enumerate(widths)]
    found = [map_jpeg(gray) for gray in grays]
    first = grays[0]
    frame = first.index(b"\xff\xc0")
    scan = found[0].scan_ranges[0][-1][0]
    triples = b"".join(bytes((i, width // 16 << 4 | 1, 0)) for i, width in enumerate(widths, 1))
    head = b"\xff\xc0\0\x11\x08" + first[frame + 5 : frame + 9] + b"\3" + triples
    parts = [first[:frame], head, first[frame + 13 : scan]]
    for i, (gray, each) in enumerate(zip(grays, found, strict=True), 1):
        start, stop = each.scan_ranges[0][-1]
        parts.append(gray[start : start + 5] + bytes((i,)) + gray[start + 6 : stop])
    return b"".join((*parts, EOI))


def test_rare_sampling_factors_are_kept(jpegtran):
    """Factors that do not divide the largest, which few decoders read, are transcoded as well,
    unless the coding is arithmetic.
    """
    source = join_grays((48, 32, 16))
    *groups, _ = encode_jpeg(source).pieces
    assert b"".join(groups) + EOI == jpegtran(source, "-copy", "none", "-progressive")
    with pytest.raises(UnsupportedJpeg, match="subsampling"):  # not damage
        encode_jpeg(jpegtran(source, "-arithmetic"))


@pytest.mark.parametrize("script", [STANDARD, Q95], ids=lambda script: script.name)
def test_many_blocks_are_sent_by_scans_of_one_component(script):
    """Images of more than 10 blocks in an MCU, which JPEG only allows without one, are stored."""
    alone = [((component,), 0, 63, 0, 0) for component in range(3)]
    changed = bytearray(rescan(make_jpeg(3, 50, 70, subsampling=0), alone).jpeg)
    start = changed.index(b"\xff\xc0")
    changed[start + 11 : start + 18 : 3] = b"\x22" * 3  # as 1x1 each, but 12 blocks
    jpeg = bytes(changed)
    groups = encode_jpeg(jpeg, script).pieces[:-1]
    for same in (b"".join(groups) + EOI, pixels.make_baseline(jpeg)):
        assert np.array_equal(pixels.decode(same), pixels.decode(jpeg))
    for scan in range(1, script.num_groups):
        prefix = b"".join(groups[:scan]) + EOI
        smooth = pixels.decode_image(prefix, smoothing=True)
        assert np.array_equal(smooth, pixels.decode(prefix))


def test_some_tables_are_missing(jpegtran):
    """A JPEG that lost one of its Huffman tables is refused; nobody guesses which one it was."""
    jpeg = make_jpeg()
    table = jpeg.rindex(b"\xff\xc4")
    with pytest.raises(UnsupportedJpeg, match="DHT segment"):
        encode_jpeg(jpeg[:table] + jpeg[jpeg.index(b"\xff\xda") :])
