"""Batches decoded by threads: the pixels of each image alone, whatever happens to the threads."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pcrshard import native
from pcrshard.native._core import ffi, lib
from pcrshard.native.pieces import piece_table
from pcrshard.native.pool import Draw, Pool, draw_boxes, draw_keys, own_pool
from pcrshard.testing import make_jpeg

JPEGS = [
    make_jpeg(i, 40 + 7 * i, 61 - 5 * i, "L" if i == 3 else "RGB", quality=85) for i in range(6)
]
# Scattered over memory, in pieces some of which are empty.
PIECES = [[jpeg[:n], b"", jpeg[n : 2 * n], jpeg[2 * n :]] for n, jpeg in enumerate(JPEGS, 200)]
TABLE = piece_table(PIECES)
KEYS = draw_keys((3, 1), range(6))


def num_threads():
    """Threads of this process, as the system counts them."""
    return len(os.listdir("/proc/self/task"))


# --- pixels


def draw(crop="random", flip=0.0):
    """Half of the image or more."""
    return Draw(crop, (0.5, 1.0), (3 / 4, 4 / 3), flip)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("width", [18, 37])
@pytest.mark.parametrize("flip", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_threads_give_the_pixels_of_each_image(threads, layout, width, flip, backend):
    """Pixels do not depend on how many threads there are, a flipped image is a mirror image, and a
    batch says which crops it drew.
    """
    out = np.empty((6, 16, width, 3) if layout == "hwc" else (6, 3, 16, width), np.uint8)
    draws = [draw(flip=flip)]
    with Pool(threads, backend) as pool:
        batch = pool.decode(TABLE, [out], layout=layout, draws=draws, keys=KEYS)
        assert all(batch.wait())
    for place, jpeg in enumerate(JPEGS):
        size = (40 + 7 * place, 61 - 5 * place)
        assert tuple(batch.sizes[place]) == size
        assert np.array_equal(batch.boxes[place], draw_boxes(KEYS[place], size, draws))
        box = tuple(batch.boxes[place, 0, :4].tolist())
        alone = native.decode([jpeg], crop=box, size=(16, width), layout=layout)
        axis = 1 if layout == "hwc" else 2
        assert np.array_equal(out[place], np.flip(alone, axis) if flip else alone)


@pytest.mark.parametrize("threads", [0, 2])
def test_what_cannot_be_decoded_does_not_stop_the_others(threads):
    """A damaged or empty image is reported; the rest of the batch is decoded."""
    cut = make_jpeg(7, 30, 30)[:-200]
    images = [JPEGS[0], JPEGS[0][:200], b"", cut, JPEGS[1]]
    table = piece_table([[image] for image in images])
    out = np.empty((5, 8, 8, 3), np.uint8)
    with Pool(threads) as pool:
        batch = pool.decode(table, [out], draws=[draw()], keys=KEYS[:5])
        assert batch.wait() == [True, False, False, False, True]
        assert batch.sizes.tolist()[2:4] == [[0, 0], [30, 30]]
        wrong = np.array([1, 9, 1, 1, 8], np.uint8)  # no such orientation
        batch = pool.decode(table, [out], orientations=wrong)
        assert batch.wait() == [True, False, False, False, True]
        assert pool.decode(table[:0], [out[:0]]).wait() == []


@pytest.mark.parametrize(
    ("out", "how"),
    [
        (np.empty((5, 8, 8, 3), np.uint8), {}),
        (np.empty((6, 8, 16, 3), np.uint8)[:, :, ::2], {}),
        (np.empty((6, 8, 8, 3), np.int8), {}),
        (np.empty((6, 8, 8, 3), np.uint8), {"draws": [draw()], "keys": KEYS[:5]}),
        (np.empty((6, 8, 8, 3), np.uint8), {"orientations": np.ones(5, np.uint8)}),
    ],
)
def test_shapes_that_do_not_fit_are_refused(out, how):
    """A batch of another shape is an error, not memory written elsewhere."""
    with Pool(1) as pool, pytest.raises(ValueError, match=r"expected|could not broadcast"):
        pool.decode(TABLE, [out], **how)
    for threads in (-1, 4097):
        with pytest.raises(ValueError, match="expected 0 to 4096 threads"):
            Pool(threads)


@pytest.mark.parametrize("count", [0, 65])
def test_more_pictures_than_there_is_room_for_are_refused(count):
    """A batch of no picture or of 65 of each image is an error, not memory written elsewhere."""
    outs = [np.empty((6, 8, 8, 3), np.uint8)] * count
    with Pool(0) as pool:
        with pytest.raises(ValueError, match=f"1 to 64 pictures of an image, got {count}"):
            pool.decode(TABLE, outs)
        assert all(pool.decode(TABLE, [np.empty((6, 8, 8, 3), np.uint8)] * 64).wait())


@pytest.mark.parametrize("spoil", [{"num_views": 65}, {"num_views": 0}, {"order": [6]}])
def test_the_core_refuses_a_batch_that_it_cannot_decode_safely(spoil):
    """A wrong number at the boundary of the core is an error code, never memory read elsewhere."""
    codes, order = ffi.new("int32_t[]", 1), ffi.new("int32_t[]", spoil.get("order", [0]))
    fields = {
        "pieces": ffi.new("pcr_piece *"),
        "num_pieces": 1,
        "num_images": 1,
        "views": ffi.new("pcr_view *"),
        "num_views": spoil.get("num_views", 1),
        "codes": codes,
        "order": order,
    }
    pool = lib.pcr_pool_new(0, 0)
    assert lib.pcr_pool_add(pool, ffi.new("pcr_batch *", fields)) == lib.PCR_USAGE
    lib.pcr_pool_free(pool)


# --- the threads


def start(pool, batches=50):
    """Give a pool work for a while, and keep nothing of it."""
    for _ in range(batches):
        pool.decode(TABLE, [np.empty((6, 64, 64, 3), np.uint8)])


def test_threads_end_with_the_pool():
    """A loop that is left early leaves no thread; memory of batches is not freed under them."""
    before = num_threads()
    for _ in range(20):
        pool = Pool(3)
        start(pool)
        assert num_threads() == before + 3
        pool.close()
        pool.close()
        assert num_threads() == before
        pool = Pool(2)
        start(pool)
        del pool
        assert num_threads() == before


def test_a_wait_ends_when_another_thread_closes_the_pool():
    """Using a closed pool raises an error instead of waiting for threads that have exited: an
    interpreter that exits closes pools that daemon threads wait for.
    """
    pool = Pool(1)
    start(pool, 6000)  # most of a second, also if this thread has to wait for a core
    last = pool.decode(TABLE, [np.empty((6, 64, 64, 3), np.uint8)])
    seen = []

    def wait():
        try:
            last.wait()
        except RuntimeError as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.02)
    pool.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert "not closed" in str(seen[0])
    with pytest.raises(RuntimeError, match="not closed"):
        start(pool)


def test_a_forked_child_is_told_and_ends():
    """A child has none of the threads: it gets an error, and exits without waiting for them."""
    pool = Pool(2)
    start(pool, 200)
    batch = pool.decode(TABLE, [np.empty((6, 64, 64, 3), np.uint8)])
    child = os.fork()
    if child == 0:
        try:
            batch.wait()
        except RuntimeError:
            pool.close()
            del batch, pool
            with Pool(1) as own:
                own.decode(TABLE, [np.empty((6, 8, 8, 3), np.uint8)]).wait()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert all(batch.wait())
    pool.close()


def test_threads_that_wait_take_turns_where_the_pool_has_none():
    """Many threads may wait for batches of a pool without threads, each other's included."""
    for _ in range(30):
        with Pool(0) as pool:
            outs = [np.empty((6, 16, 16, 3), np.uint8) for _ in range(8)]
            batches = [pool.decode(TABLE, [out]) for out in outs]
            with concurrent.futures.ThreadPoolExecutor(4) as waiting:
                done = list(waiting.map(lambda batch: batch.wait(), [*batches, *batches[::-1]]))
        assert all(map(all, done))
        assert all(np.array_equal(out, outs[0]) for out in outs)


