"""Streams that are kept with the project can still be read."""

import hashlib
import pathlib
import shutil

import pytest
from support import ROOT

from pcrshard.weightsync import WeightMirror

GOLDEN = ROOT / "tests" / "golden" / "weightsync-1"
# Of the file at step 5; its tensors have every word size.
SHA256 = "dfb26b7d63198dd0804167b568660d3d4749138596342d90dc4b3304bb9e615c"


@pytest.mark.parametrize("name", ["stream", "slow", "disk-delta"])
def test_kept_streams_are_mirrored(tmp_path, name):
    """A mirror can follow an old stream from its first step or start at its last keyframe."""
    url = shutil.copytree(GOLDEN / name, tmp_path / name)
    early = WeightMirror(url, tmp_path / "early")
    for number in (1, 5):
        (url / "latest").write_text(str(number))
        assert early.update() == number
    late = WeightMirror(url, tmp_path / "late")
    assert late.update() == 5
    for mirror in (early, late):
        data = pathlib.Path(mirror.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == SHA256
