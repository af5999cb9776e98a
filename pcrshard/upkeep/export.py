"""Export of shards to ordinary files: an image folder or stock WebDataset tars, at any scan."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from .. import storage
from ..errors import EncodeError, FormatError, PCRError
from ..format.names import is_jpeg_field, is_other_image, valid_key
from ..format.scan import FULL, Scan
from ..format.shard_index import BLOCK
from ..format.tar_members import TRAILER, tar_header
from ..jpeg.pixels import make_baseline
from ..reading.prefix import OnError, Prefix, Sample, number_lists
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
            not start with it); ``wds`` writes a tar of the shard's name with all fields.
        baseline: Rearrange images losslessly into baseline JPEGs, for hardware decoders.
        classes: Class names of the dataset index.
        taken: Paths written by earlier calls, so that no image overwrites another; this call adds
            its own.
        on_error: Called with the error of a sample that is damaged, that libjpeg-turbo cannot
            rearrange, or whose key is not a valid file name, or of a shard that is truncated or
            damaged as a whole; returning True skips it. By default the error is raised.
        overwrite: Whether to replace existing files.
        options: fsspec storage options of ``dst``.

    Returns:
        Number of samples.

    Raises:
        As :meth:`Shard.samples`; EncodeError for an unknown form, or if a file exists.
    """
    if form not in FORMATS:
        raise EncodeError(f"expected a form among {FORMATS}, got {form!r}")
    prefix = _load(shard, scan, on_error)
    if prefix is None:
        return 0
    with prefix:
        folder = _Folder(dst, overwrite, options)
        samples: Iterator[Sample] = map(number_lists, prefix.samples(on_error=on_error))
        if baseline:
            samples = _to_baseline(samples, prefix, on_error)
        if form == "wds":
            return _write_wds(shard, samples, folder)
        taken = set() if taken is None else taken
        named = ((_path(sample, classes, taken), sample) for sample in samples)
        return _write_folder(named, folder, on_error)


def _load(
    shard: Shard,
    scan: Scan,
    on_error: OnError | None,
) -> Prefix | None:
    """Load the prefix of a scan; return ``None`` to skip a damaged shard."""
    try:
        return shard.load(scan)
    except PCRError as error:
        if not _is_bad_shard(error) or on_error is None or not on_error(error):
            raise
        return None


def _is_bad_shard(error: PCRError) -> bool:
    """Return whether the shard is at fault, not a failing store or an unavailable scan."""
    return isinstance(error, FormatError) or isinstance(error.__cause__, FileNotFoundError)


class _Folder:
    """A target folder that protects existing files and refuses links out of it.

    Args:
        url: The folder.
        overwrite: Whether to replace existing files.
        options: fsspec storage options of the folder.
    """

    def __init__(
        self,
        url: str,
        overwrite: bool,
        options: storage.Options,
    ) -> None:
        self.url = url
        self._overwrite = overwrite
        self._options = options
        self._sound: set[str] = set()

    @contextmanager
    def write(self, target: str) -> Iterator[BinaryIO]:
        """Write a file that appears complete or not at all.

        Raises:
            EncodeError: The file exists, or a link leads to its folder.
        """
        self._check(target)
        with storage.atomic_write(target, options=self._options) as file:
            yield file

    def _check(self, target: str) -> None:
        if storage.is_local(target):
            self._check_links(os.path.dirname(storage.plain_path(target)))
        if not self._overwrite and self._is_there(target):
            raise EncodeError("the file exists: use another folder", url=target)

    def _is_there(self, target: str) -> bool:
        if storage.is_local(target):
            return os.path.lexists(storage.plain_path(target))
        return storage.exists(target, options=self._options)

    def _check_links(self, parent: str) -> None:
        """Check that no folder between the target folder and a file is a link."""
        if parent in self._sound:
            return
        root = storage.plain_path(self.url)
        inside = os.path.relpath(parent, root)
        expected = os.path.join(os.path.realpath(root), inside)
        if os.path.realpath(parent) != os.path.normpath(expected):
            raise EncodeError("expected a folder, got a link to another folder", url=parent)
        self._sound.add(parent)


