"""Many streams by one call: the same pixels and the same refusals as one by one."""

from __future__ import annotations

import numpy as np
import pytest

from pcrshard import native
from pcrshard.testing import make_jpeg

BACKENDS = ("auto", "portable")
JPEGS = [
    make_jpeg(i, 40 + 7 * i, 61 - 5 * i, "L" if i == 3 else "RGB", quality=85) for i in range(6)
]
CROPS = np.array([(i, 2 * i, 20 + i, 25 - i) for i in range(6)], np.int32)


def scattered(jpegs: list[bytes], pieces: int = 3) -> tuple[native.Table, list[np.ndarray]]:
    """A table of the streams in pieces, and the arrays that hold them: they must outlive it."""
    table = native.empty_table(len(jpegs), pieces)
    held = []
    for i, jpeg in enumerate(jpegs):
        for k, piece in enumerate(np.array_split(np.frombuffer(jpeg, np.uint8), pieces)):
            held.append(piece.copy())
            table[i, k] = (held[-1].ctypes.data, len(piece))
    return table, held


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("crops", [None, CROPS])
def test_a_batch_has_the_pixels_of_each(
    backend: native.Backend, layout: native.Layout, crops: np.ndarray | None
) -> None:
    """Whether images are decoded together or alone does not matter."""
    table, _held = scattered(JPEGS)
    out = np.empty((6, 16, 18, 3) if layout == "hwc" else (6, 3, 16, 18), np.uint8)
    done = native.decode_batch(table, out, crops=crops, layout=layout, backend=backend)
    assert done.all()
    for i, jpeg in enumerate(JPEGS):
        crop = None if crops is None else tuple(crops[i].tolist())
        assert np.array_equal(
            out[i], native.decode([jpeg], crop=crop, size=(16, 18), layout=layout, backend=backend)
        )


def test_what_cannot_be_decoded_does_not_stop_the_others() -> None:
    """One image that is damaged, empty, unsupported or cropped outside leaves the others alone."""
    jpegs = [*JPEGS, JPEGS[0][:200], make_jpeg(7, 30, 30, "CMYK"), JPEGS[1], b""]
    crops = np.concatenate(
        [CROPS, [(0, 0, 9, 9), (0, 0, 9, 9), (0, 0, 9999, 9), (0, 0, 9, 9)]]
    ).astype(np.int32)
    table, _held = scattered(jpegs)
    out = np.empty((10, 16, 18, 3), np.uint8)
    done = native.decode_batch(table, out, crops=crops)
    assert done.tolist() == [True] * 6 + [False] * 4
    assert np.array_equal(
        out[5], native.decode([JPEGS[5]], crop=tuple(CROPS[5].tolist()), size=(16, 18))
    )


def test_an_array_of_crops_need_not_be_aligned() -> None:
    """Crops that lie at an odd address give the same pixels."""
    table, _held = scattered(JPEGS[:4])
    crops = CROPS[:4].astype(np.int32)
    odd = np.frombuffer(b"x" + crops.tobytes(), np.int32, offset=1, count=16).reshape(4, 4)
    assert not odd.flags.aligned
    expected, found = np.empty((2, 4, 16, 18, 3), np.uint8)
    assert native.decode_batch(table, expected, crops=crops).all()
    assert native.decode_batch(table, found, crops=odd).all()
    assert np.array_equal(expected, found)


@pytest.mark.parametrize(
    ("out", "crops"),
    [
        (np.empty((5, 8, 8, 3), np.uint8), None),
        (np.empty((6, 8, 8, 4), np.uint8), None),
        (np.empty((6, 8, 8, 3), np.int8), None),
        (np.empty((6, 8, 16, 3), np.uint8)[:, :, ::2], None),
        (np.empty((6, 8, 8, 3), np.uint8), CROPS[:5]),
        (np.empty((6, 8, 8, 3), np.uint8), CROPS.astype(np.int64)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(out: np.ndarray, crops: np.ndarray | None) -> None:
    """A batch of another shape is an error, not memory written elsewhere."""
    table, _held = scattered(JPEGS)
    with pytest.raises(ValueError, match="expected"):
        native.decode_batch(table, out, crops=crops)
