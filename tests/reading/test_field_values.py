"""What the bytes of a field mean."""

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
