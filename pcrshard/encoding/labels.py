"""Labels and class names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .. import storage
from ..errors import EncodeError, PCRError
from ..format.sample_columns import label_of
from .samples import LABEL_FIELD, SampleRef, StorageOptions, read_samples


def count_classes(samples: Iterable[Mapping[str, bytes]]) -> int:
    """Return the highest label + 1; 0 if no sample has a label.

    >>> count_classes([{"cls": b"2"}, {"cls": b"7"}, {"txt": b"9"}])
    8
    """
    labels = (label_of(fields.get(LABEL_FIELD)) for fields in samples)
    return max((label + 1 for label in labels if label is not None), default=0)


def read_labels(samples: Sequence[SampleRef], options: StorageOptions) -> list[bytes | None]:
    """Return each sample's label as it is stored, ``None`` for samples without one.

    Raises:
        EncodeError: No sample has a label.
        StorageError: A label cannot be read.
    """
    wanted = [
        sample._replace(refs=tuple(ref for ref in sample.refs if ref.name == LABEL_FIELD))
        for sample in samples
    ]
    labels = []
    for _, fields in read_samples(wanted, options):
        if isinstance(fields, PCRError):
            raise fields
        label = fields.get(LABEL_FIELD)
        labels.append(label and label.strip())
    if all(label is None for label in labels):
        raise EncodeError(
            "expected labels to stratify by (class folders, a column 'label', or a field 'cls'), "
            "found none"
        )
    return labels


def check_label(key: str, fields: Mapping[str, bytes], classes: Sequence[str]) -> None:
    """Check that a label has a name if class names are given.

    Raises:
        EncodeError: The label is not less than the number of names.
    """
    label = label_of(fields.get(LABEL_FIELD))
    if classes and label is not None and label >= len(classes):
        raise EncodeError(
            f"expected labels below {len(classes)}, the number of class names, got {label}",
            key=key,
        )


def check_classes(classes: Sequence[str]) -> None:
    """Check that class names are distinct strings that are not empty.

    Raises:
        EncodeError: A name is not a string, is empty, or appears twice.
    """
    if isinstance(classes, str):
        raise EncodeError(f"expected a sequence of class names, got {classes!r}")
    seen = {""}
    for number, name in enumerate(classes):
        if not isinstance(name, str) or name.strip() in seen:
            raise EncodeError(f"expected a name of its own for class {number}, got {name!r}")
        seen.add(name.strip())


def read_classes(url: str) -> tuple[str, ...]:
    """Read class names from a text file, one per line; the first line names class 0.

    Raises:
        EncodeError: The file is not UTF-8.
        StorageError: It cannot be read.
    """
    data = storage.read_bytes(url)
    try:
        return tuple(map(str.strip, data.decode("utf-8-sig").rstrip().split("\n")))
    except UnicodeDecodeError as error:
        raise EncodeError(f"not class names: {error}", url=url) from error
