"""The transitions of the bandwidth search, from frozen state to frozen state; no clock."""

import dataclasses
import random

import pytest

from pcrshard.fidelity.bandwidth_search import Peak, Search, SearchRules, Step, Supply, Window

SIZES = (100.0, 200.0, 210.0, 400.0, 800.0, 1000.0)
BATCH = 10
USED = 1.0
RULES = SearchRules(SIZES, max_wait=0.05, window=4, patience=2, ahead=30)


def step(scan, waited=0.0, floor=1):
    return Step(waited, USED, BATCH, scan, floor)


def walk(search, waits, floor=1):
    """The search after steps with these waits, at the scans that it decides."""
    for waited in waits:
        search = search.advance(step(search.scan, waited, floor))
    return search


def start(scan="full", **known):
    return Search(RULES, **({"hold": RULES.patience, "scan": scan} | known))


def test_a_state_never_changes():
    """The same state and step give the same decision again: nothing is hidden in the object."""
    search = walk(start(), [1.0, 0.0, 0.0])
    before = dataclasses.replace(search)
    assert search.advance(step("full", 1.0)) == search.advance(step("full", 1.0))
    assert search == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        search.calm = 5


def test_waits_lower_the_scan_to_what_the_bandwidth_carries():
    """From wait to wait 20 samples of 1000 bytes came in 4 seconds, enough for 400 bytes each."""
    search = walk(start(), [1.0, 1.0, 1.0])
    assert search.bandwidth == 20 * 1000 / 4
    assert search.scan == 4
    assert search.peak == Peak(5, 4 / 20)
    assert (search.settling, search.window) == (30, Window())


def test_what_was_asked_for_at_the_old_scan_is_not_judged():
    """While those samples come, even long waits decide nothing."""
    search = walk(start(4, settling=30), [9.0, 9.0, 9.0])
    assert (search.scan, search.settling, search.window) == (4, 0, Window())


def test_one_hiccup_is_no_bandwidth():
    """A single wait measures nothing."""
    search = walk(start(), [9.0, 0.0, 0.0])
    assert (search.scan, search.bandwidth) == ("full", None)
    assert search.window.supply == Supply(3.0, 30)


def test_a_calm_loop_tries_the_next_scan_that_is_worth_it():
    """After two windows it goes from 200 bytes past 210 to 400, and knows where it came from."""
    search = walk(start(2), [0.0] * 8)
    assert (search.scan, search.fallback, search.lost, search.passed) == (4, 1, 0.0, 0.0)
    assert walk(start(2), [0.0] * 7).scan == 2


def test_a_failed_try_falls_back_and_holds_twice_as_long():
    """At the same bandwidth what held before the try still does."""
    search = walk(start(4, bandwidth=3000.0, fallback=1), [0.5, 0.5, 0.5])
    assert (search.scan, search.fallback, search.hold) == (3, None, 4)


def test_another_bandwidth_begins_again():
    """After a fall of the bandwidth a try costs nothing, and the patience is the usual one."""
    search = walk(start(5, bandwidth=1e6, hold=16, lost=7.0), [0.5, 0.5, 0.5])
    assert (search.hold, search.lost) == (RULES.patience, float("-inf"))


def test_expensive_tries_wait_longer():
    """After a try that lost much, as much time passes as makes it cheap again."""
    assert walk(start(2, lost=10.0, passed=100.0), [0.0] * 80).scan == 2
    assert walk(start(2, lost=10.0, passed=400.0), [0.0] * 80).scan != 2


def test_waits_as_long_as_above_are_excused():
    """At the floor a sample takes as long as at the peak did: the bytes are not to blame."""
    search = walk(start(1, peak=Peak(5, 0.15)), [0.5, 0.5, 0.5])
    assert (search.scan, search.bandwidth, search.peak) == ("full", None, None)
    assert search.excused == pytest.approx(1 / 3)


def test_a_floor_that_rises_is_taken_at_the_end_of_the_window():
    """What the task needs comes before what the link carries."""
    assert walk(start(1), [0.0] * 4, floor=5).scan == 5
    assert walk(start(1), [9.0] * 4, floor="full").scan == "full"


def test_a_hiccup_now_and_then_does_not_keep_it_low():
    """A step in 79 waits long, as at the start of an epoch; scan 1 is left all the same."""
    sizes = (1273, 2729, 3022, 3374, 4589, 6758, 6956, 7330, 7771, 11404, 11427)
    rules = SearchRules(sizes, max_wait=0.05, window=5, patience=3, ahead=192)
    search = Search(rules, hold=32, scan=1, bandwidth=0.3 * 800 * sizes[-1])
    for i in range(3000):
        search = search.advance(Step(0.1 if i % 79 == 1 else 0.0, 0.02, 16, search.scan))
    assert search.scan in (10, "full")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_state_makes_sense(seed):
    """For any waits, levels and floors: scans that exist, counts that are not negative."""
    rng = random.Random(seed)
    ahead = rng.choice([None, 0, 30])
    search = Search(dataclasses.replace(RULES, ahead=ahead), hold=2)
    for _ in range(2000):
        scan = search.scan if rng.random() < 0.99 else rng.choice([1, 3, 5, "full"])
        waited = rng.choice([0.0, 0.0, rng.expovariate(2)])
        lowest = rng.choice([1, 1, 2])
        search = search.advance(Step(waited, rng.uniform(0.5, 2), BATCH, scan, lowest))
        assert search.scan in (1, 2, 3, 4, 5, "full")
        assert search.calm >= 0
        assert RULES.patience <= search.hold <= 32
        assert 0 <= search.excused < 1
        assert search.window.steps < RULES.window


def test_positions_count_scans_and_full():
    """Whatever lies above scan N is the whole prefix."""
    assert [RULES.position(scan) for scan in (1, 5, 6, 32, "full")] == [0, 4, 5, 5, 5]
