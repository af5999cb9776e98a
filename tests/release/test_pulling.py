"""What a reader fetches: only what it lacks, from where it stopped, and nothing that is wrong."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from releases import ids, make_store
from servers import Fault, faulty, nginx, s3
from support import ROOT, wait_for

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import (
    ConcurrentWriter,
    CorruptCheckpoint,
    PCRError,
    StorageError,
    VersionUnavailable,
)
from pcrshard.release import publish, pull
from pcrshard.release.release_index import read_index
from pcrshard.storage.locks import hold_lock


@pytest.fixture(scope="module")
def sender(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("sender"))


@pytest.fixture(scope="module")
def offered(sender, tmp_path_factory):
    """Versions 1 to 5, with keyframes at 1 and 4."""
    folder = tmp_path_factory.mktemp("web")
    publish(sender, str(folder), keyframe_every=3)
    return folder


@pytest.fixture
def web(offered, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(offered, tmp_path / "web")


@pytest.fixture
def client(tmp_path):
    return DeltaStore(str(tmp_path / "client"), order="forward")


def test_only_the_missing_deltas_move(sender, offered, client):
    """A new reader takes the last keyframe; later one delta; the bytes are those of nginx's log."""
    told = []
    with nginx(offered) as server:
        first = pull(server.url(), client, release=4, progress=lambda *far: told.append(far))
        assert [file.old for file in first.files] == [None]
        assert told[-1] == (first.num_bytes, first.files[0].num_bytes)
        server.reset()
        second = pull(server.url(), client)
        asked = [request for request in server.requests() if request.path.endswith(".pcp")]
        again = pull(server.url(), client)
    assert [file.name for file in second.files] == [request.path[1:] for request in asked]
    assert sum(request.body_bytes for request in asked) == second.num_bytes
    assert 10 * second.num_bytes < second.release.raw_bytes
    assert ids(client) == ids(sender)[3:5]
    assert torch.equal(client.load(2)["model"]["w"], sender.load(5)["model"]["w"])
    assert (again.number, again.files, again.num_bytes) == (2, (), 0)
    assert client.verify() == []


def test_a_chain_of_deltas_is_followed(sender, offered, client):
    """The releases between are added too, each as the sender has it."""
    client.append(sender.read(1))
    got = pull(str(offered), client, release=3)
    assert got.number == 3
    assert ids(client) == ids(sender)[:3]
    assert not os.path.exists(os.path.join(client.url, ".pull"))


def test_object_stores_on_both_sides(sender, tmp_path):
    """Published to S3, pulled from there into a store on S3; keys are never shown."""
    with s3() as server:
        options = server.storage_options
        publish(sender, server.url("web"), versions=[1, 2], options=options)
        client = DeltaStore(server.url("client"), options=options)
        assert pull(server.url("web"), client, options=options).number == 2
        assert ids(client) == ids(sender)[:2]
        with pytest.raises(PCRError) as refused:
            pull(server.url("nothing"), client, options=options)
    assert options["secret"] not in str(refused.value)


def test_a_bad_network_is_survived(sender, offered, client):
    """Answers of 503 and cut connections are asked for again, as everywhere in this package."""
    faults = [Fault(status=503), None, Fault(status=503), Fault(cut_after=300), None, None]
    with faulty(offered, faults) as server:
        pull(server.url(), client)
    assert ids(client) == ids(sender)[3:5]


def test_a_password_is_not_shown(offered, client):
    """In errors URLs have neither passwords nor signatures."""
    with nginx(offered) as server:
        url = server.url().replace("://", "://user:hush@")
        with pytest.raises(PCRError) as missing:
            pull(f"{url}/nowhere?signature=hush", client)
        with pytest.raises(PCRError) as unknown:
            pull(f"{url}?signature=hush", client, max_bytes=5)
    assert "hush" not in str(missing.value) + str(unknown.value)


CHILD = """
import sys
from pcrshard.checkpoint import DeltaStore
from pcrshard.release import pull
pull(sys.argv[1], DeltaStore(sys.argv[2]))
"""


def test_a_killed_pull_goes_on_in_the_middle_of_a_file(tmp_path):
    """After SIGKILL during a slow transfer, the second pull does not fetch the first part again."""
    sender = DeltaStore(str(tmp_path / "sender"), bound=None)
    sender.save({"w": torch.randn(3000, 1000)}, blocking=True)
    web = tmp_path / "web"
    size = publish(sender, str(web)).files[0].num_bytes
    assert size > 10_000_000
    client = str(tmp_path / "client")
    with nginx(web, limit_rate=4_000_000, limit_rate_after=8_500_000) as server:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, server.url(), client], env=environment
        )
        spool = tmp_path / "client" / ".pull"
        wait_for(lambda: any(path.stat().st_size for path in spool.glob("*.part")))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    there = next(spool.glob("*.part")).stat().st_size
    assert 0 < there < size
    store = DeltaStore(client)
    with nginx(web) as server:
        got = pull(server.url(), store)
    assert got.num_bytes == size - there
    assert ids(store) == ids(sender)
    assert not spool.exists()


