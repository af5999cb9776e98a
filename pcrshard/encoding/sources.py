"""Where samples come from: image folders, WebDataset tars, lists of files.

A source is listed once, cheaply; what is kept of a sample is where its bytes are, so that any
worker can read it.
"""

from __future__ import annotations

import itertools
import json
import operator
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, Self

from .. import storage
from ..errors import EncodeError
from ..format.names import JPEG_EXTENSIONS, is_metadata, valid_field, valid_key
from ..format.shard_index import BLOCK
from ..redaction import get_logger, links_of, redact_url

_log = get_logger("pcrshard")
Row = dict[str, Any]
StorageOptions = storage.Options | None
CONVERTIBLE = frozenset({"png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2"})
_IMAGES = JPEG_EXTENSIONS | CONVERTIBLE
_LISTS = (".tsv", ".jsonl", ".ndjson")
_DIGITS = re.compile("-?[0-9]+")
_MAX_DIGITS = 18  # fits into int64
_NUMBER = re.compile("0|-?[1-9][0-9]*")
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")


class FieldRef(NamedTuple):
    """Where a field's bytes are: ``[start, stop)`` of a file, to its end if stop is ``None``."""

    name: str
    url: str
    start: int = 0
    stop: int | None = None


class SampleRef(NamedTuple):
    """A sample to encode: fields to read, and fields already known."""

    key: str
    refs: tuple[FieldRef, ...]
    known: tuple[tuple[str, bytes], ...] = ()


class Source(NamedTuple):
    """All samples of a source in a stable order, its class names, and files that were left out."""

    samples: list[SampleRef]
    classes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def list_source(
    src: str,
    *,
    prefix_keys: bool = False,
    options: StorageOptions = None,
) -> Source:
    """List the samples of a source.

    Args:
        src: A folder of images (its sub-folders are classes if every image is in one); a folder,
            URL or brace pattern of WebDataset tars; a ``.tsv`` or ``.jsonl`` list of path, label,
            extra.
        prefix_keys: Put the tar's name, and its folder where the tars have several, before its
            keys, for tars that use the same keys.
        options: fsspec storage options.

    Raises:
        EncodeError: Nothing to encode was found, or two samples have the same key.
        StorageError: The source cannot be listed.
    """
    if src.endswith(_LISTS):
        source = _list_rows(src, options)
    else:
        urls = storage.expand(src)
        if len(urls) == 1 and not urls[0].endswith(".tar"):
            source = _list_folder(urls[0].rstrip("/") or "/", prefix_keys, options)
        else:
            source = Source(list(_tar_samples(urls, prefix_keys, options)))
    if not source.samples:
        raise EncodeError(
            f"expected images, .tar files, or a .tsv/.jsonl list in {redact_url(src)}, found none"
        )
    return source


def _list_folder(
    folder: str,
    prefix_keys: bool,
    options: StorageOptions,
) -> Source:
    listed = storage.list_files(folder, options=options)
    sizes = {name: size for name, size in listed if not _hidden(name)}
    tars = [name for name in sizes if name.endswith(".tar")]
    images = [name for name in sizes if _extension(name) in _IMAGES]
    if tars and images:
        raise EncodeError(
            "found both images and tars: name the tars by a pattern",
            url=folder,
        )
    ignored = tuple(sorted(set(sizes).difference(tars, images)))
    if tars:
        urls = [storage.join(folder, name) for name in tars]
        return Source(list(_tar_samples(urls, prefix_keys, options)), ignored=ignored)
    samples, classes = _image_samples(folder, {name: sizes[name] for name in images})
    return Source(samples, classes, ignored)


def _image_samples(
    folder: str, sizes: dict[str, int | None]
) -> tuple[list[SampleRef], tuple[str, ...]]:
    """(samples, classes) of the images in a folder, given their sizes in bytes."""
    classes = _class_folders(folder, list(sizes))
    labels = {name: str(number).encode() for number, name in enumerate(classes)}
    samples = []
    for key, name in zip(_unique_keys(sizes), sizes, strict=True):
        ref = FieldRef("jpg", storage.join(folder, name), 0, sizes[name])
        label = labels.get(name.partition("/")[0])
        samples.append(SampleRef(key, (ref,), () if label is None else (("cls", label),)))
    return samples, classes


def _class_folders(folder: str, images: list[str]) -> tuple[str, ...]:
    """The classes of a folder's images; none if an image is in no sub-folder."""
    outside = [name for name in images if "/" not in name]
    if not outside:
        return tuple(sorted({name.split("/")[0] for name in images}))
    if len(outside) < len(images):
        _log.warning(
            "%s: no class labels, because %s and %d others are in no sub-folder",
            redact_url(folder),
            outside[0],
            len(outside) - 1,
        )
    return ()


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _extension(name: str) -> str:
    return posixpath.splitext(name)[1][1:].lower()