def _true_name(url: str) -> str:
    """Return a name to compare files by: the real path if local, otherwise the URL."""
    return os.path.realpath(storage.plain_path(url)) if storage.is_local(url) else url


def _write_folder(
    samples: Iterable[tuple[str, Sample]],
    folder: _Folder,
    on_error: OnError | None,
) -> int:
    count = 0
    for path, sample in samples:
        try:
            for field in filter(_is_image, sample):
                # A key has no "..", no leading "/" and no "\" (SPEC 2.3): this stays inside.
                with folder.write(storage.join(folder.url, f"{path}.{field}")) as file:
                    file.write(sample[field])
        except PCRError as error:
            if on_error is None or not _is_bad_name(error) or not on_error(error):
                raise
        else:
            count += 1
    return count


def _is_bad_name(error: PCRError) -> bool:
    """Return whether a file's name caused the error, as opposed to the disk."""
    bad = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
    return isinstance(error, EncodeError) or getattr(error.__cause__, "errno", None) in bad


def _write_wds(
    shard: Shard,
    samples: Iterable[Sample],
    folder: _Folder,
) -> int:
    target = storage.join(folder.url, storage.file_name(shard.url))
    if _true_name(target) == _true_name(shard.url):
        raise EncodeError("expected another folder, not the shard's own", url=folder.url)
    with folder.write(target) as file:
        return _write_tar(samples, file)


def _write_tar(samples: Iterable[Sample], file: BinaryIO) -> int:
    count = 0
    for sample in samples:
        file.writelines(_tar_members(sample))
        count += 1
    file.write(TRAILER)
    return count


def _tar_members(sample: Sample) -> Iterator[bytes]:
    key = sample.pop("__key__")
    for field, value in sample.items():
        padding = bytes(-len(value) % BLOCK)
        yield tar_header(f"{key}.{field}", len(value)) + value + padding


def _to_baseline(
    samples: Iterable[Sample],
    prefix: Prefix,
    on_error: OnError | None,
) -> Iterator[Sample]:
    for sample in samples:
        try:
            for field in filter(is_jpeg_field, list(sample)):
                sample[field] = _baseline(sample[field], field in prefix.passthrough_images)
        except PCRError as error:
            named = type(error)(str(error), url=prefix.shard.url, key=sample["__key__"])
            if on_error is None or not on_error(named):
                raise named from error
        else:
            yield sample


def _baseline(jpeg: bytes, may_be_kept: bool) -> bytes:
    """Return a JPEG as baseline, and a passthrough file that cannot be rearranged unchanged."""
    try:
        return make_baseline(jpeg)
    except FormatError:
        if may_be_kept:
            return jpeg
        raise


def _is_image(field: str) -> bool:
    return is_jpeg_field(field) or is_other_image(field)


def _path(
    sample: Sample,
    classes: Sequence[str],
    taken: set[str],
) -> str:
    """Return the sample's path without extension: its key under its class name.

    If another sample has this path, append a number.
    """
    key = f"{_class_folder(sample, classes)}{sample['__key__']}"
    numbered = (f"{key}_{count}" for count in itertools.count(1))
    path = next(path for path in itertools.chain([key], numbered) if path not in taken)
    taken.add(path)
    return path


def _class_folder(sample: Sample, classes: Sequence[str]) -> str:
    """Return the folder of the sample's class; empty without one, or if the key starts with it."""
    label = sample.get("cls", b"").strip()
    number = int(label) if label.isdigit() and len(label) < 10 else len(classes)
    if number >= len(classes) or sample["__key__"].startswith(classes[number] + "/"):
        return ""
    folder = classes[number].replace("/", "_") + "/"
    return folder if valid_key(f"{folder}x") else f"class{number}/"
