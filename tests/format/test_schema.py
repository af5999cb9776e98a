"""The schema of a shard: what survives, and what is refused."""

import msgpack
import msgspec
import pytest

from pcrshard.errors import CorruptIndex
from pcrshard.format.schema import MAX_FIELDS, MAX_STREAMS, Schema, decode_schema

GROUPS = ("0,1,2: 0-0, 0, 1", "0: 1-5, 0, 2")
GOOD = Schema("mine", GROUPS, fields=("cls", "txt"), late=(("npy", 2), ("json", 3)))
STREAMS = tuple((f"{number}.jpg", "jpeg") for number in range(MAX_STREAMS + 1))
FIELDS = tuple(f"f{number}" for number in range(MAX_FIELDS - 1))


def test_a_schema_survives_encoding():
    """What a shard says of its fields is what was written."""
    assert decode_schema(GOOD.encode()) == GOOD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "wide"}, "unknown layout"),
        ({"base": 1}, "base does not fit"),
        ({"base": "1"}, "Expected `int`, got `str`"),
        ({"streams": STREAMS}, "at most 16 streams"),
        ({"streams": (("jpg", "png"),)}, "unknown codecs"),
        ({"streams": (("jpg",),)}, "length 2"),
        ({"streams": (("cls", "jpeg"),)}, "streams and fields are not distinct"),
        ({"fields": FIELDS}, "at most 256 fields"),
        ({"fields": ("cls", 1)}, "Expected `str`, got `int`"),
        ({"fields": ("CLS",)}, "not legal"),
        ({"late": (("cls", 1),)}, "deferred fields and fields are not distinct"),
        ({"late": (("npy", 4),)}, "no such scan"),
        ({"late": (("npy", "full"),)}, "Expected `int`, got `str`"),
        ({"preview_fields": ("cls",)}, "preview_fields do not fit"),
        ({"groups": ("0: everything", GROUPS[1])}, "scan script"),
    ],
)
def test_a_schema_that_breaks_a_rule_is_refused(change, message):
    """A reader never works with names or numbers that SPEC section 2.2 does not allow."""
    with pytest.raises(CorruptIndex, match=message):
        decode_schema(msgpack.packb(msgspec.structs.asdict(GOOD) | change))


@pytest.mark.parametrize("data", [b"\xc1", msgpack.packb(["script"]), msgpack.packb("x" * 2000)])
def test_what_is_no_schema_is_refused(data):
    """Bytes of another kind, or longer than a schema may be, end in an error that says so."""
    with pytest.raises(CorruptIndex, match="schema"):
        decode_schema(data)
