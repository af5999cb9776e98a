"""What the bytes of a field mean."""

import io

import numpy as np
import pytest

from pcrshard.errors import FormatError
from pcrshard.format.kinds import decide_kinds
from pcrshard.format.schema import Field
from pcrshard.format.shard_format import ShardFormat
from pcrshard.reading.field_values import convert, convert_all


def array_bytes(array, **options):
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def test_fields_are_converted_by_their_kind():
    """Labels are numbers, JSON is parsed, text is text; images and the rest stay bytes."""
    sample = {"__key__": "a", "cls": b"7", "box.json": b"[1, 2]", "txt": "Käfer".encode()}
    sample |= {"jpg": b"\xff\xd8", "bin": b"\x93"}
    schema = ShardFormat("standard").schema(decide_kinds([list(sample)[1:]], {}))
    assert convert_all(sample, schema) == {
        "__key__": "a",
        "cls": 7,
        "box.json": [1, 2],
        "txt": "Käfer",
        "jpg": b"\xff\xd8",
        "bin": b"\x93",
    }


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.int16(3), np.zeros((0, 4))])
def test_arrays_are_numpys(array):
    """A field in NumPy's format is the array that was saved."""
    found = convert(Field("npy", "array"), array_bytes(array), "k")
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


def test_an_array_that_claims_too_much_is_refused():
    """Nothing is unpickled, and no memory is taken that the bytes do not fill."""
    good = array_bytes(np.zeros((2, 3)))
    for bad in (
        good.replace(b"(2, 3)", b"(9999999999, 3)"[:6]).replace(b"(9999,", b"(9,99,"),
        good[:-1],
        good + b"x",
        b"no array",
        array_bytes(np.array([{}], object), allow_pickle=True),
    ):
        with pytest.raises(FormatError, match="field 'npy'"):
            convert(Field("npy", "array"), bad, "k")
