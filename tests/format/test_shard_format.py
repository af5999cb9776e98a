"""How shards are written: which field is where, and what cannot be."""

import pytest

from pcrshard import ShardFormat
from pcrshard.errors import EncodeError
from pcrshard.format.shard_format import FieldNames

NAMES = FieldNames(
    (("views.jpg", "jpegs"), ("jpg", "jpeg")), ("cls", "npy", "mask.npy", "json", "png")
)


def test_late_fields_are_found_by_name_and_by_extension():
    """A name wins over its last extension; images that are no JPEG wait for scan 1."""
    fmt = ShardFormat(deferred={"npy": 5, "mask.npy": 2, "json": "full"})
    schema = fmt.schema(NAMES)
    assert dict(schema.late) == {"npy": 5, "mask.npy": 2, "json": 11, "png": 1}
    assert schema.fields == ("cls",)
    assert schema.streams == (("jpg", "jpeg"), ("views.jpg", "jpegs"))
    assert schema.lists == ("views.jpg",)


def test_a_kept_file_waits_for_scan_1():
    """A field with the name of a JPEG field is a file that was kept: it comes with the images."""
    schema = ShardFormat().schema(FieldNames((("jpg", "jpeg"),), ("cls", "jpg")))
    assert (schema.fields, schema.late) == (("cls",), (("jpg", 1),))


def test_only_early_fields_are_previewed():
    """A preview shows what every reader has."""
    fmt = ShardFormat(layout="preview", preview_fields=("cls", "npy"), deferred={"npy": 5})
    assert fmt.schema(NAMES).preview_fields == ("cls",)


@pytest.mark.parametrize("scan", [0, 11, -1, "5", 2.0])
def test_a_scan_that_is_not_there_is_refused(scan):
    """The field is named, and what was expected."""
    with pytest.raises(
        EncodeError, match=r"deferred field 'npy': expected a scan of 1 to 10 or 'full'"
    ):
        ShardFormat(deferred={"npy": scan})


def test_labels_cannot_be_deferred():
    """A dataset always tells its labels, at every scan."""
    with pytest.raises(EncodeError, match="cls cannot be deferred"):
        ShardFormat(deferred={"cls": 3})
