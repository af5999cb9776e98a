"""The campaign: an epoch that ends delivered every sample once with the right bytes; everything
else ended with a clear error.
"""

import collections
import logging
import multiprocessing
import os
import random
import shutil
import signal

import pytest
import servers
import webdataset as wds
from servers import Fault
from support import read_samples, request_threads, wait_for, within, write_files

import pcrshard
from pcrshard.errors import PCRError
from pcrshard.storage.retry import Retry
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.stage import stage

QUICK = Retry(attempts=6, first_delay=0.005, max_delay=0.02, timeout=0.2, deadline=5)
SECONDS = 60  # a trial that takes longer hangs
SCANS = (1, 2, 5, "full")
WIRE = (
    "cut",
    "reset",
    "5xx",
    "stall",
    "length",
    "no range",
    "flip",
    "wrong range",
    "etag",
    "mixed",
)
KINDS = (*WIRE, "replaced", "cache files", "cache small", "kill stage")


def make_fault(kind, rng, num_bytes):
    """Return one fault of this kind for a response of ``num_bytes``."""
    place = rng.randrange(max(num_bytes, 1))
    if kind == "mixed":
        kind = rng.choice(WIRE[:-1])
    return {
        "cut": lambda: Fault(cut_after=place),
        "reset": lambda: rng.choice(
            [Fault(drop=True, reset=True), Fault(cut_after=place, reset=True)]
        ),
        "5xx": lambda: Fault(status=rng.choice([500, 502, 503, 504, 429]), body=b"busy"),
        "stall": lambda: Fault(stall=30, stall_after=rng.choice([None, place])),
        "length": lambda: Fault(
            length_error=rng.choice([-1, 1]) * rng.randrange(1, max(num_bytes, 2))
        ),
        "no range": lambda: Fault(ignore_range=True, cut_after=rng.choice([None, place])),
        "flip": lambda: Fault(flip=place),
        "wrong range": lambda: Fault(shift=512, as_asked=rng.choice([True, False])),
        "etag": lambda: Fault(
            headers={"ETag": f'"{rng.random()}"'}, cut_after=rng.choice([None, place])
        ),
    }[kind]()


class Policy:
    """Random faults for shards, the same for the same bytes and attempt."""

    def __init__(self, seed, kind, probability):
        self.seed, self.kind, self.probability = seed, kind, probability

    def __call__(self, ask):
        rng = random.Random(f"{self.seed} {ask.path} {ask.range} {ask.attempt}")
        if (
            ask.method != "GET"
            or ask.range is None
            or not ask.path.endswith(".tar")
            or rng.random() >= self.probability
        ):
            return None
        return make_fault(self.kind, rng, ask.range[1] - ask.range[0])


class World:
    """Two versions of a dataset, their samples at each scan, and what happened so far."""

    def __init__(self, folder):
        self.folder, self.truth, self.index = folder, {}, {}
        self.outcomes = collections.defaultdict(collections.Counter)
        for version in "AB":
            images = {
                f"{('dog', 'cat')[i % 2]}/{i:03d}.jpg": make_jpeg(
                    ord(version) * 100 + i, 48 + i, 80 - i, quality=90
                )
                for i in range(24)
            }
            write_files(folder / version / "in", images)
            options = pcrshard.EncodeOptions(num_shards=4)
            pcrshard.encode(folder / version / "in", folder / version / "out", options, workers=1)
            self.index[version], _ = pcrshard.open_dataset(folder / version / "out")
            for scan in SCANS:
                self.truth[version, scan] = read_samples(folder / version / "out", scan)

    def copy(self, version, target):
        target.mkdir(exist_ok=True)
        for path in (self.folder / version / "out").iterdir():
            shutil.copy(path, target / path.name)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def epoch(urls, scan, expected, **reading):
    """Run an epoch; ``ok`` if it delivered exactly what is expected, ``error`` if it ended with an
    error of ours that names the shard, or the cache whose mark is damaged.
    """
    found = {}
    try:
        for sample in wds.WebDataset(urls, shardshuffle=False).pcr_scan(
            scan, retry=QUICK, **reading
        ):
            assert sample["__key__"] not in found, f"{sample['__key__']} came twice"
            found[sample["__key__"]] = {
                k: v for k, v in sample.items() if k == "__key__" or not k.startswith("__")
            }
    except PCRError as error:
        is_named = any(url in str(error) for url in urls)
        assert is_named or "if it is a cache" in str(error), f"no shard in {error!r}"
        assert all(expected.get(key) == value for key, value in found.items()), (
            "wrong bytes before an error"
        )
        return "error"
    assert found.keys() == expected.keys(), f"{len(found)} of {len(expected)} samples"
    assert found == expected, "wrong bytes"
    return "ok"


