"""What a publisher writes: plain files, index last, nothing twice."""

import hashlib
import logging
import os

import pytest
from releases import ids, make_store
from servers import s3

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import BrokenChain, ConcurrentWriter, VersionUnavailable
from pcrshard.release import publish, pull
from pcrshard.release.release_index import read_index
from pcrshard.storage.locks import hold_lock


@pytest.fixture
def sender(tmp_path):
    return make_store(tmp_path / "sender")


def test_all_versions_are_offered(sender, tmp_path):
    """A keyframe, then deltas; each file is what the index says, and the index has no more."""
    told = []
    made = publish(sender, str(tmp_path / "web"), progress=lambda *far: told.append(far))
    index = read_index(str(tmp_path / "web"))
    assert (index.releases, index.files) == (made.releases, made.files)
    assert [release.id for release in index.releases] == ids(sender)
    assert [file.old is None for file in index.files] == [True, False, False, False, False]
    for file in index.files:
        data = (tmp_path / "web" / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.num_bytes, file.sha256)
    assert set(os.listdir(tmp_path / "web")) == {"releases.json", *(f.name for f in index.files)}
    assert told == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_publishing_again_adds_what_is_new(sender, tmp_path):
    """Files that are there are not touched; without news nothing happens at all."""
    web = tmp_path / "web"
    publish(sender, str(web), versions=[1, 2], keyframe_every=2)
    before = {path.name: path.stat().st_mtime_ns for path in web.iterdir()}
    assert publish(sender, str(web), versions=[1, 2]).files == ()
    assert {path.name: path.stat().st_mtime_ns for path in web.iterdir()} == before
    made = publish(sender, str(web), keyframe_every=2)
    assert [release.number for release in made.releases] == [3, 4, 5]
    kinds = [file.name.rpartition("-")[2] for file in made.files]
    assert kinds == ["delta.pcp", "keyframe.pcp", "delta.pcp", "delta.pcp", "keyframe.pcp"]
    del before["releases.json"]
    assert {name: (web / name).stat().st_mtime_ns for name in before} == before


def test_a_publisher_that_dies_leaves_the_old_index(sender, tmp_path):
    """Its files are there, but no reader is led to them; the next publisher goes on."""
    web = tmp_path / "web"
    publish(sender, str(web), versions=[1])

    def die(done, _total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(sender, str(web), progress=die)
    assert len(list(web.glob("*.pcp"))) == 3
    assert [release.number for release in read_index(str(web)).releases] == [1]
    publish(sender, str(web))
    client = DeltaStore(str(tmp_path / "client"))
    pull(str(web), client)
    assert ids(client) == ids(sender)


def test_a_version_that_was_removed_makes_a_keyframe_necessary(sender, tmp_path, caplog):
    """Readers can go on all the same; the publisher is told."""
    web = str(tmp_path / "web")
    publish(sender, web, versions=[1, 2])
    sender.compact([4, 5])
    with caplog.at_level(logging.WARNING):
        made = publish(sender, web)
    assert "does not hold release 2 any more" in caplog.text
    assert [file.old is None for file in made.files] == [True, False]


def test_another_store_is_refused(sender, tmp_path):
    """Its numbers would mean other versions."""
    web = str(tmp_path / "web")
    publish(sender, web)
    other = DeltaStore(str(tmp_path / "other"))
    other.save({"w": 1}, blocking=True)
    with pytest.raises(BrokenChain, match="releases of another store"):
        publish(other, web)
    with pytest.raises(VersionUnavailable, match="there is no version 77"):
        publish(sender, web, versions=[77])
    with pytest.raises(ValueError, match="expected keyframe_every to be at least 1"):
        publish(sender, web, keyframe_every=0)


def test_one_publishes_at_a_time(sender, tmp_path):
    """The second one is refused, and may come again."""
    web = tmp_path / "web"
    web.mkdir()
    with hold_lock(str(web)), pytest.raises(ConcurrentWriter):
        publish(sender, str(web))
    publish(sender, str(web))


def test_publishers_without_locks_find_each_other(sender, tmp_path):
    """On S3: one publishes while the other one is writing its files."""
    with s3() as server:
        web = server.url("web")
        options = server.storage_options

        def overtake(done, _total):
            if done == 1:
                publish(sender, web, versions=[1, 2], options=options)

        with pytest.raises(ConcurrentWriter, match="publish again"):
            publish(sender, web, versions=[1], options=options, progress=overtake)
        assert len(read_index(web, options).releases) == 2
        client = DeltaStore(str(tmp_path / "client"))
        assert pull(web, client, options=options).number == 2
        assert ids(client) == ids(sender)[:2]
