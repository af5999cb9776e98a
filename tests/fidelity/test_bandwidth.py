"""BandwidthTuner, on a simulated loop and a simulated link; no clock, no files."""

import itertools
import random
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import shard_entry

from pcrshard import PCRDataset, PCRLoader, ScanLevel, open_dataset
from pcrshard.errors import ScanUnavailable
from pcrshard.fidelity.bandwidth import BandwidthTuner, bytes_per_sample
from pcrshard.reading.scan_level import Followed

SIZES = [1273, 2729, 3022, 3374, 4589, 6758, 6956, 7330, 7771, 11404, 11427]
BATCH, SHARD, USED = 16, 64, 0.02
SPEED = BATCH / USED  # images per second without stalls
AHEAD = 2  # shards


def simulate(tuner, rate, steps, noise=0.1, seed=0, shard_samples=SHARD):
    """Rows of (time, waited, used, scan) of a loop over one link.

    The link gives ``rate(time)`` bytes a second, and loads AHEAD shards ahead, at the level of
    their request.
    """
    rng, now, link = random.Random(seed), 0.0, 0.0
    loaded, rows = [], []
    for step in range(steps):
        shard = step * BATCH // shard_samples
        while len(loaded) <= shard + AHEAD:
            link, left = max(link, now), size(tuner.level.value) * shard_samples
            while left > 1e-6:
                part = min(0.005 * rate(link), left)
                left, link = left - part, link + part / rate(link)
            loaded.append(link)
        waited, used = max(0.0, loaded[shard] - now), USED * (1 + noise * rng.uniform(-1, 1))
        now += waited + used
        rows.append((now, waited, used, tuner.record(waited, used, BATCH)))
    return rows


def make_tuner(scan="full", **options):
    return BandwidthTuner(ScanLevel(scan), SIZES, window=15, ahead=(AHEAD + 1) * SHARD, **options)


def stalls(rows):
    return sum(row[1] for row in rows) / sum(row[1] + row[2] for row in rows)


def size(scan):
    return SIZES[-1] if scan == "full" else SIZES[scan - 1]


@pytest.mark.parametrize("factor", [0.13, 0.2, 0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("seed", range(2))
def test_constant_bandwidth_is_matched_without_oscillation(factor, seed):
    """It settles soon, waits little from then on, and seldom tries a higher scan."""
    bandwidth = factor * SPEED * SIZES[-1]
    rows = simulate(make_tuner(), lambda time: bandwidth, 4000, seed=seed)
    affordable = max(s for s in SIZES if s <= bandwidth / SPEED)
    assert stalls(rows[100:]) < 0.05, "settles within 20 windows"
    assert all(stalls(rows[i : i + 1000]) < 0.05 for i in range(100, 3000, 250))
    late = [row[3] for row in rows[1000:]]
    changes = sum(a != b for a, b in itertools.pairwise(late))
    assert changes < 100, "fewer than one change in 30 steps"
    assert sum(size(scan) for scan in late) / len(late) > 0.7 * affordable


@pytest.mark.parametrize("factor", [0.2, 0.5, 0.8])
def test_shards_of_many_batches_are_matched_too(factor):
    """A shard of 1024 samples is 64 batches, of which only the first waits."""
    tuner = BandwidthTuner(ScanLevel(), SIZES, ahead=(AHEAD + 1) * 1024)
    bandwidth = factor * SPEED * SIZES[-1]
    rows = simulate(tuner, lambda time: bandwidth, 6000, shard_samples=1024)
    late = rows[3000:]
    assert stalls(late) < 0.05
    affordable = max(s for s in SIZES if s <= bandwidth / SPEED)
    assert sum(size(row[3]) for row in late) / len(late) > 0.7 * affordable


@pytest.mark.parametrize(
    ("start", "floor", "factor", "settled", "scan"),
    [
        ("full", 1, 2, 0, "full"),
        (1, 1, 3, 180, "full"),
        ("full", 5, 0.1, 20, 5),
        (1, "full", 9, 10, "full"),
    ],
    ids=["enough for full", "from scan 1", "slower than its floor", "floor at full"],
)
def test_it_settles_at_one_scan(start, floor, factor, settled, scan):
    """Full where the link carries it, and never below the floor, however slow."""
    tuner = make_tuner(start, floor=ScanLevel(floor))
    rows = simulate(tuner, lambda time: factor * SPEED * SIZES[-1], 300)
    assert {row[3] for row in rows[settled:]} == {scan}
    assert factor < 1 or stalls(rows) < 0.05


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_a_drop_is_answered_and_a_return_too(factor, seed):
    """It takes 2 shards to know the bandwidth, and those already asked for to be through."""
    full = 1.2 * SPEED * SIZES[-1]
    rows = simulate(
        make_tuner(), lambda time: full / factor if 10 <= time < 30 else full, 4000, seed=seed
    )
    first = next(i for i, row in enumerate(rows) if row[0] > 10 and row[1] > 0.05 * USED)
    changed = next(i for i in range(first, len(rows)) if rows[i][3] != "full")
    per_shard = SHARD // BATCH
    assert (changed - first) / per_shard <= 3
    calm = first + (3 + AHEAD + 1) * per_shard
    last = max(i for i, row in enumerate(rows) if row[0] < 30)
    assert stalls(rows[calm:last]) < 0.06
    back = next(i for i in range(last, len(rows)) if rows[i][3] == "full")
    assert rows[back][0] - 30 < 8, "400 steps at most, those up included"
    assert {row[3] for row in rows[back:]} == {"full"}


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_waits_that_are_not_for_bytes_are_excused(share):
    """A loader that is slow at any scan, by decoding or the processor, costs no fidelity."""
    tuner = make_tuner()
    rng = random.Random(0)
    scans = [
        tuner.record(USED * share / (1 - share) * rng.uniform(0.5, 1.5), USED, BATCH)
        for _ in range(1500)
    ]
    assert set(scans[500:]) <= {10, "full"}, "which are the same but for metadata"
    assert tuner.excused == pytest.approx(share, abs=0.1)


def test_a_hiccup_now_and_then_does_not_keep_it_low():
    """A step in 79 waits long, as at the start of an epoch; scan 1 is left all the same."""
    tuner = make_tuner()
    simulate(tuner, lambda time: 0.1 * SPEED * SIZES[-1], 200)
    assert tuner.level.value == 1
    for i in range(3000):
        tuner.record(0.1 if i % 79 == 1 else 0.0, USED, BATCH)
    assert tuner.level.value in (10, "full")


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 9), st.floats(0.001, 9), st.sampled_from([0, 1, 3, 5, "full"])),
        min_size=50,
    ),
    ahead=st.sampled_from([0, 192]),
)
def test_whatever_happens_the_scan_makes_sense(steps, ahead):
    """For any waits, and levels that the user sets: scans that exist, from the floor on."""
    tuner = BandwidthTuner(ScanLevel(), SIZES, floor=2, window=2, ahead=ahead)
    for waited, used, given_level in steps * 5:
        if given_level:
            tuner.level.value = given_level
        assert tuner.record(waited, used, BATCH) in (*range(2, 11), "full")
        assert 0 <= tuner.excused < 1


