"""Damaged files, kills, and full disks are detected; earlier versions stay intact."""

import errno
import os
import resource
import shutil
import signal
import threading

import pytest
import torch
from states import same, saved, tiny_state
from support import damage

from pcrshard import storage
from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import PCRError, StorageError, UnsupportedState
from pcrshard.weightsync import WeightPublisher


def load_all(url):
    """Return each version's state, or the error that it raised."""
    found = {}
    for number in range(1, 4):
        try:
            found[number] = DeltaStore(url).load(number)
        except PCRError as error:
            found[number] = error
    return found


def cut(path, stop):
    path.write_bytes(path.read_bytes()[:stop])


def extend(path, _):
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("harm", "every"),
    [
        pytest.param(damage, 199, id="flipped"),
        pytest.param(cut, 499, id="truncated"),
        pytest.param(extend, 1 << 30, id="extended"),
        pytest.param(damage, 1, id="each-byte-flipped", marks=pytest.mark.long),
    ],
)
def test_damage_is_found(tmp_path, harm, every):
    """``verify`` finds damage in any file of a store, and no load returns a wrong state."""
    store = saved(tmp_path, 3, tiny_state)
    expected = load_all(tmp_path)
    for path in [*sorted(tmp_path.glob("*.pcd")), max(tmp_path.glob("manifest-*.pcm"))]:
        data = path.read_bytes()
        for place in range(0, len(data), every):
            harm(path, place)
            try:
                problems = DeltaStore(tmp_path).verify()
            except PCRError as error:
                problems = [error]
            assert problems, f"{path.name}: {place} of {len(data)} is not found"
            for number, state in load_all(tmp_path).items():
                assert isinstance(state, PCRError) or same(state, expected[number])
            path.write_bytes(data)
    assert store.verify() == []


