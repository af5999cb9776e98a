"""Stores and releases of format 1 are converted bit for bit."""

import shutil

import pytest
from states import same, tiny_state
from support import ROOT, damage

from pcrshard.checkpoint import DeltaStore, convert
from pcrshard.errors import BrokenChain, PCRError, VersionUnavailable

GOLDEN = ROOT / "tests" / "golden" / "checkpoints-1"


@pytest.mark.parametrize("name", ["backward", "forward", "releases", "hop"])
def test_versions_keep_what_they_restored_to(tmp_path, name):
    """Stores in any delta order and releases convert bit for bit, also the lossy one, ``hop``."""
    new = str(tmp_path / "new")
    records = convert(str(GOLDEN / name), new)
    assert [record.number for record in records] == [1, 2, 3, 4]
    if name != "releases":
        assert [record.metrics for record in records] == [{"acc": n / 10} for n in range(1, 5)]
    with DeltaStore(new) as store:
        assert store.save(tiny_state(5), blocking=True) == 5
        assert store.verify() == []
        for number in range(1, 5):
            found, exact = store.load(number), tiny_state(number)
            error = (found["model"]["w"] - exact["model"]["w"]).abs().max()
            assert error <= 0.01 * exact["model"]["w"].std()
            assert same(found["model"]["b"], exact["model"]["b"])
            assert same(found, exact) == (name != "hop")


def test_what_cannot_be_converted_is_refused(tmp_path):
    """A conversion that fails with a clear error can be repeated; one that succeeded cannot."""

    def refused(error, words):
        with pytest.raises(error, match=words):
            convert(str(tmp_path / "old"), str(tmp_path / "new"))

    (tmp_path / "old").mkdir()
    refused(VersionUnavailable, "no versions of format 1")
    shutil.copytree(GOLDEN / "forward", tmp_path / "old", dirs_exist_ok=True)
    files = sorted((tmp_path / "old").glob("*.pcd"))
    damage(files[-1])
    refused(PCRError, files[-1].name)
    files[0].unlink()
    refused(BrokenChain, "is missing")
    shutil.copytree(GOLDEN / "forward", tmp_path / "old", dirs_exist_ok=True)
    convert(str(tmp_path / "old"), str(tmp_path / "new"))
    refused(ValueError, "there is one already")