def _unique_keys(paths: Iterable[str]) -> list[str]:
    """Legal, distinct keys for file names: no dots in the last part, no way out of a folder."""
    keys: dict[str, None] = {}
    for path in paths:
        stem = _legal_key(path)
        numbered = (f"{stem}_{number}" for number in itertools.count(1))
        keys[next(key for key in itertools.chain([stem], numbered) if key not in keys)] = None
    return list(keys)


def _legal_key(path: str) -> str:
    """A legal key for a file's name, or for the path of a URL, never for the rest of it."""
    links = links_of(path)
    remote = [link for link in links if link.scheme] or links
    names = [link.path for link in remote] + [link.host for link in remote] + ["_"]
    local = next(name for name in names if name.strip("/\\\0."))
    parts = [part for part in re.split(r"[/\\\0]", local) if part not in ("", ".", "..")]
    parts[-1] = posixpath.splitext(parts[-1])[0].replace(".", "_") or "_"
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key


def _tar_samples(
    urls: list[str],
    prefix_keys: bool,
    options: StorageOptions,
) -> Iterator[SampleRef]:
    seen: dict[str, str] = {}
    folder = posixpath.commonprefix(urls).rpartition("/")[0]
    for url in urls:
        stem = url[len(folder) :].lstrip("/").removesuffix(".tar")
        for sample in _tar_members(url, options):
            key = f"{stem}/{sample.key}" if prefix_keys else sample.key
            if key in seen:
                where = "which holds it twice" if seen[key] == url else f"and in {redact_url(url)}"
                # Tars that hold a key twice themselves are not kept apart by their names.
                advice = (
                    "" if prefix_keys or seen[key] == url else "; --prefix-keys keeps them apart"
                )
                first = redact_url(seen[key])
                raise EncodeError(f"key {key!r} is in {first}, {where}{advice}")
            seen[key] = url
            yield sample._replace(key=key)


def _tar_members(url: str, options: StorageOptions) -> Iterator[SampleRef]:
    """Group a tar's members as WebDataset does: neighbours of one name up to the first dot."""
    with storage.open_file(url, options=options) as file:
        try:
            yield from _group_members(url, file)
        except (tarfile.TarError, RecursionError) as error:
            raise EncodeError(f"not an uncompressed tar: {error}", url=url) from error


class _CheckedInfo(tarfile.TarInfo):
    """A header that leads on: with a negative size tarfile would read the same one for ever."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        info = super().fromtarfile(tarfile_)
        if info.size < 0 or tarfile_.offset <= info.offset:
            raise tarfile.ReadError(f"a member claims {info.size} bytes at {info.offset}")
        return info


def _group_members(url: str, file: BinaryIO) -> Iterator[SampleRef]:
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_CheckedInfo) as tar:
        for key, members in itertools.groupby(_fields(tar), operator.itemgetter(0)):
            refs: dict[str, FieldRef] = {}
            for _, name, info in members:
                ref = _tar_field(url, info, key, name)
                if name in refs:
                    raise EncodeError(f"two members {info.name!r} in one sample", url=url)
                refs[name] = ref
            yield SampleRef(key, tuple(refs.values()))
        _check_tar_end(file, tar.offset, url)


def _fields(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, field name, header) of the members that WebDataset would read."""
    places: dict[str, tuple[int, int]] = {}
    for info in tar:
        # A hard link is a file that is in the tar already, under another name.
        if info.islnk() and info.linkname in places:
            info.type = tarfile.REGTYPE
            info.offset_data, info.size = places[info.linkname]
        name = info.name.removeprefix("./")
        match = _MEMBER.fullmatch(name)
        hidden = is_metadata(name) or posixpath.basename(name).startswith(".")
        if info.isreg() and match is not None and not hidden:
            places[info.name] = (info.offset_data, info.size)
            yield match[1], match[2].lower(), info
        # tarfile would keep every header in memory.
        tar.members = []  # type: ignore[attr-defined]


def _check_tar_end(
    file: BinaryIO,
    offset: int,
    url: str,
) -> None:
    """Make sure that the tar is over: a shorter dataset must not come of a damaged header.

    Python's tarfile takes a damaged header for the end of the tar, and a first end for the last.
    """
    file.seek(offset)
    block = file.read(BLOCK)
    if block not in (b"", bytes(BLOCK)):
        raise EncodeError(
            "expected a tar header or the end of the tar, got a damaged header",
            url=url,
            offset=offset,
        )
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise EncodeError(
                "expected nothing behind the end of the tar; join tars by `tar --concatenate`",
                url=url,
            )


