"""Shards back to ordinary files: an image folder, or stock WebDataset tars, at any scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from .. import storage
from ..errors import EncodeError, PCRError
from ..format.names import valid_key
from ..format.scan import FULL, Scan
from ..format.shard_index import round512
from ..format.tar_members import TRAILER, tar_header
from ..jpeg.pixels import make_baseline
from ..reading.prefix import OnError, Sample
from ..reading.shard import Shard

FORMATS = ("folder", "wds")


def export_shard(
    shard: Shard,
    dst: str,
    *,
    scan: Scan = FULL,
    form: str = "folder",
    baseline: bool = False,
    classes: Sequence[str] = (),
    taken: set[str] | None = None,
    on_error: OnError | None = None,
    options: storage.Options | None = None,
) -> int:
    """Write a shard's samples as ordinary files.

    Args:
        shard: Read once, at ``scan``.
        dst: Target folder.
        scan: 1..N or ``"full"``.
        form: ``folder`` writes ``KEY.jpg`` (under the class name if there is one and the key does not start with it);
            ``wds`` writes a tar of the shard's name with all fields.
        baseline: Rearrange images losslessly into baseline JPEGs, for hardware decoders.
        classes: Class names of the dataset index.
        taken: Keys already written by earlier calls, so that no image overwrites another; added to.
        on_error: Called with the error of a sample that is damaged, or that libjpeg-turbo cannot rearrange; True leaves it out. By default it is
            raised.
        options: fsspec storage options of ``dst``.

    Returns:
        Number of samples.

    Raises:
        As :meth:`Shard.samples`; EncodeError for an unknown form.
    """
    if form not in FORMATS:
        raise EncodeError(f"expected a form of {FORMATS}, got {form!r}")
    streams = {field for field, _ in shard.index.schema.streams}
    samples = shard.samples(scan, on_error=on_error)
    if baseline:
        samples = _to_baseline(samples, shard, streams, on_error)
    if form == "wds":
        name = storage.file_name(shard.url)
        with storage.atomic_write(storage.join(dst, name), options=options) as file:
            return _write_all(
                samples, lambda path, data: _add_member(file, path, data), TRAILER, file
            )
    taken = set() if taken is None else taken
    images = (
        {"__key__": _path(s, classes, taken)} | {k: v for k, v in s.items() if k in streams}
        for s in samples
    )
    return _write_all(images, lambda path, data: _write_file(dst, path, data, options))


def _to_baseline(
    samples: Iterable[Sample], shard: Shard, streams: set[str], on_error: OnError | None
) -> Iterator[Sample]:
    for sample in samples:
        try:
            changed = {
                name: make_baseline(value) if name in streams else value
                for name, value in sample.items()
            }
        except PCRError as error:
            named = type(error)(str(error), url=shard.url, key=sample["__key__"])
            if on_error is None or not on_error(named):
                raise named from error
            continue
        yield changed


def _path(sample: Sample, classes: Sequence[str], taken: set[str]) -> str:
    """The sample's path without extension: its key, under its class's name, with a number if another sample has it."""
    key, label = str(sample["__key__"]), sample.get("cls", b"").strip()
    number = int(label) if label.isdigit() and len(label) < 10 else -1
    if 0 <= number < len(classes) and not key.startswith(classes[number] + "/"):
        name = classes[number].replace("/", "_")
        key = f"{name if valid_key(f'{name}/x') else f'class{number}'}/{key}"
    path, count = key, 0
    while path in taken:
        count += 1
        path = f"{key}_{count}"
    taken.add(path)
    return path


def _write_all(
    samples: Iterable[Sample],
    write: Callable[[str, bytes], None],
    trailer: bytes = b"",
    file: BinaryIO | None = None,
) -> int:
    count = 0
    for sample in samples:
        key = sample["__key__"]
        for field, value in sample.items():
            if isinstance(value, bytes):
                write(f"{key}.{field}", value)
        count += 1
    if file is not None:
        file.write(trailer)
    return count


def _add_member(file: BinaryIO, path: str, data: bytes) -> None:
    file.write(tar_header(path, len(data)) + data + bytes(round512(len(data)) - len(data)))


def _write_file(dst: str, path: str, data: bytes, options: storage.Options | None) -> None:
    # A key has no "..", no leading "/" and no "\" (SPEC 2.3), so this stays inside dst.
    with storage.atomic_write(storage.join(dst, path), options=options) as file:
        file.write(data)