def test_a_lost_answer_is_no_conflict(tmp_path, monkeypatch):
    """If a client library repeats a request that had succeeded, nothing is reported as lost."""

    def repeat(*args, **options):
        create(*args, **options)
        create(*args, **options)

    create = storage.create
    monkeypatch.setattr(storage, "create", repeat)
    assert saved(tmp_path / "store", 2, tiny_state).verify() == []
    publisher = WeightPublisher(tmp_path / "stream")
    assert [publisher.publish({"w": torch.ones(n)}) for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize("blocking", [True, False])
def test_ctrl_c_does_not_tear_a_save(tmp_path, monkeypatch, blocking):
    """Ctrl-C ends a blocking save without a version, and the wait for one in the background, which
    the next save waits for.
    """
    go_on = threading.Event()
    write = storage.atomic_write

    def slow(*args, **options):
        go_on.wait()
        return write(*args, **options)

    def interrupt(*_):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    with DeltaStore(tmp_path) as store:
        store.save(tiny_state(1), blocking=True)
        monkeypatch.setattr(storage, "atomic_write", slow)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            store.save(tiny_state(2), blocking=blocking)
            store.versions()
        signal.signal(signal.SIGALRM, handler)
        threading.Timer(0.2, go_on.set).start()
        store.save(tiny_state(3), blocking=True)
        found = [store.load(record.number)["epoch"] for record in store.versions()]
    assert found == [1, 3] if blocking else [1, 2, 3]
    assert store.verify() == []


def test_training_goes_on_after_damage(tmp_path, caplog):
    """If the newest version cannot be read, the next save starts a new chain and warns."""
    store = saved(tmp_path, 2, tiny_state)
    damage(tmp_path / store.versions()[1].file)
    with DeltaStore(tmp_path) as resumed:
        assert resumed.save(tiny_state(3), blocking=True) == 3
        assert resumed.save(tiny_state(4), blocking=True) == 4
    assert "version 2 cannot be read" in caplog.text
    assert [record.parent for record in store.versions()] == [None, 1, None, 3]
    assert len(store.verify()) == 1


def test_what_is_in_memory_hides_no_damage(tmp_path):
    """``verify`` reads the files, also of the version that the writer has just written, and names
    the one that is damaged, whichever versions need it.
    """
    store = saved(tmp_path, 3, tiny_state)
    store.delete(keep=[2, 3])
    damaged = tmp_path / store.versions()[0].file
    damage(damaged, -200)
    assert [damaged.name in str(problem) for problem in store.verify()] == [True, True]


@pytest.fixture
def meanwhile(monkeypatch):
    """Let another process do something before a function of ``storage`` is called."""

    def before(name, action):
        def called(*args, **options):
            monkeypatch.undo()
            action()
            return getattr(storage, name)(*args, **options)

        monkeypatch.setattr(storage, name, called)

    return before


def test_web_servers_have_the_newest_manifest(tmp_path, meanwhile):
    """A writer that another one overtakes does not set back the copy of the manifest."""
    store = saved(tmp_path, 1, tiny_state, keyframe_every=1)
    # As soon as it is listed.
    meanwhile("list_names", lambda: DeltaStore(tmp_path).delete(keep=[-1]))
    store.save(tiny_state(2), blocking=True)
    newest = max(tmp_path.glob("manifest-*"))
    assert (tmp_path / "manifest.pcm").read_bytes() == newest.read_bytes()
    assert [record.number for record in store.versions()] == [2]


def test_a_version_that_moves_while_it_is_loaded(tmp_path, meanwhile):
    """A version whose file a deletion replaces is read from its new file."""
    store = saved(tmp_path, 2, tiny_state)
    expected = store.load()
    meanwhile("read", lambda: DeltaStore(tmp_path).delete(keep=[2]))
    assert same(store.load(), expected)


@pytest.mark.parametrize("source", [None, "itself", "another run"])
def test_a_missing_or_swapped_file_breaks_only_its_chain(tmp_path, source):
    """A delta is never applied to another file; versions that do not need it still load."""
    store = saved(tmp_path / "a", 3, tiny_state, keyframe_every=2)
    expected = load_all(tmp_path / "a")
    victim, _, other = (tmp_path / "a" / record.file for record in store.versions())
    if source == "another run":
        stranger = saved(tmp_path / "b", 1, lambda number: tiny_state(number + 7))
        other = tmp_path / "b" / stranger.versions()[0].file
    if source:
        shutil.copy(other, victim)
    else:
        victim.unlink()
    found = load_all(tmp_path / "a")
    kind = PCRError if source else StorageError
    assert [isinstance(found[number], kind) for number in (1, 2, 3)] == [True, True, False]
    assert same(found[3], expected[3])


def test_a_failed_save_loses_only_itself(tmp_path):
    """If a save in the background fails, the next call stores its own state and then raises the
    error; the failed version's number is not used for another state.
    """
    too_large = {"step": 2, "blob": bytes(65 << 20)}
    with DeltaStore(tmp_path) as store:
        assert store.save({"step": 1}) == 1
        assert store.save(too_large) == 2
        with pytest.raises(UnsupportedState, match="keep large values in tensors"):
            store.save({"step": 3})
        assert store.save({"step": 4}, blocking=True) == 4
        assert store.save(too_large) == 5
        with pytest.raises(UnsupportedState, match=r"a builtins\.set"):
            store.save({"step": {6}})
        with pytest.raises(UnsupportedState, match="keep large values in tensors"):
            store.save({"step": 6}, blocking=True)
        found = {record.number: store.load(record.number)["step"] for record in store.versions()}
    assert found == {1: 1, 3: 3, 4: 4, 6: 6}


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """On a full disk, the call after a save fails clearly, and saving works again later."""
    store = saved(tmp_path, 3, tiny_state)
    expected = load_all(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Below the size of a version, then below that of the manifest.
        for limit in (0, 100, 700):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            store.save(tiny_state(4))
            with pytest.raises(StorageError, match="cannot write"):
                store.versions()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert all(map(same, load_all(tmp_path).values(), expected.values()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.save(tiny_state(4), blocking=True) == 7, "4 to 6 are those that failed"
    assert store.verify() == []
    left = [name for name in os.listdir(tmp_path) if "manifest" not in name]
    assert len(left) == 4, "what failed is gone"


def test_no_room_for_the_version_before_costs_only_bytes(tmp_path, monkeypatch, caplog):
    """If the disk has no room for the copy that the next delta refers to, versions are whole."""
    weight = torch.randn(90, 90)
    states = [{"a": weight * (1 + n / 1e4), "b": weight[0] * (1 + n / 1e4)} for n in range(4)]

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    with DeltaStore(tmp_path) as store:
        store.save(states[0], blocking=True)
        monkeypatch.setattr(os, "pwrite", full)
        for state in states[1:3]:
            store.save(state, blocking=True)
            assert same(store.load(), state)
        assert "no room for a copy of a" in caplog.text
        monkeypatch.undo()
        store.save(states[3])
        assert [record.parent for record in store.versions()] == [None, 1, None, None]
        assert all(same(store.load(n + 1), state) for n, state in enumerate(states))
        assert store.verify() == []
