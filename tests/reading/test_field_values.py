"""What the bytes of a field mean."""

import pytest

from pcrshard.errors import FormatError
from pcrshard.reading.field_values import convert_all


def test_fields_are_converted_by_their_last_extension():
    """Labels are numbers, JSON is parsed, text is text; images and the rest stay bytes."""
    sample = {"__key__": "a", "cls": b"7", "box.json": b"[1, 2]", "txt": "Käfer".encode()}
    sample |= {"jpg": b"\xff\xd8", "npy": b"\x93", "parts.txt": [b"a", b"b"]}
    assert convert_all(sample) == {
        "__key__": "a",
        "cls": 7,
        "box.json": [1, 2],
        "txt": "Käfer",
        "jpg": b"\xff\xd8",
        "npy": b"\x93",
        "parts.txt": ["a", "b"],
    }


@pytest.mark.parametrize("value", [b"seven", b"99999999999999999999"])
def test_a_value_that_does_not_fit_is_named(value):
    """The message has field and key."""
    with pytest.raises(FormatError, match=r"'cls'.*key=a"):
        convert_all({"__key__": "a", "cls": value})