def test_two_pulls_into_one_store(offered, client):
    """The second one is refused while the first one works."""
    spool = os.path.join(client.url, ".pull")
    os.makedirs(spool)
    with hold_lock(spool), pytest.raises(ConcurrentWriter, match="another process is pulling"):
        pull(str(offered), client)
    assert pull(str(offered), client).number == 2


def damage_nothing_else(web, change):
    """Change the index by a function of its JSON."""
    raw = json.loads((web / "releases.json").read_text())
    change(raw)
    (web / "releases.json").write_text(json.dumps(raw))


def swap_ids(raw):
    """Say that the files of two releases make each other's versions."""
    first, second = (item["id"] for item in raw["releases"][3:])
    text = json.dumps(raw).replace(first, "x").replace(second, first).replace('"x"', f'"{second}"')
    raw.update(json.loads(text))


def larger(raw):
    """Every release has a byte more than is true."""
    for item in raw["releases"]:
        item["raw_bytes"] += 1


def longer(raw):
    """Every file has a byte more than is true."""
    for item in raw["files"]:
        item["num_bytes"] += 1


def other_digests(raw):
    """No file has its digest."""
    for item in raw["files"]:
        item["sha256"] = "0" * 64


@pytest.mark.parametrize("lie", [swap_ids, larger, longer, other_digests])
def test_an_index_that_lies_adds_nothing(web, client, lie):
    """About ids, sizes in memory, sizes of files, digests: each is found, each time."""
    damage_nothing_else(web, lie)
    for _ in range(2):
        with pytest.raises(PCRError, match="expected"):
            pull(str(web), client)
        assert client.versions() == []


def test_a_damaged_file_adds_nothing(web, sender, client):
    """One flipped bit anywhere; once it is repaired the same command goes on."""
    file = read_index(str(web)).find(None)
    path = next(web.glob(f"*-{file.id[:16]}-delta.pcp"))
    whole = path.read_bytes()
    for place in range(0, len(whole), 1997):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint, match="expected the SHA-256"):
            pull(str(web), client)
        assert ids(client) == ids(sender)[3:4]
    path.write_bytes(whole)
    pull(str(web), client)
    assert ids(client) == ids(sender)[3:5]


def test_a_file_of_another_version_is_refused(web, client):
    """Even when its digest in the index is right."""
    index = read_index(str(web))
    keyframes = [file.name for file in index.files if file.old is None]
    wrong = (web / keyframes[0]).read_bytes()
    (web / keyframes[1]).write_bytes(wrong)

    def agree(raw):
        entry = next(item for item in raw["files"] if item["name"] == keyframes[1])
        entry["num_bytes"] = len(wrong)
        entry["sha256"] = hashlib.sha256(wrong).hexdigest()

    damage_nothing_else(web, agree)
    with pytest.raises(CorruptCheckpoint, match="expected a file that makes"):
        pull(str(web), client)
    assert client.versions() == []


def test_huge_promises_take_no_memory_and_no_traffic(web, client):
    """A release of a petabyte, and a file of one, are refused by the index alone."""
    for what, name in (("releases", "raw_bytes"), ("files", "num_bytes")):
        before = (web / "releases.json").read_bytes()

        def promise(raw, what=what, name=name):
            for item in raw[what]:
                item[name] = 1 << 47

        damage_nothing_else(web, promise)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with nginx(web) as server:
            with pytest.raises(CorruptCheckpoint, match="see max_bytes"):
                pull(server.url(), client)
            assert len(server.requests()) == 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50_000
        (web / "releases.json").write_bytes(before)
    with pytest.raises(CorruptCheckpoint, match="at most 10000 bytes"):
        pull(str(web), client, max_bytes=10_000)


def test_an_endless_index_is_not_read(tmp_path, client):
    """It ends at its limit, not at the end of memory."""
    with (tmp_path / "releases.json").open("wb") as file:
        file.truncate(1 << 33)
    with nginx(tmp_path) as server:
        started = time.monotonic()
        with pytest.raises(StorageError):
            pull(server.url(), client)
        assert time.monotonic() - started < 5


def test_nothing_is_offered(tmp_path, client):
    """The error says what was looked for."""
    with pytest.raises(VersionUnavailable, match=r"there is no releases\.json"):
        pull(str(tmp_path), client)
    with nginx(tmp_path) as server, pytest.raises(VersionUnavailable):
        pull(server.url(), client)


def test_a_link_is_not_followed(offered, client, tmp_path):
    """What another user has put in place of a file on its way is not written to."""
    spool = tmp_path / "client" / ".pull"
    spool.mkdir(parents=True)
    (tmp_path / "precious").write_bytes(b"x")
    for file in read_index(str(offered)).files:
        (spool / f"{file.sha256}.part").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="cannot write"):
        pull(str(offered), client)
    assert (tmp_path / "precious").read_bytes() == b"x"
