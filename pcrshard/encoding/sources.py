"""Where samples come from: image folders, WebDataset tars, lists of files.

A source is listed once, cheaply; what is kept of a sample is where its bytes are, so that any
worker can read it.
"""

from __future__ import annotations

import itertools
import operator
import posixpath
import re
import tarfile
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple, Self

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import JPEG_EXTENSIONS, is_metadata, valid_field, valid_key
from ..format.shard_index import BLOCK
from ..redaction import bare_url, get_logger, redact_url
from .row_lists import LISTS, list_rows
from .sample_refs import FieldRef, SampleRef, Source, StorageOptions, find_splits, unique_keys

__all__ = ["CONVERTIBLE", "FieldRef", "SampleRef", "Source", "StorageOptions", "list_source"]

_log = get_logger("pcrshard")
CONVERTIBLE = frozenset({"png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2"})
_IMAGES = JPEG_EXTENSIONS | CONVERTIBLE
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
# A larger tar would take gigabytes to list; what is without end never ends otherwise.
_MAX_MEMBERS = 1 << 22
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_MAX_HEADER_BYTES = 1 << 20
_HTTP = ("http://", "https://")


class _How(NamedTuple):
    """How a source is listed; see :func:`list_source`."""

    prefix_keys: bool
    options: StorageOptions
    retry: storage.Retry


class _File(NamedTuple):
    """A file of a folder: its path in it, its URL, and its size in bytes if that is known."""

    name: str
    url: str
    size: int | None


def list_source(
    src: str,
    *,
    prefix_keys: bool = False,
    options: StorageOptions = None,
    retry: storage.Retry = storage.Retry(),
) -> Source:
    """List the samples of a source.

    Args:
        src: A folder of images (its sub-folders are classes if every image is in one), or a
            pattern of such files (``photos/*/*.jpg``); a folder, URL, or pattern of WebDataset
            tars; a ``.csv``, ``.tsv`` or ``.jsonl`` list of path, label, extra.
        prefix_keys: Put the tar's name, and its folder where the tars have several, before its
            keys, for tars that use the same keys.
        options: fsspec storage options.
        retry: ``deadline`` is the longest time without a file or a sample.

    Raises:
        EncodeError: Nothing to encode was found, or two samples have the same key.
        StorageError: The source cannot be listed, or does not answer.
    """
    how = _How(prefix_keys, options, retry)
    if src.endswith(LISTS):
        source = list_rows(src, options)
    else:
        urls = storage.expand(src)
        if any(map(storage.is_pattern, urls)):
            source = _list_patterns(urls, how)
        elif len(urls) == 1 and not urls[0].endswith(".tar"):
            source = _list_folder(urls[0].rstrip("/") or "/", how)
        else:
            source = Source(list(_tar_samples(urls, how)))
    if not source.samples:
        raise EncodeError(
            "expected images, .tar files, or a .csv, .tsv or .jsonl list in "
            f"{redact_url(src)}, found none{_http_advice(src)}"
        )
    return source


def _http_advice(src: str) -> str:
    """What helps where a server does not list its folders."""
    if not src.startswith(_HTTP):
        return ""
    return (
        "; a web server may not list its folders: name tars by a brace pattern "
        "(x-{000..099}.tar), or images by a .csv list of URLs"
    )


def _list_folder(folder: str, how: _How) -> Source:
    try:
        listed = storage.list_files(folder, options=how.options, retry=how.retry)
    except StorageError as error:
        if advice := _http_advice(folder):
            raise StorageError(f"{error}{advice}") from error.__cause__
        raise
    if folder.startswith(_HTTP):
        # A listing has links by which it is sorted, and names as they are written in URLs.
        listed = [(name, size) for name, size in listed if "?" not in name]
    files = [_File(_shown(folder, n), storage.join(folder, n), size) for n, size in listed]
    source = _sort_files(folder, files, how)
    return source._replace(
        splits=_split_sources(_usable(files), lambda split: storage.join(folder, split))
    )


def _usable(files: Sequence[_File]) -> list[_File]:
    """Images and tars that are not hidden."""
    return [file for file in files if not _hidden(file.name) and _is_usable(file.name)]


def _is_usable(name: str) -> bool:
    return name.endswith(".tar") or _extension(name) in _IMAGES


def _shown(folder: str, name: str) -> str:
    return urllib.parse.unquote(name) if folder.startswith(_HTTP) else name


def _split_sources(files: Sequence[_File], folder_of: Callable[[str], str]) -> dict[str, str]:
    """What to encode for each split: its folder, as ``folder_of`` says, or its tars."""
    urls = {file.name: file.url for file in files}
    sources = {}
    for split, names in find_splits(urls).items():
        is_folder = "/" in names[0]
        sources[split] = folder_of(split) if is_folder else "::".join(urls[name] for name in names)
    return sources