def _tar_field(
    url: str,
    info: tarfile.TarInfo,
    key: str,
    name: str,
) -> FieldRef:
    if not valid_key(key) or not valid_field(name):
        raise EncodeError(f"member {info.name!r} does not make a legal key and field", url=url)
    if info.issparse():
        raise EncodeError(
            f"member {info.name!r} is stored with holes; make the tar without --sparse", url=url
        )
    return FieldRef(name, url, info.offset_data, info.offset_data + info.size)


def _list_rows(path: str, options: StorageOptions) -> Source:
    lines = storage.read_bytes(path, options=options).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    is_tsv = path.endswith(".tsv")
    parse: Callable[[str], Row | None] = _TsvParser() if is_tsv else _parse_json
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse(line.removesuffix(b"\r").decode()) if line.strip() else None
            if row is not None:
                _check_row(row)
                rows.append(row)
        except (ValueError, RecursionError) as error:
            reason = str(error).replace("\n", " ")
            raise EncodeError(f"line {number}: {reason}", url=path) from error
    if is_tsv:
        _read_numbers(rows)
    return _rows_to_source(rows, path)


def _rows_to_source(rows: list[Row], path: str) -> Source:
    folder = path.rpartition("/")[0]
    classes = _class_names(rows, path)
    numbers = {name: number for number, name in enumerate(classes)}
    samples = []
    for key, row in zip(_unique_keys(row["path"] for row in rows), rows, strict=True):
        url = row.pop("path")
        if folder and "://" not in url and not url.startswith("/"):
            url = storage.join(folder, url)
        known = []
        if "label" in row:
            label = row.pop("label")
            known.append(("cls", str(numbers.get(label, label)).encode()))
        if row:
            known.append(("json", json.dumps(row).encode()))
        samples.append(SampleRef(key, (FieldRef("jpg", url),), tuple(known)))
    return Source(samples, classes)


def _class_names(rows: list[Row], path: str) -> tuple[str, ...]:
    """The labels, sorted, if they are names; none if they are numbers."""
    labels = {row["label"] for row in rows if "label" in row}
    names = sorted(label for label in labels if isinstance(label, str))
    if names and len(names) != len(labels):
        number = next(label for label in labels if not isinstance(label, str))
        raise EncodeError(
            f"expected labels that are all numbers or all names, got {number} and {names[0]!r}",
            url=path,
        )
    return tuple(names)


def _check_row(row: Row) -> None:
    """Make sure that the row has a path to a file, and that a label is a number or a name."""
    path = row.get("path")
    label = row.get("label", 0)
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        shown = redact_url(path) if isinstance(path, str) else path
        raise EncodeError(f"expected a path to a file, got {shown!r}")
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise EncodeError(f"expected a label that is a number or a name, got {label!r}")
    if isinstance(label, int) and abs(label) >= 10**_MAX_DIGITS:
        raise EncodeError(f"expected a label of at most {_MAX_DIGITS} digits, got a longer number")


def _parse_json(line: str) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise EncodeError("expected a JSON object")
    return row


class _TsvParser:
    """Rows of path, label, extra; a first line with a ``path`` column names the columns instead."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, line: str) -> Row | None:
        """The row of a line, or ``None`` for the line that names the columns."""
        cells = line.split("\t")
        if not self.names and "path" in cells:
            self.names = cells
            if "class" in cells and "label" not in cells:
                self.names = ["label" if name == "class" else name for name in cells]
            return None
        self.names = self.names or ["path", "label", "extra"]
        if len(cells) > len(self.names) or "\r" in line:
            raise ValueError(f"expected the columns {', '.join(self.names)}, got {len(cells)}")
        row = {name: value for name, value in zip(self.names, cells, strict=False) if value}
        label = row.get("label", "")
        if _DIGITS.fullmatch(label) and len(label) > _MAX_DIGITS:
            raise ValueError(f"expected a label of at most {_MAX_DIGITS} digits, got {len(label)}")
        return row


def _read_numbers(rows: list[Row]) -> None:
    """Turn labels that are written as numbers into numbers.

    Where all are digits and some have leading zeros they stay: 007 is a name.
    """
    labelled = [row for row in rows if "label" in row]
    numbered = [row for row in labelled if _NUMBER.fullmatch(row["label"])]
    if len(numbered) < len(labelled) and all(_DIGITS.fullmatch(row["label"]) for row in labelled):
        return
    for row in numbered:
        row["label"] = int(row["label"])
