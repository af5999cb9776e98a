"""Export of shards to ordinary files: an image folder or stock WebDataset tars, at any scan."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import BinaryIO

from .. import storage
from ..errors import EncodeError, FormatError, PCRError
from ..format.names import is_jpeg_field, is_other_image, valid_key
from ..format.sample_columns import label_of
from ..format.scan import FULL, Scan
from ..format.shard_head import BLOCK, TRAILER
from ..format.tar_members import tar_header
from ..jpeg.markers import other_format
from ..jpeg.pixels import make_baseline
from ..reading.prefix import OnError, Sample, number_lists
from ..reading.shard import Shard

Create = Callable[[str], AbstractContextManager[BinaryIO]]
# The name of a file caused the error, not the disk.
_BAD_NAME = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)


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
    overwrite: bool = False,
    options: storage.Options = None,
) -> int:
    """Write a shard's samples as ordinary files.

    Symbolic links in ``dst`` are never followed, and the shard itself is never replaced.

    Args:
        shard: The shard; it is read once.
        dst: Target folder.
        scan: Highest scan to read, 1..N or ``"full"``.
        form: ``folder`` writes ``KEY.jpg`` (under the class name if there is one and the key does
            not start with it), a kept file of another format with its extension; ``wds`` writes a
            tar of the shard's name with all fields.
        baseline: Rearrange images losslessly into baseline JPEGs, for hardware decoders; a kept
            file that cannot be rearranged is an error.
        classes: Class names of the dataset index.
        taken: Paths written by earlier calls, so that no image overwrites another; this call adds
            its own.
        on_error: Called with the error if a sample is damaged, libjpeg-turbo cannot rearrange it,
            or its key is not a valid file name, and if a whole shard is truncated or damaged.
            Return True to skip the sample or shard. By default the error is raised.
        overwrite: Whether to replace existing files.
        options: fsspec storage options of ``dst``.

    Returns:
        Number of samples.

    Raises:
        EncodeError: A file exists.
        PCRError: See :meth:`pcrshard.Shard.load`; by default also for a damaged sample.
    """
    try:
        prefix = shard.load(scan)
    except PCRError as error:
        _skip(error, on_error)
        return 0
    create = partial(_create, dst, overwrite=overwrite, options=options)
    name = storage.file_name(shard.url)
    paths = map(storage.plain_path, (storage.join(dst, name), shard.url))
    if form == "wds" and len(set(map(os.path.realpath, paths))) == 1:
        raise EncodeError("expected another folder, not the shard's own", url=dst)
    taken = set() if taken is None else taken
    count = 0
    with create(name) if form == "wds" else nullcontext() as tar:
        for sample in map(number_lists, prefix.samples(on_error=on_error)):
            try:
                if baseline:
                    for field in filter(is_jpeg_field, sample):
                        sample[field] = make_baseline(sample[field])
                if tar is None:
                    _write_images(sample, _path(sample, classes, taken), create)
                else:
                    _append(sample, tar)
            except PCRError as error:
                named = type(error)(str(error), url=shard.url, key=sample["__key__"])
                named.__cause__ = error.__cause__
                _skip(named, on_error)
            else:
                count += 1
        if tar is not None:
            tar.write(TRAILER)
    return count


def _skip(error: PCRError, on_error: OnError | None) -> None:
    """Raise an error unless ``on_error`` skips it; a failing store or disk is not skipped."""
    cause = error.__cause__
    is_of_file = (
        isinstance(error, FormatError | EncodeError)
        or isinstance(cause, FileNotFoundError)
        or getattr(cause, "errno", None) in _BAD_NAME
    )
    if not (is_of_file and on_error is not None and on_error(error)):
        raise error


@contextmanager
def _create(
    folder: str,
    path: str,
    *,
    overwrite: bool,
    options: storage.Options,
) -> Iterator[BinaryIO]:
    """Write a file in a folder that appears complete or not at all.

    Raises:
        EncodeError: The file exists, or a link leads out of the folder.
    """
    target = storage.join(folder, path)
    if storage.is_local(target):
        root = os.path.realpath(storage.plain_path(folder))
        parent = os.path.normpath(os.path.join(root, os.path.dirname(path)))
        if os.path.realpath(parent) != parent:
            raise EncodeError("expected a folder, got a link to another folder", url=parent)
    if not overwrite and storage.exists(target, options=options):
        raise EncodeError("the file exists: use another folder or overwrite", url=target)
    with storage.atomic_write(target, options=options) as file:
        yield file


def _write_images(sample: Sample, path: str, create: Create) -> None:
    for field, value in sample.items():
        name = field
        if is_jpeg_field(field):
            stem, dot, extension = field.rpartition(".")
            name = f"{stem}{dot}{other_format(value) or extension}"
            if name in sample:
                name = field
        elif not is_other_image(field):
            continue
        # A key has no "..", no leading "/" and no "\" (SPEC 2.3): this stays inside.
        with create(f"{path}.{name}") as file:
            file.write(value)


def _append(sample: Sample, tar: BinaryIO) -> None:
    for field, value in sample.items():
        if field != "__key__":
            name = f"{sample['__key__']}.{field}"
            tar.writelines((tar_header(name, len(value)), value, bytes(-len(value) % BLOCK)))


def _path(
    sample: Sample,
    classes: Sequence[str],
    taken: set[str],
) -> str:
    """Return the sample's path without extension: its key, in the folder of its class.

    There is no such folder without a class, or if the key starts with it. If another sample has
    this path, append a number.
    """
    key: str = sample["__key__"]
    label = label_of(sample.get("cls"))
    number = len(classes) if label is None else label
    if number < len(classes) and not key.startswith(classes[number] + "/"):
        folder = classes[number].replace("/", "_")
        key = f"{folder if valid_key(f'{folder}/x') else f'class{number}'}/{key}"
    numbered = (f"{key}_{count}" for count in itertools.count(1))
    path = next(path for path in itertools.chain([key], numbered) if path not in taken)
    taken.add(path)
    return path
