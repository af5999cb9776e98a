"""A store against a dict: saves, ties, deletes, reopening, kills, a second writer, and pulls."""

import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import pytest
import servers
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from states import same

from pcrshard.checkpoint import DeltaStore, pull
from pcrshard.errors import ConcurrentWriter, VersionUnavailable

HERE = pathlib.Path(__file__).parent
KILLED = """
import os, sys, pickle
sys.path.insert(0, sys.argv[1])
from test_store_property import random_state
from pcrshard.checkpoint import DeltaStore
url, seed, options = sys.argv[2], int(sys.argv[3]), eval(sys.argv[4])
store = DeltaStore.lossless(url, keyframe_every=3, options=options)
print("ready", flush=True)
while True:
    seed += 1
    number = store.save(random_state(seed), blocking=True, metrics={"seed": seed})
    print(number, seed, flush=True)
"""


def random_state(seed):
    """A pure function of its seed: tied tensors, steps of a walk, keys that come and go."""
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


class StoreMachine(RuleBasedStateMachine):
    """The model is a dict from the version's number to its state."""

    server = None

    @initialize()
    def start(self):
        self.folder = tempfile.mkdtemp(prefix="pcrshard-property-")
        self.options = None
        self.url = os.path.join(self.folder, "store")
        if self.server is not None:
            self.url = self.server.url(f"property-{uuid.uuid4().hex}")
            self.options = self.server.storage_options
        self.versions = {}
        self.seeds = itertools.count(1)
        self.mirrored = {}
        self.mirror = DeltaStore(os.path.join(self.folder, "mirror"))
        self.writers = [self.opened(), self.opened()]

    def opened(self):
        return DeltaStore.lossless(self.url, keyframe_every=3, options=self.options)

    @rule(writer=st.integers(0, 1))
    def save(self, writer):
        """One of two writers saves; if it is told of the other one, it saves again."""
        seed = next(self.seeds)
        try:
            number = self.writers[writer].save(random_state(seed), blocking=True)
        except ConcurrentWriter:
            number = self.writers[writer].save(random_state(seed), blocking=True)
        assert number not in self.versions
        assert number > max(self.versions, default=0)
        self.versions[number] = seed

    @rule(data=st.data(), writer=st.integers(0, 1))
    def delete(self, data, writer):
        """Some versions are deleted, also by a writer that does not know the newest ones."""
        if self.versions:
            keep = data.draw(st.sets(st.sampled_from(sorted(self.versions)), min_size=1))
            self.writers[writer].delete(keep=keep)
            self.versions = {number: self.versions[number] for number in keep}

    @rule(writer=st.integers(0, 1))
    def reopen(self, writer):
        """A process that ends and starts again."""
        self.writers[writer].close()
        self.writers[writer] = self.opened()

    @rule(seconds=st.floats(0, 0.15))
    def kill(self, seconds):
        """kill -9 while versions are saved: those that were there stay, none is half there."""
        seed = 1000 * next(self.seeds)
        arguments = [str(HERE), self.url, str(seed), repr(dict(self.options or {}))]
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}"},
        )
        assert child.stdout.readline() == "ready\n"
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        told = [tuple(map(int, line.split())) for line in child.stdout if line.endswith("\n")]
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        found = {r.number: r.metrics.get("seed") for r in self.opened().versions()}
        assert all(found.get(number) == seed for number, seed in told)
        self.versions |= {n: seed for n, seed in found.items() if n not in self.versions}

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
        if self.versions:
            for number in {max(self.versions), min(self.versions)}:
                assert same(self.writers[0].load(number), random_state(self.versions[number]))
        else:
            with contextlib.suppress(VersionUnavailable):
                assert self.writers[0].load() is None

    def teardown(self):
        if hasattr(self, "writers"):
            assert self.writers[0].versions() == [] or self.writers[0].verify() == []
            for store in (*self.writers, self.mirror):
                store.close()
            shutil.rmtree(self.folder)


def run(machine, examples, steps):
    patient = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase.settings = patient
    machine.TestCase().runTest()


class LocalMachine(StoreMachine):
    pass


class S3Machine(StoreMachine):
    pass


@pytest.fixture(scope="module")
def s3():
    with servers.s3() as server:
        yield server


def test_a_local_store_is_a_dict():
    """Whatever happens in whatever order."""
    run(LocalMachine, 5, 10)


def test_a_store_on_s3_is_a_dict(s3):
    """The same in an object store."""
    S3Machine.server = s3
    run(S3Machine, 2, 6)


@pytest.mark.long
def test_many_local_histories():
    """The same for longer."""
    run(LocalMachine, 60, 30)


def interleave(url, options, rounds):
    """Two writers that know nothing of each other take turns; gives what each was promised."""
    first, second = (DeltaStore.lossless(url, options=options) for _ in range(2))
    promised, refused = {}, 0
    for number in range(rounds):
        for who, store in enumerate((first, second)):
            seed = 2 * number + who
            try:
                promised[store.save(random_state(seed), blocking=True)] = seed
            except ConcurrentWriter:
                refused += 1
    first.close()
    second.close()
    return promised, refused


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.long)])
def test_two_writers_on_s3_lose_no_version(s3, rounds):
    """Each version that was promised is there, with its content."""
    url = s3.url(f"two-writers-{rounds}")
    promised, refused = interleave(url, s3.storage_options, rounds)
    store = DeltaStore(url, options=s3.storage_options)
    assert [r.number for r in store.versions()] == sorted(promised)
    assert len(promised) + refused == 2 * rounds
    assert refused > 0
    for number in (*list(promised)[::9], max(promised)):
        assert same(store.load(number), random_state(promised[number]))


def test_two_processes_on_s3_lose_no_version(s3, tmp_path):
    """Really at the same time: each process keeps what it was promised."""
    url = s3.url("two-processes")
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from test_store_property import random_state
from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import ConcurrentWriter
store = DeltaStore.lossless(sys.argv[2], options=eval(sys.argv[4]))
done = 0
while done < 12:
    seed = 100 * int(sys.argv[3]) + done
    try:
        print(store.save(random_state(seed), blocking=True), seed, flush=True)
        done += 1
    except ConcurrentWriter:
        pass
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(HERE), url, str(who), repr(s3.storage_options)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}"},
        )
        for who in (1, 2)
    ]
    promised = {}
    for child in children:
        text, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        promised |= {int(n): int(seed) for n, seed in map(str.split, text.splitlines())}
    store = DeltaStore(url, options=s3.storage_options)
    assert len(promised) == 24
    assert [r.number for r in store.versions()] == sorted(promised)
    assert all(same(store.load(n), random_state(seed)) for n, seed in promised.items())
