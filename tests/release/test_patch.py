"""A release is one small file that makes exactly the new version, or is refused."""

import pytest
from releases import same, state

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import BrokenChain, CorruptCheckpoint, VersionUnavailable
from pcrshard.release.patch import apply_patch, write_patch


@pytest.fixture
def sender(tmp_path):
    store = DeltaStore(str(tmp_path / "sender"))
    for number in range(1, 6):
        store.save(state(number))
    store.wait()
    return store


@pytest.fixture
def receiver(tmp_path, sender):
    """It holds the sender's version 2, as its own version 1."""
    store = DeltaStore(str(tmp_path / "receiver"), order="forward")
    store.append(sender.read(2))
    return store


def test_a_patch_makes_the_new_version_exactly(tmp_path, sender, receiver):
    """By ids, not by numbers; a second patch goes on from the first one."""
    patch = write_patch(sender, 2, 4, str(tmp_path / "a.pcp"))
    assert (tmp_path / "a.pcp").stat().st_size == patch.num_bytes
    number, version = apply_patch(receiver, str(tmp_path / "a.pcp"))
    assert number == 2
    assert version.id == patch.new == sender.versions()[3].id
    assert same(receiver.load(2), sender.load(4))
    write_patch(sender, 4, 5, str(tmp_path / "b.pcp"))
    assert apply_patch(receiver, str(tmp_path / "b.pcp"))[0] == 3
    assert same(receiver.load(), sender.load(5))
    assert receiver.verify() == []


def test_the_wrong_reference_is_refused(tmp_path, sender, receiver):
    """The receiver lacks version 3: both sides are named, nothing is added."""
    patch = write_patch(sender, 3, 4, str(tmp_path / "a.pcp"))
    message = f"expected a store with {patch.old.hex()}.*{receiver.versions()[0].id.hex()}"
    with pytest.raises(BrokenChain, match=message):
        apply_patch(receiver, str(tmp_path / "a.pcp"))
    assert len(receiver.versions()) == 1
    with pytest.raises(BrokenChain, match="versions are none"):
        apply_patch(DeltaStore(str(tmp_path / "empty")), str(tmp_path / "a.pcp"))


def test_a_damaged_patch_is_refused(tmp_path, sender, receiver):
    """Any flipped byte, and a cut file."""
    path = tmp_path / "a.pcp"
    write_patch(sender, 2, 3, str(path))
    data = path.read_bytes()
    for place in range(0, len(data), 199):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises((CorruptCheckpoint, BrokenChain, ValueError)):
            apply_patch(receiver, str(path))
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpoint, match="bytes, got"):
        apply_patch(receiver, str(path))
    assert len(receiver.versions()) == 1


def test_a_version_that_is_not_there_makes_no_patch(tmp_path, sender):
    """No file is left."""
    with pytest.raises(VersionUnavailable):
        write_patch(sender, 1, 77, str(tmp_path / "a.pcp"))
    assert not (tmp_path / "a.pcp").exists()
