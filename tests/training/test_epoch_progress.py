"""The states of an epoch without files or torch: whatever a job does, it ends where it should."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.training.epoch_order import Geometry, Rules, epoch_order, worker_batches
from pcrshard.training.epoch_progress import MAX_SEGMENTS, EpochProgress

SIZES, GEOMETRY, RULES = [5, 3, 4, 7, 5], Geometry(4), Rules(3)
STEPS = sum(SIZES) // 4
BEGINNING = {"segments": [[4, 1, 4, 0]]}


def batches(progress, worker=0, workers=1):
    """The batches that an iteration from here on gives, as the dataset lays them out."""
    order = epoch_order(SIZES, GEOMETRY, RULES, epoch=progress.epoch, history=progress.segments)
    return [ids.tolist() for ids in worker_batches(order, workers=workers, worker=worker)]


def begin(progress):
    """A new iteration, and what it gives."""
    given = batches(progress)
    return progress.begun(len(given)), given


def through_json(state):
    return json.loads(json.dumps(state))


def whole(epoch):
    return batches(EpochProgress(epoch))


ACTIONS = st.one_of(
    st.tuples(st.just("iterate"), st.integers(0, STEPS + 1)),
    st.tuples(st.just("checkpoint"), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, STEPS)),
    st.tuples(st.just("set_epoch"), st.integers(0, 3)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(ACTIONS, max_size=12))
def test_any_job_reads_what_a_list_of_batches_says(actions):
    """Iterating, stopping, resuming and setting epochs in any order gives the batches of a model.

    The model is a place in the list of each epoch's batches: (epoch, first batch, batches had).
    """
    progress = EpochProgress()
    epoch, first, had = 0, 0, 0
    for action, number in actions:
        if action == "set_epoch":
            progress = progress.set_epoch(number)
            epoch, first, had = number, 0, 0
        elif action == "checkpoint":
            progress = EpochProgress(7).loaded(through_json(progress.state(GEOMETRY)))
            first, had = first + had, 0
            # A loop that resumes may set the epoch that it was in.
            progress = progress.set_epoch(epoch)
        else:
            progress, given = begin(progress)
            assert given == whole(epoch)[first:]
            had = min(number, len(given))
            for done in range(1, had + 1):
                progress = progress.gave(done)
            assert progress.all_given == (0 < had == len(given))
            if action == "iterate" and number > len(given):
                progress = progress.ended().set_epoch(epoch + 1)
                epoch, first, had = epoch + 1, 0, 0
    assert progress.epoch == epoch
    assert progress.state(GEOMETRY) == {"epoch": epoch, "segments": [[4, 1, 4, first + had]]}


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.data())
def test_workers_resume_their_own_part(workers, data):
    """Each worker's own state, taken at any place, gives exactly the rest of that worker's part."""
    for worker in range(workers):
        part = batches(EpochProgress(2), worker, workers)
        stop = data.draw(st.integers(0, len(part)))
        progress = EpochProgress(2).begun(len(part), worker, workers).gave(stop)
        state = through_json(progress.worker_state(worker, workers))
        resumed = EpochProgress().loaded(state)
        if stop < len(part):
            assert resumed.epoch == 2
        begun = resumed.begun(len(part), worker, workers)
        assert (begun.stage == "ended") == (stop == len(part))
        rest = [] if begun.stage == "ended" else part[begun.done :]
        assert rest == part[stop:]
        # The next epoch is a whole one.
        assert begun.ended().set_epoch(3).begun(len(part), worker, workers).done == 0


def test_a_worker_that_was_done_keeps_the_epoch_that_is_set():
    """The epoch that a job sets after an end is read, not the one that the old state is of."""
    state = EpochProgress(1).begun(3, 0, 2).gave(3).worker_state(0, 2)
    assert state["ended"]
    resumed = EpochProgress(2).loaded(state)
    assert resumed.epoch == 2
    skipped = resumed.begun(3, 0, 2)
    assert skipped.stage == "ended"
    again = skipped.begun(3, 0, 2)
    assert (again.stage, again.done) == ("reading", 0)


@pytest.mark.parametrize("other", [(1, 2), (0, 3), (0, 1)])
def test_the_state_of_another_worker_is_refused(other):
    """Another worker, or another number of workers, would read other samples."""
    state = EpochProgress().begun(3, 0, 2).gave(1).worker_state(0, 2)
    with pytest.raises(ValueError, match=r"got that of worker 0 of 2"):
        EpochProgress().loaded(state).begun(3, *other)


def test_an_epoch_that_ended_is_followed_by_the_next():
    """After the end the state is that of the next epoch, unless somebody counted batches."""
    ended = EpochProgress(4).begun(6).gave(6).ended()
    assert ended.state(GEOMETRY) == BEGINNING | {"epoch": 5}
    assert ended.state(GEOMETRY, 2) == {"epoch": 4, "segments": [[4, 1, 4, 2]]}


def test_a_loaded_place_is_kept_for_one_set_epoch():
    """The loop that resumes sets its epoch and keeps its place.

    Setting it again begins it again.
    """
    loaded = EpochProgress().loaded({"epoch": 3, "segments": [[4, 1, 4, 2]]})
    kept = loaded.set_epoch(3)
    assert kept.segments == [[4, 1, 4, 2]]
    assert kept.set_epoch(3) == EpochProgress(3)
    assert loaded.set_epoch(4) == EpochProgress(4)
    assert begin(loaded)[0].set_epoch(3) == EpochProgress(3)


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4), max_size=MAX_SEGMENTS),
)
def test_the_start_survives_shared_memory(epoch, segments):
    """Epoch and segments go through 64-bit integers of fixed number, whatever lies after them."""
    start = EpochProgress(epoch, segments)
    numbers = start.start_numbers() + [9] * 8
    assert EpochProgress().with_start(numbers) == start
    assert max(numbers) < 1 << 63


@pytest.mark.parametrize("epoch", [-1, None, "1", 1.0, 1 << 63])
def test_epochs_that_are_none(epoch):
    """Neither a call nor a state sets an epoch that is no number from 0."""
    with pytest.raises(ValueError, match="expected an epoch from 0"):
        EpochProgress().set_epoch(epoch)
    with pytest.raises(ValueError, match="expected an epoch from 0"):
        EpochProgress().loaded({"epoch": epoch, "segments": []})


@pytest.mark.parametrize(
    "segments", [None, 7, "abcd", [3], [[8, 1, 4, "1"]], [[8, 1, 4, -1]], [[8, 1, 4, 1]] * 65]
)
def test_segments_that_are_none(segments):
    """Nor does a state that somebody wrote by hand."""
    with pytest.raises(ValueError, match="at most 64 segments"):
        EpochProgress().loaded({"epoch": 0, "segments": segments})


@pytest.mark.parametrize(
    "part",
    [
        {"worker": [0, 2, 3]},
        {"worker": [2, 2]},
        {"worker": [0, 0]},
        {"worker": "01"},
        {"worker": [0, 2.0]},
        {"done": -1},
        {"done": 1 << 63},
        {"done": None},
        {"done": True},
        {"ended": 1},
        {"ended": "no"},
    ],
    ids=str,
)
def test_a_workers_state_is_checked(part):
    """A worker's state that was written by hand, or damaged, is refused as such."""
    state = {"epoch": 0, "segments": [], "worker": [0, 2], "done": 1, "ended": False} | part
    with pytest.raises(ValueError, match="expected a worker's state"):
        EpochProgress().loaded(state)


def test_a_worker_cannot_be_ahead_of_its_part():
    """More batches than there are would be an epoch that ends at once, without a word."""
    state = {"epoch": 0, "segments": [], "worker": [0, 1], "done": 7, "ended": False}
    with pytest.raises(ValueError, match="at most 3 batches"):
        EpochProgress().loaded(state).begun(3)


def test_transitions_leave_the_old_value():
    """A value is kept as it was: a state that was taken does not change later."""
    start = EpochProgress(1, [[4, 1, 4, 2]])
    state = start.state(GEOMETRY)
    for change in itertools.permutations(
        [lambda p: p.gave(2), EpochProgress.ended, lambda p: p.begun(4)]
    ):
        value = start
        for one in change:
            value = one(value)
    assert start == EpochProgress(1, [[4, 1, 4, 2]])
    assert state == {"epoch": 1, "segments": [[4, 1, 4, 2]]}
