"""How shards are written: which field is where, and what cannot be."""

import msgspec
import pytest

from pcrshard import ShardFormat
from pcrshard.errors import EncodeError
from pcrshard.format.kinds import decide_kinds, read_kinds

KINDS = decide_kinds([("jpg", "cls", "npy", "mask.npy", "json", "png")], {}) | {
    "views.jpg": "images"
}


def test_late_fields_are_found_by_name_and_by_extension():
    """A name wins over its last extension; pictures that are no images wait for scan 1."""
    fmt = ShardFormat("standard", deferred={"npy": 5, "mask.npy": 2, "json": "full"})
    schema = fmt.schema(KINDS)
    assert dict(schema.late) == {"npy": 5, "mask.npy": 2, "json": 11, "png": 1}
    assert schema.columns == ("cls",)
    assert schema.streams == ("jpg", "views.jpg")
    assert schema.lists == ("views.jpg",)


def test_only_early_fields_are_previewed():
    """A preview shows what every reader has."""
    fmt = ShardFormat("standard", layout="preview", preview_fields=("cls",), deferred={"npy": 5})
    assert fmt.schema(KINDS).preview_fields == ("cls",)
    fmt = ShardFormat("standard", layout="preview", preview_fields=("npy",), deferred={"npy": 5})
    with pytest.raises(EncodeError, match="preview_fields"):
        fmt.schema(KINDS)


@pytest.mark.parametrize(
    ("samples", "png", "mask"),
    [
        # As in a folder of JPEGs and PNGs.
        ([("jpg",), ("png",)], "image", None),
        ([("jpg", "png")], "file", None),
        ([("png", "mask.png"), ("png",)], "image", "file"),
        ([("jpg", "mask.png"), ("mask.png",)], None, "file"),
        ([("mask.png", "cls")], None, "image"),
    ],
)
def test_a_picture_beside_another_is_no_image(samples, png, mask):
    """Whether a PNG is an image to train on or belongs to one is the same for all samples of a
    dataset, in whatever batch they are.
    """
    kinds = decide_kinds(samples, {})
    assert (kinds.get("png"), kinds.get("mask.png")) == (png, mask)


def test_a_picture_beside_its_mask_is_an_image():
    """What is said to be a mask does not make a file of the picture next to it."""
    given = {"mask.png": "mask"}
    samples = [("png", "mask.png", "cls"), ("jpg", "mask.png", "cls")]
    assert decide_kinds(samples, given)["png"] == "image"
    assert decide_kinds([("png", "mask.png", "seg.png")], given)["seg.png"] == "file"


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ({"mask.jpg": "mask"}, "lossless"),
        ({"cls": "klass"}, "expected a kind of"),
        ({"json:a.b": "mask"}, "expected a kind of"),
        ({"txt:a": "boxes", "txt": "text"}, "expected kind json"),
        ({"npy": "image"}, "extension of an image"),
    ],
)
def test_a_kind_that_does_not_fit_is_refused(kinds, why):
    """A mask in a lossy format, an unknown kind, a part of something that is not JSON."""
    with pytest.raises(EncodeError, match=why):
        read_kinds(kinds)


def test_kinds_of_fields_and_of_their_parts():
    """Boxes are where the user says, in the coordinates that the user says."""
    given = {"png": "mask", "json:objects.bbox": "boxes:xywh", "b.npy": "boxes"}
    fields, parts = read_kinds(given, ["two.jpg"])
    schema = ShardFormat("standard").schema(KINDS | fields, parts)
    assert schema.lists == ("two.jpg", "views.jpg") or schema.lists == ("views.jpg", "two.jpg")
    found = {name: field.kind for name, field in schema.by_name.items()}
    assert (found["png"], found["json"], found["b.npy"]) == ("mask", "json", "boxes:xyxy")
    assert [tuple(map(str, msgspec.structs.astuple(part))) for part in schema.parts] == [
        ("json", "objects.bbox", "boxes:xywh")
    ]


@pytest.mark.parametrize("scan", [0, 11, -1, "5", 2.0])
def test_a_scan_that_is_not_there_is_refused(scan):
    """The field is named, and what was expected."""
    with pytest.raises(
        EncodeError, match=r"deferred field 'npy': expected a scan of 1 to 10 or 'full'"
    ):
        ShardFormat("standard", deferred={"npy": scan})


def test_labels_cannot_be_deferred():
    """A dataset always tells its labels, at every scan."""
    with pytest.raises(EncodeError, match="cls cannot be deferred"):
        ShardFormat("standard", deferred={"cls": 3})