def test_watch_counts_waits_but_for_the_first(monkeypatch):
    """The first batch of an epoch is always waited for."""
    seen = []
    tuner = make_tuner()
    monkeypatch.setattr(
        tuner, "record", lambda waited, used, samples: seen.append((waited, samples))
    )
    clock = iter([7.0, 8.0, 10.0, 11.0])
    fake = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("pcrshard.fidelity.bandwidth.time", fake)
    assert list(tuner.watch(["a", "b"], samples=3)) == ["a", "b"]
    assert seen == [(0.0, 3), (2.0, 3)]


def test_watch_knows_how_much_the_loader_reads_ahead(dataset):
    """Three shards of six samples, without a number from the user."""
    loader = PCRLoader(PCRDataset(dataset, decoder=32, fields=("jpg", "cls")), 4)
    tuner = BandwidthTuner(ScanLevel(), SIZES)
    assert len(list(tuner.watch(loader))) == len(loader)
    assert tuner.ahead == 18


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"max_wait": 0.0}, {"max_wait": 1.0}, {"ahead": -1}]
)
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="expected bytes of at least one scan"):
        BandwidthTuner(ScanLevel(), SIZES, **wrong)
    with pytest.raises(ValueError, match="expected bytes of at least one scan"):
        BandwidthTuner(ScanLevel(), [5])


def test_sizes_come_from_the_index(dataset):
    """Means over all shards, ``full`` last."""
    index, _ = open_dataset(dataset)
    sizes = bytes_per_sample(index.shards)
    assert sizes == [index.prefix_bytes(scan) / 24 for scan in (*range(1, 11), "full")]


@pytest.mark.parametrize("highest", [1, 2, 5])
def test_it_never_asks_a_staged_copy_for_more_than_it_holds(highest):
    """However fast the link is; and a floor above the copy is refused before the job begins."""
    level = ScanLevel(1)
    tuner = BandwidthTuner(level, SIZES)
    level.follow(Followed([shard_entry(highest)], {}, "copy"))
    rows = simulate(tuner, lambda time: 9 * SPEED * SIZES[-1], 300)
    assert {row[3] for row in rows[100:]} == {highest}
    assert {row[3] for row in rows} <= {*range(1, highest + 1)}
    with pytest.raises(ScanUnavailable, match="asked for scan 7, the staged copy"):
        BandwidthTuner(level, SIZES, floor=7)


def test_a_level_that_somebody_sets_is_kept():
    """A schedule or a user may move it between steps."""
    tuner = make_tuner("full")
    simulate(tuner, lambda time: 2 * SPEED * SIZES[-1], 20)
    tuner.level.value = 3
    assert tuner.record(0.0, USED, BATCH) == 3
