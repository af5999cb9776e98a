"""What fields hold, decided once for a dataset: by their names, and by what a user says.

Pure functions of the names of fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ..errors import EncodeError
from .names import is_jpeg_field, is_other_image, place_in_list
from .schema import IMAGE, IMAGE_LIST, KINDS, PART_KINDS, Part
from .shard_index import MAX_LISTED

# WebDataset's extensions.
INTEGERS = ("cls2", "count", "index", "inx", "id")
_BY_EXTENSION = {
    "cls": "class",
    **dict.fromkeys(INTEGERS, "integer"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "array",
}
# Whose values of one sample are bytes of these kinds.
_WHOLE_KINDS = tuple(kind for kind in KINDS if kind not in (IMAGE, IMAGE_LIST))


class Kinds(NamedTuple):
    """The kind of each field by name, and the spatial values inside JSON fields."""

    fields: dict[str, str]
    parts: tuple[Part, ...]


def read_kinds(given: Mapping[str, str], lists: Collection[str] = ()) -> Kinds:
    """Parse what a user says of fields.

    Args:
        given: ``{"mask.png": "mask", "json:objects.bbox": "boxes:xywh"}``; ``boxes`` alone stands
            for ``boxes:xyxy``, and a part of a JSON field is named by its path.
        lists: Fields with a list of images per sample.

    Raises:
        EncodeError: A kind is unknown or does not fit the field.
    """
    fields: dict[str, str] = {}
    parts: list[Part] = []
    for place, text in (dict(given) | dict.fromkeys(lists, IMAGE_LIST)).items():
        kind = "boxes:xyxy" if text == "boxes" else text
        name, colon, path = place.partition(":")
        if kind not in (known := PART_KINDS if colon else KINDS):
            raise EncodeError(f"expected a kind of {list(known)} for {place!r}, got {text!r}")
        if colon:
            fields.setdefault(name, "json")
            parts.append(Part(name, path, kind))  # type: ignore[arg-type]
        else:
            fields[name] = kind
        if kind == "mask" and is_jpeg_field(name):
            raise EncodeError(
                f"expected masks in a lossless format such as PNG, got {name!r}: a JPEG, even of "
                "quality 100, shows classes that were never drawn"
            )
        if kind in (IMAGE, IMAGE_LIST) and not (is_jpeg_field(name) or is_other_image(name)):
            raise EncodeError(f"expected the extension of an image for {kind} {name!r}")
    wrong = sorted({part.field for part in parts if fields[part.field] != "json"})
    if wrong:
        raise EncodeError(f"expected kind json for {wrong}, whose values have kinds, too")
    return Kinds(fields, tuple(parts))


def plan_kinds(
    first: Mapping[tuple[str, ...], str],
    given: Mapping[str, str],
    lists: Collection[str] = (),
    *,
    keep_numbered: bool = False,
) -> Kinds:
    """Return the kind of each field of a dataset, by the names that its samples have.

    Args:
        first: Names of fields as samples have them, each with the key of the first such sample.
        given: As for :func:`read_kinds`.
        lists: Fields that a user says are lists of images.
        keep_numbered: Whether numbered images are fields of their own, not lists.

    Raises:
        EncodeError: Samples contradict each other, or a kind is given of a field that none has.
    """
    found = (
        set() if keep_numbered else find_lists(((key, own) for own, key in first.items()), lists)
    )
    gathered = [list(dict.fromkeys(in_list(name, found) for name in names)) for names in first]
    known = read_kinds(given, lists)
    kinds = decide_kinds(gathered, dict.fromkeys(found, IMAGE_LIST) | known.fields)
    kinds |= dict.fromkeys(lists, IMAGE_LIST)
    if missing := set(known.fields) - set(kinds):
        raise EncodeError(f"expected kinds of fields among {list(kinds)}, got {sorted(missing)}")
    return Kinds(kinds, known.parts)


def in_list(name: str, lists: Collection[str]) -> str:
    """Return the list that an image is in by its name, or its name.

    >>> in_list("images.0.jpg", ["images.jpg"]), in_list("0.jpg", [])
    ('images.jpg', '0.jpg')
    """
    place = place_in_list(name)
    return place[0] if place and place[0] in lists else name


def decide_kinds(samples: Iterable[Collection[str]], given: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each field of a dataset, in order of first appearance.

    Args:
        samples: The names of each sample's fields.
        given: Kinds that are known by name.

    A field with the extension of an image other than JPEG is an image, unless some sample has it
    next to a JPEG, or next to another image if its name has several parts: ``mask.png`` is then a
    ``file``. What is given as a mask is no image.

    >>> decide_kinds([["jpg", "seg.png", "cls"], ["png", "cls"]], {})
    {'jpg': 'image', 'seg.png': 'file', 'cls': 'class', 'png': 'image'}
    >>> decide_kinds([["png", "seg.png"]], {"seg.png": "mask"})
    {'png': 'image', 'seg.png': 'mask'}
    """
    names: dict[str, None] = {}
    beside: set[str] = set()
    pictures = {name for name, kind in given.items() if kind in (IMAGE, IMAGE_LIST)}
    each = list(dict.fromkeys(map(tuple, samples)))
    for sample in each:
        names |= dict.fromkeys(sample)
        plain = [name for name in sample if is_jpeg_field(name) or name in pictures]
        others = [name for name in sample if is_other_image(name) and name not in given]
        images = list(dict.fromkeys(plain + others))
        for name in images:
            rivals = plain if "." not in name else images
            if any(rival != name for rival in rivals):
                beside.add(name)
    return {name: given.get(name) or _kind_of(name, name in beside) for name in names}


def _kind_of(name: str, is_beside: bool) -> str:
    if is_jpeg_field(name) or (is_other_image(name) and not is_beside):
        return IMAGE
    return _BY_EXTENSION.get(name.rpartition(".")[2], "file")


def find_lists(samples: Iterable[tuple[str, Collection[str]]], lists: Collection[str]) -> set[str]:
    """Return the lists that numbered images form: ``images.jpg`` for ``images.0.jpg``, ...

    Images that are numbered from 0 without a gap are a list, however many there are.

    Args:
        samples: The key of each sample and the names of its fields.
        lists: Fields that a user says are lists.

    Raises:
        EncodeError: Some samples number a field's images from 0 without a gap and others do not, a
            list has more than 64 images, or a field is a list and a single image.
    """
    found = dict.fromkeys(lists, "")
    broken: dict[str, str] = {}
    singles: dict[str, str] = {}
    for key, names in samples:
        numbers: dict[str, list[int]] = {}
        for name in names:
            if place := place_in_list(name):
                numbers.setdefault(place[0], []).append(place[1])
            else:
                singles.setdefault(name, key)
        for name, own in numbers.items():
            is_list = max(own) == len(own) - 1 < MAX_LISTED
            (found if is_list else broken).setdefault(name, key)
    hint = "keep_numbered (--keep-numbered) keeps them in fields of their own"
    for name, key in broken.items():
        if name in found:
            raise EncodeError(
                f"expected the images of {name!r} to be numbered from 0 without a gap in every "
                f"sample, at most {MAX_LISTED}; {hint}",
                key=key,
            )
    for name in found:
        if name in singles:
            raise EncodeError(
                f"expected {name!r} to be a list of images in every sample; {hint}",
                key=singles[name],
            )
    return set(found)