def _list_patterns(patterns: list[str], how: _How) -> Source:
    """The files that match any of some patterns, as if they were alone in their folder."""
    found: dict[str, int | None] = {}
    for pattern in patterns:
        if storage.is_pattern(pattern):
            found |= storage.list_matching(pattern, options=how.options, retry=how.retry)
        else:
            found[pattern] = None
    fixed = [storage.fixed_folder(pattern) for pattern in patterns]
    folder = _shared_folder(fixed)
    # Names become keys and classes.
    bare = _shared_folder([bare_url(each) for each in fixed])
    files = [
        _File(_shown(url, bare_url(url).removeprefix(bare)), url, size)
        for url, size in sorted(found.items())
    ]
    source = _sort_files(bare, files, how)
    rests = [storage.plain_path(pattern).removeprefix(folder) for pattern in patterns]
    splits = _split_sources(_usable(files), lambda split: _in_split(folder, split, rests))
    return source._replace(splits=splits)


def _in_split(
    folder: str,
    split: str,
    rests: Sequence[str],
) -> str:
    """The patterns that match in one split only."""
    tails = [rest if rest.startswith("**/") else rest.partition("/")[2] for rest in rests]
    return "::".join(f"{folder}{split}/{tail}" for tail in tails)


def _shared_folder(folders: Sequence[str]) -> str:
    shared = posixpath.commonprefix(folders)
    return shared[: shared.rfind("/") + 1]


def _sort_files(
    folder: str,
    files: Sequence[_File],
    how: _How,
) -> Source:
    """Take the tars or the images of a folder, and name the rest."""
    usable = _usable(files)
    tars = [file for file in usable if file.name.endswith(".tar")]
    if tars and len(tars) < len(usable):
        raise EncodeError(
            "found both images and tars: name the tars by a pattern",
            url=folder,
        )
    source = _tar_source(tars, how) if tars else _image_source(folder, usable)
    ignored = [name for name, *_ in files if not _hidden(name) and not _is_usable(name)]
    return source._replace(ignored=tuple(ignored))


def _tar_source(tars: Sequence[_File], how: _How) -> Source:
    urls = [file.url for file in tars]
    return Source(list(_tar_samples(urls, how)))


def _image_source(folder: str, images: Sequence[_File]) -> Source:
    names = [image.name for image in images]
    classes = _class_folders(folder, names)
    labels = {name: str(number).encode() for number, name in enumerate(classes)}
    samples = []
    for key, image in zip(unique_keys(names), images, strict=True):
        ref = FieldRef("jpg", image.url, 0, image.size)
        label = labels.get(image.name.partition("/")[0])
        samples.append(SampleRef(key, (ref,), () if label is None else (("cls", label),)))
    return Source(samples, classes)


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


def _tar_samples(urls: list[str], how: _How) -> Iterator[SampleRef]:
    seen: dict[str, str] = {}
    names = [bare_url(url) for url in urls]
    folder = posixpath.commonprefix(names).rpartition("/")[0]
    for url, name in zip(urls, names, strict=True):
        stem = name[len(folder) :].lstrip("/").removesuffix(".tar")
        for sample in storage.collect(_tar_members(url, how.options), url, how.retry):
            key = f"{stem}/{sample.key}" if how.prefix_keys else sample.key
            if key in seen:
                where = "which holds it twice" if seen[key] == url else f"and in {redact_url(url)}"
                # Tars that hold a key twice themselves are not kept apart by their names.
                advice = (
                    ""
                    if how.prefix_keys or seen[key] == url
                    else "; --prefix-keys keeps them apart"
                )
                first = redact_url(seen[key])
                raise EncodeError(f"key {key!r} is in {first}, {where}{advice}")
            seen[key] = url
            yield sample._replace(key=key)


def _tar_members(url: str, options: StorageOptions) -> Iterator[SampleRef]:
    """Group a tar's members as WebDataset does: neighbors of one name up to the first dot."""
    unchanged = storage.unchanged([url], options=options)
    with unchanged, storage.open_file(url, options=options) as file:
        try:
            yield from _group_members(url, file)
        except (tarfile.TarError, RecursionError) as error:
            raise EncodeError(f"not an uncompressed tar: {error}", url=url) from error


class _CheckedInfo(tarfile.TarInfo):
    """A header that leads on: with a negative size tarfile would read the same one for ever."""

    @classmethod
    def frombuf(
        cls,
        buf: bytes | bytearray,
        encoding: str,
        errors: str,
    ) -> Self:
        info = super().frombuf(buf, encoding, errors)
        # tarfile reads what belongs to headers into memory.
        if info.type in _LONG_HEADERS and info.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header claims {info.size} bytes")
        return info

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
    for number, info in enumerate(tar):
        if number == _MAX_MEMBERS:
            raise tarfile.ReadError(f"more than {_MAX_MEMBERS} members; divide it")
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
