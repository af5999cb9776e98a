"""Scans go to groups by fidelity."""

import pytest
from support import ROOT, write_files

from pcrshard import Shard
from pcrshard.cli.main import main
from pcrshard.format.scan_script import (
    STANDARD,
    ScanScript,
    group_scans,
    parse_scan,
    parse_script,
    scans_for,
)
from pcrshard.format.shard_format import SCRIPTS
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.pixels import make_progressive
from pcrshard.jpeg.split import join_scans, split_scans
from pcrshard.testing import make_jpeg

GROUPS = {
    "RGB": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    "L": (1, 2, 5, 6, 7, 10),
    "CMYK": (1, *[2] * 4, *[5] * 4, *[6] * 4, 7, *[10] * 4),
}


@pytest.mark.parametrize("mode", GROUPS)
def test_every_color_space_has_the_same_fidelity_at_a_scan(mode):
    """Scan 5 of a gray or CMYK image holds the coefficients that scan 5 of a color image holds."""
    source = make_jpeg(mode=mode)
    parts = map_jpeg(source)
    scans = scans_for(STANDARD, parts.color, len(parts.frame.components))
    found = map_jpeg(make_progressive(source, parts, scans).jpeg)
    assert group_scans(STANDARD, tuple(found.scans), found.color) == GROUPS[mode]


def test_a_group_may_hold_several_scans():
    """A script with fewer groups puts neighboring scans together."""
    coarse = ScanScript("coarse", ("0,1,2: 0-0, 0, 1; 0: 1-5, 0, 2", ";".join(STANDARD.groups[2:])))
    assert group_scans(coarse, tuple(STANDARD.scans), "ycc") == (1, 1, *[2] * 8)


def test_groups_never_decrease():
    """A scan that the script would send earlier stays behind the one before it, so that prefixes
    decode.
    """
    first, second, *_, fifth = STANDARD.scans[:5]
    assert group_scans(STANDARD, (first, fifth, second), "ycc") == (1, 5, 5)


@pytest.mark.parametrize(
    "text", ["", "0: 5-1, 0, 0", "0: 1-64, 0, 0", "0: 1-5, 0, 14", "x: 1-5, 0, 0", "0 1-5 0 0"]
)
def test_refuses_what_is_not_a_scan(text):
    """A typing error in a script is named."""
    with pytest.raises(ValueError, match="expected a"):
        parse_scan(text)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_built_in_script_is_its_file(name, jpegtran):
    """``--script NAME`` and ``--script conf/scans/NAME.txt`` are the same, and jpegtran takes the
    file; ``standard`` is what jpegtran makes of its own accord.
    """
    path = ROOT / "conf" / "scans" / f"{name}.txt"
    assert parse_script(name, path.read_text()) == SCRIPTS[name]
    jpeg = make_jpeg()
    same = jpegtran(jpeg, "-scans", str(path)) == jpegtran(jpeg, "-progressive")
    assert same == (name == "standard")


BAD_SCRIPTS = {
    "empty": ("# nothing", "groups"),
    "33 groups": ("0,1,2: 0-0, 0, 0;\n" * 33, "groups"),
    "a missing coefficient": (
        "0,1,2: 0-0, 0, 0; 0: 1-62, 0, 0; 1: 1-63, 0, 0; 2: 1-63, 0, 0",
        "coefficient 63 of component 0",
    ),
    "a bit sent twice": ("0,1,2: 0-0, 0, 0; 0: 0-0, 0, 0", "follow on"),
    "a bit left out": ("0,1,2: 0-0, 0, 2; 0,1,2: 0-0, 2, 0", "follow on"),
    "a last bit left out": ("\n".join(STANDARD.groups[:-1]), "last bit"),
}


@pytest.mark.parametrize("why", BAD_SCRIPTS)
def test_bad_scripts_are_refused(why):
    """A script that would lose coefficients, or that no decoder takes, is refused before the first
    image.
    """
    text, message = BAD_SCRIPTS[why]
    with pytest.raises(ValueError, match=message):
        parse_script("bad", text)


def test_a_script_of_the_users_own(tmp_path, djpeg, jpegtran):
    """encode --script FILE stores by any script; each prefix is jpegtran's file cut there, and the
    whole is lossless.
    """
    path = tmp_path / "coarse.txt"
    path.write_text(
        "# three groups\n0,1,2: 0-0, 0, 1; 0: 1-9, 0, 2;\n"
        "1: 1-63, 0, 0; 2: 1-63, 0, 0; 0: 10-63, 0, 2;\n"
        "0: 1-63, 2, 1; 0: 1-63, 1, 0; 0,1,2: 0-0, 1, 0;\n"
    )
    jpeg = make_jpeg(5, 60, 90)
    write_files(tmp_path / "src", {"a.jpg": jpeg})
    status = main(["encode", str(tmp_path / "src"), str(tmp_path / "dst"), "--script", str(path)])
    assert status == 0
    shard = Shard(tmp_path / "dst" / "data-000000.tar")
    assert shard.index.schema.script == "coarse"
    header, scans, _ = split_scans(jpegtran(jpeg, "-copy", "none", "-scans", str(path)))
    for group, count in ((1, 2), (2, 5), (3, 8)):
        assert next(shard.samples(group))["jpg"] == join_scans(header, scans[:count])
    assert djpeg(next(shard.samples("full"))["jpg"]) == djpeg(jpeg)