def trial(world, seed, kind, tmp_path):
    """One random job against one kind of trouble; notes how each epoch ended."""
    rng = random.Random(seed)
    served = tmp_path / f"served-{seed}"
    world.copy("A", served)
    cache_dir = str(tmp_path / f"cache-{seed}")
    cached = kind in ("cache files", "cache small") or rng.random() < 0.4
    known = rng.random() < 0.5
    reading = {"prefetch": rng.choice([0, 1, 2, 4])} | (
        {"index": world.index["A"]} if known else {}
    )
    if cached:
        reading |= {
            "cache_dir": cache_dir,
            "cache_bytes": rng.choice([None, 12_000, 40_000]) if kind != "cache small" else 12_000,
        }
    policy = Policy(
        seed,
        kind if kind in WIRE else "mixed",
        rng.choice([0.2, 0.4, 0.8]) if kind in WIRE else rng.choice([0, 0.2]),
    )
    note = world.outcomes[kind]
    with servers.faulty(served, policy) as server:
        urls = [server.url(entry.name) for entry in world.index["A"].shards]
        if kind == "kill stage":
            note.update(_kill_stage(world, rng, server, tmp_path / f"stage-{seed}"))
            return
        version = "A"
        for number in range(3):
            if kind == "replaced" and number:
                version = rng.choice("AB")
                world.copy(version, served)
            if kind == "cache files":
                _damage_some(rng, cache_dir)
            scan = rng.choice(SCANS)
            # Old samples are right only where an index asks for them: then a replaced shard is an
            # error, or comes from the cache.
            expected = world.truth["A" if known else version, scan]
            note[epoch(urls, scan, expected, **reading)] += 1
    # A request that has failed ends its thread a moment later.
    assert wait_for(lambda: not request_threads())


def _damage_some(rng, cache_dir):
    paths = sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(cache_dir) for name in names
    )
    for path in rng.sample(paths, len(paths) // 3):
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            what = rng.choice(["flip", "cut", "delete", "garbage"])
            if what == "flip" and data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif what == "cut":
                del data[rng.randrange(len(data) + 1) :]
            elif what == "garbage":
                data = bytearray(rng.randbytes(len(data)))
            file.seek(0)
            file.truncate()
            file.write(data)
        if what == "delete":
            os.unlink(path)


def _stage_process(url, dst, scan):
    logging.disable()
    try:
        stage(url, dst, scan, workers=2, retry=QUICK)
    except PCRError:
        os._exit(3)


def _kill_stage(world, rng, server, dst):
    outcomes = collections.Counter()
    for scan in (2, 5, "full"):
        for _ in range(2):
            args = (server.url(), str(dst), scan)
            process = multiprocessing.get_context("forkserver").Process(
                target=_stage_process, args=args
            )
            process.start()
            process.join(rng.uniform(0.02, 0.4))
            process.kill()
            process.join()
            outcomes[{0: "ok", 3: "error", -signal.SIGKILL: "killed"}[process.exitcode]] += 1
            _check_staged(world, dst)
        try:
            stage(server.url(), dst, scan, retry=QUICK)
            outcomes["ok"] += 1
            held, _ = pcrshard.open_dataset(dst)
            assert held.scan == (None if scan == "full" else scan)
        except PCRError as error:
            assert ".tar" in str(error) or "pcr.json" in str(error)
            outcomes["error"] += 1
        _check_staged(world, dst)
    return outcomes


def _check_staged(world, dst):
    """What the index of a staged copy promises is there, whatever happened since it was written."""
    if (dst / "pcr.json").exists():
        index, _ = pcrshard.open_dataset(dst)
        for scan in SCANS:
            if index.scan is None or (scan != "full" and scan <= index.scan):
                assert read_samples(dst, scan) == world.truth["A", scan]


def run_trials(world, tmp_path, seeds):
    logging.getLogger("pcrshard").setLevel(logging.CRITICAL)
    try:
        for seed in seeds:
            kind = KINDS[seed % len(KINDS)]
            print(f"trial {seed}: {kind}")
            with within(SECONDS):
                trial(world, seed, kind, tmp_path)
            for name in ("served", "cache", "stage"):
                shutil.rmtree(tmp_path / f"{name}-{seed}", ignore_errors=True)
    finally:
        logging.getLogger("pcrshard").setLevel(logging.NOTSET)
    for kind in KINDS:
        print(f"{kind}: {dict(world.outcomes[kind])}")


def test_some_trials(world, tmp_path):
    """One trial of each kind of trouble: no short epoch, no wrong byte, no hang."""
    run_trials(world, tmp_path, range(len(KINDS)))
    assert sum(world.outcomes[kind]["ok"] for kind in KINDS) > len(KINDS)


@pytest.mark.long
def test_campaign(world, tmp_path, capsys):
    """Hundreds of random jobs survive random faults; ``pytest -s`` prints the outcome of each."""
    world.outcomes.clear()
    with capsys.disabled():
        print()
        run_trials(world, tmp_path, range(1000, 1000 + 20 * len(KINDS)))
    # A line that only cuts, answers 5xx or stalls now and then is survived far more often than not.
    for kind in ("cut", "5xx", "stall", "cache files", "cache small", "replaced"):
        assert world.outcomes[kind]["ok"] > world.outcomes[kind]["error"], kind