def test_closing_waits_for_a_thread_that_decodes():
    """Memory of a batch is not freed under a thread that decodes it by waiting."""
    jpeg = make_jpeg(0, 1000, 1000)
    for _ in range(5):
        pool = Pool(0)
        batch = pool.decode(
            piece_table([[jpeg]] * 20), [np.empty((20, 900, 900, 3), np.uint8)], keep=jpeg
        )
        seen = []

        def wait(batch=batch, seen=seen):
            try:
                seen.append(batch.wait())
            except RuntimeError as error:
                seen.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.01)
        pool.close()
        waiting.join(20)
        assert "not closed" in seen[0]


def test_a_forked_child_gets_pools_of_its_own():
    """A child decodes by itself, whatever a pool without threads did when the process forked."""
    inherited = own_pool()
    child = os.fork()
    if child == 0:
        try:
            inherited.decode(TABLE, [np.empty((6, 8, 8, 3), np.uint8)])
        except RuntimeError:
            out = np.empty((6, 8, 8, 3), np.uint8)
            os._exit(7 if all(own_pool().decode(TABLE, [out]).wait()) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert own_pool() is inherited


LEFT = """
import numpy, os, sys
from pcrshard.native.pieces import piece_table
from pcrshard.native.pool import Pool
from pcrshard.testing import make_jpeg
jpeg = make_jpeg(0, 400, 400)
table = piece_table([[jpeg]] * 64)
pool = Pool(2)
batches = [pool.decode(table, [numpy.empty((64, 64, 64, 3), numpy.uint8)]) for _ in range(500)]
print("ready", flush=True)
if sys.argv[1] == "wait":
    batches[-1].wait()
"""


def test_an_interpreter_exits_in_the_middle():
    """A script may end while threads decode: it ends at once, without a word."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT, "exit"], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ready\n", b"")


def test_ctrl_c_interrupts_a_wait():
    """Ctrl-C reaches the interpreter while it waits for threads, and they end with it."""
    command = [sys.executable, "-c", LEFT, "wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 5
    assert process.returncode == -signal.SIGINT
    assert errors.decode().splitlines()[-1] == "KeyboardInterrupt"
