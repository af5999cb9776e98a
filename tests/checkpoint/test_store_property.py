"""A store behaves like a dict under saves, deletes, kills, concurrent writers, and pulls."""

import contextlib
import itertools
import random
import shutil
import tempfile
import time
import uuid

import fsspec
import pytest
import torch
from children import received, start
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from states import same

from pcrshard.checkpoint import DeltaStore, pull, recover
from pcrshard.errors import ConcurrentWriter, CorruptCheckpoint


def random_state(seed):
    """Return a state that depends only on its seed, with tied tensors and varying keys."""
    generator = torch.Generator().manual_seed(seed % 7)
    weight = torch.randn(20, 15, generator=generator)
    weight = weight + seed * 1e-3
    state = {"w": weight, "i": seed, "list": [weight[2], (seed, None)]}
    if seed % 2:
        state["tied"] = weight
        state["view"] = weight.t()
    if seed % 3:
        state["words"] = torch.arange(seed % 50, dtype=torch.int64)
    return state


def save_forever(connection, url, seed, options):
    """Save states until this process is killed."""
    store = DeltaStore(url, keyframe_every=3, options=options)
    connection.send("ready")
    while True:
        seed += 1
        number = store.save(random_state(seed), blocking=True, metrics={"seed": seed})
        connection.send((number, seed))


def save_some(connection, url, seeds, options):
    """Save states, retrying whenever the other process wins."""
    store = DeltaStore(url, options=options)
    for seed in seeds:
        number = None
        while number is None:
            with contextlib.suppress(ConcurrentWriter):
                number = store.save(random_state(seed), blocking=True)
        connection.send((number, seed))


class StoreMachine(RuleBasedStateMachine):
    """A model of a store: a dict from the version number to the seed of its state."""

    server = None

    @initialize()
    def start(self):
        self.folder = tempfile.mkdtemp(prefix="pcrshard-property-")
        self.options = None
        self.place = self.folder
        if self.server is not None:
            self.place = self.server.url(f"property-{uuid.uuid4().hex}")
            self.options = self.server.storage_options
        self.url = f"{self.place}/store"
        self.versions = {}
        self.seeds = itertools.count(1)
        self.new_mirror()
        self.writers = [self.opened(), self.opened()]

    def new_mirror(self):
        self.mirrored = {}
        url = f"{self.place}/mirror-{next(self.seeds)}"
        self.mirror = DeltaStore(url, options=self.options)

    def opened(self):
        return DeltaStore(self.url, keyframe_every=3, options=self.options)

    @rule(writer=st.integers(0, 1))
    def save(self, writer):
        """One of two writers saves; if it detects the other writer, it retries."""
        seed = next(self.seeds)
        store, state = self.writers[writer], random_state(seed)
        try:
            number = store.save(state, blocking=True)
        except ConcurrentWriter:
            number = store.save(state, blocking=True)
        assert number not in self.versions
        assert number > max(self.versions, default=0)
        self.versions[number] = seed

    @rule(seed=st.integers(0, 999), writer=st.integers(0, 1))
    def delete(self, seed, writer):
        """Some versions are deleted, also by a writer that does not know the newest ones."""
        if self.versions:
            # Not drawn by hypothesis, because how many versions a killed writer saved varies.
            draw = random.Random(seed)
            keep = {*draw.sample(sorted(self.versions), draw.randint(1, len(self.versions)))}
            self.writers[writer].delete(keep=keep)
            self.versions = {number: self.versions[number] for number in keep}

    @rule(writer=st.integers(0, 1))
    def reopen(self, writer):
        """A process that ends and starts again."""
        self.writers[writer].close()
        self.writers[writer] = self.opened()

    @rule(seconds=st.floats(0, 0.15))
    def kill(self, seconds):
        """kill -9 during saves keeps every earlier version and leaves no partial one."""
        seed = 1000 * next(self.seeds)
        child, connection = start(save_forever, self.url, seed, self.options)
        assert connection.recv() == "ready"
        time.sleep(seconds)
        child.kill()
        told = list(received(connection))
        child.join()
        found = {r.number: r.metrics.get("seed") for r in self.opened().versions()}
        assert all(found.get(number) == seed for number, seed in told)
        self.versions |= {n: seed for n, seed in found.items() if n not in self.versions}

    @rule()
    def lose_and_recover(self):
        """All manifests are lost: nothing is written or removed, and all versions come back."""
        if not self.versions:
            return
        fs, folder = fsspec.core.url_to_fs(self.url, **(self.options or {}))
        fs.invalidate_cache()
        names = fs.ls(folder, detail=False)
        fs.rm([name for name in names if "manifest" in name])
        files = {name for name in names if "manifest" not in name}
        with pytest.raises(CorruptCheckpoint, match=r"see `pcrshard checkpoint recover`"):
            self.opened().save({}, blocking=True)
        fs.invalidate_cache()
        assert set(fs.ls(folder, detail=False)) == files
        found = recover(self.url, options=self.options, allow_loss=True)
        assert {record.number for record in found.versions} >= set(self.versions)
        # Numbers of versions that had been deleted may be used again.
        self.new_mirror()
        # Files of killed writers, and of versions whose deletion was interrupted.
        self.opened().delete(keep=self.versions)

    @rule()
    def pull_newest(self):
        """A mirror gets the newest version, and keeps what was deleted here."""
        if not self.versions:
            return
        newest = max(self.versions)
        if newest in self.mirrored:
            return
        got = pull(self.url, self.mirror, options=self.options)
        assert got.version == newest
        self.mirrored |= {n: self.versions[n] for n in got.added}
        for number in got.added:
            assert same(self.mirror.load(number), random_state(self.mirrored[number]))

    @invariant()
    def every_version_is_there(self):
        """Each writer sees the model: numbers, and the newest and some other version's state."""
        if not hasattr(self, "versions"):
            return
        for store in self.writers:
            assert [r.number for r in store.versions()] == sorted(self.versions)
        for number in {*list(self.versions)[:1], *list(self.versions)[-1:]}:
            assert same(self.writers[0].load(number), random_state(self.versions[number]))

    def teardown(self):
        if hasattr(self, "writers"):
            assert self.writers[0].versions() == [] or self.writers[0].verify() == []
            for store in (*self.writers, self.mirror):
                store.close()
            shutil.rmtree(self.folder)


def run(examples, steps, server=None):
    StoreMachine.server = server
    StoreMachine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
    )
    StoreMachine.TestCase().runTest()


@pytest.mark.parametrize(
    ("examples", "steps"), [(4, 8), pytest.param(60, 30, marks=pytest.mark.long)]
)
def test_a_local_store_is_a_dict(examples, steps):
    """Any sequence of operations leaves a local store in the state that a dict predicts."""
    run(examples, steps)


def test_a_store_on_s3_is_a_dict(s3):
    """Any sequence of operations leaves a store on S3 in the state that a dict predicts."""
    run(2, 6, s3)


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.long)])
def test_two_processes_on_s3_lose_no_version(s3, count):
    """Two concurrent processes lose no version whose save succeeded."""
    url, options = s3.url(f"two-processes-{count}"), s3.storage_options
    seeds = [range(who, who + count) for who in (1, 1001)]
    children = [start(save_some, url, each, options) for each in seeds]
    promised = dict(pair for _, connection in children for pair in received(connection))
    store = DeltaStore(url, options=options)
    assert sorted(promised.values()) == [*seeds[0], *seeds[1]]
    assert [r.number for r in store.versions()] == sorted(promised)
    for number in (*list(promised)[::9], max(promised)):
        assert same(store.load(number), random_state(promised[number]))
