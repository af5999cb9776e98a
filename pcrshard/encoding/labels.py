"""Labels and the names of classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .. import storage
from ..errors import EncodeError, PCRError
from .sample_refs import FieldRef, SampleRef, Source, StorageOptions

LABEL_FIELD = "cls"
_MAX_DIGITS = 9
_LABELS_PER_READ = 512


def label_of(fields: Mapping[str, bytes]) -> int | None:
    """The label of a sample: its field ``cls``, if that is one to nine decimal digits."""
    text = fields.get(LABEL_FIELD, b"").strip()
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None


def count_classes(samples: Iterable[Mapping[str, bytes]]) -> int:
    """The highest label + 1; 0 where no sample has a label.

    >>> count_classes([{"cls": b"2"}, {"cls": b"7"}, {"txt": b"9"}])
    8
    """
    labels = map(label_of, samples)
    return max((label + 1 for label in labels if label is not None), default=0)


def read_labels(samples: Sequence[SampleRef], options: StorageOptions) -> list[bytes | None]:
    """The label of each sample as it is stored, ``None`` for those without one.

    Reads the labels of tars, some hundred at a time.

    Raises:
        EncodeError: No sample has a label.
        StorageError: A label cannot be read.
    """
    labels = [dict(sample.known).get(LABEL_FIELD) for sample in samples]
    stored = _stored_labels(samples)
    values = _read_fields(list(stored.values()), options)
    for number, label in zip(stored, values, strict=True):
        labels[number] = label.strip()
    _check_any(labels)
    return labels


def _check_any(labels: Sequence[bytes | None]) -> None:
    if all(label is None for label in labels):
        raise EncodeError(
            "expected labels to share classes out evenly, found none: "
            "class folders, a column 'label', or a field 'cls'"
        )


def _stored_labels(samples: Sequence[SampleRef]) -> dict[int, FieldRef]:
    """Where the labels of tars are, by the position of their sample."""
    return {
        number: ref
        for number, sample in enumerate(samples)
        for ref in sample.refs
        if ref.name == LABEL_FIELD
    }


def _read_fields(refs: Sequence[FieldRef], options: StorageOptions) -> Iterator[bytes]:
    for start in range(0, len(refs), _LABELS_PER_READ):
        batch = refs[start : start + _LABELS_PER_READ]
        ranges = [(ref.url, ref.start, ref.stop) for ref in batch]
        for value in storage.read_ranges(ranges, options=options):
            if isinstance(value, PCRError):
                raise value
            yield value


def check_label(
    key: str,
    fields: Mapping[str, bytes],
    classes: Sequence[str],
) -> None:
    """Make sure that a label has a name, if classes have names.

    Raises:
        EncodeError: It is larger than the number of names allows.
    """
    label = label_of(fields)
    if classes and label is not None and label >= len(classes):
        raise EncodeError(
            f"expected labels of 0 to {len(classes) - 1}, one for each of the {len(classes)} "
            f"class names, got {label}",
            key=key,
        )


def check_classes(classes: Sequence[str]) -> None:
    """Make sure that class names are names, and distinct."""
    seen: dict[str, int] = {}
    for number, name in enumerate(classes):
        if not name.strip():
            raise EncodeError(f"expected a name for class {number}, got an empty one")
        if name in seen:
            raise EncodeError(
                f"expected distinct class names, {name!r} is that of classes "
                f"{seen[name]} and {number}"
            )
        seen[name] = number


def read_classes(url: str, *, options: StorageOptions = None) -> tuple[str, ...]:
    """Class names from a text file, one a line; the first line names class 0.

    Raises:
        EncodeError: The file is not UTF-8, or a line is empty or comes twice.
        StorageError: It cannot be read.
    """
    lines = _read_text(url, options).rstrip().split("\n")
    classes = tuple(map(str.strip, lines))
    _check_listed(classes, url)
    return classes


def _check_listed(classes: Sequence[str], url: str) -> None:
    try:
        check_classes(classes)
    except EncodeError as error:
        raise EncodeError(str(error), url=url) from error


def _read_text(url: str, options: StorageOptions) -> str:
    data = storage.read_bytes(url, options=options)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EncodeError(f"expected class names in UTF-8: {error}", url=url) from error


def renumber(source: Source, classes: tuple[str, ...]) -> Source:
    """The source with labels that are positions in ``classes``.

    Where the source has names of its own (folders, labels of a list) they must be among them;
    where it has numbers, these stay.

    Raises:
        EncodeError: The source has a class that is not in ``classes``.
    """
    if not classes or source.classes == classes:
        return source
    numbers = {name: str(number).encode() for number, name in enumerate(classes)}
    _check_known(source.classes, classes)
    if not source.classes:
        return source._replace(classes=classes)
    own = {str(number).encode(): name for number, name in enumerate(source.classes)}
    relabelled = {number: numbers[name] for number, name in own.items()}
    samples = [_relabel(sample, relabelled) for sample in source.samples]
    return source._replace(samples=samples, classes=classes)


def _check_known(own: Sequence[str], classes: Sequence[str]) -> None:
    if unknown := set(own).difference(classes):
        raise EncodeError(
            f"expected classes of the {len(classes)} names given, such as {classes[0]!r}, "
            f"the source has {min(unknown)!r}"
        )


def _relabel(sample: SampleRef, numbers: Mapping[bytes, bytes]) -> SampleRef:
    known = tuple(
        (name, numbers[value] if name == LABEL_FIELD else value) for name, value in sample.known
    )
    return sample._replace(known=known)
