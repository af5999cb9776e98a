"""The samples of WebDataset tars."""

from __future__ import annotations

import itertools
import operator
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Self

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import are_distinct, is_metadata, valid_field, valid_key
from ..format.shard_head import BLOCK, HEAD_STOP, MAGIC
from ..redaction import redact_url
from .samples import FieldRef, SampleRef, StorageOptions

_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
# Bounds the memory of a listing (gigabytes beyond this) and terminates on endless streams.
MAX_MEMBERS = 1 << 22
# pax headers, and GNU's long names.
_LONG_HEADERS = (b"x", b"g", b"X", b"L", b"K")
_MAX_HEADER_BYTES = 1 << 20


def list_tars(
    tars: Sequence[FieldRef],
    prefix_keys: bool,
    options: StorageOptions,
    retry: storage.Retry = storage.Retry(),
) -> list[SampleRef]:
    """List the samples of tars, whole files with their names, grouped as WebDataset does.

    Raises:
        EncodeError: A tar is damaged, or two samples have the same key.
        StorageError: A tar cannot be read.
    """
    owners: dict[str, str] = {}
    samples = []
    for tar in tars:
        for sample in storage.collect(_list_tar(tar, options), tar.url, retry):
            key = sample.key
            if prefix_keys:
                key = f"{tar.name.removesuffix('.tar')}/{key}"
            if key in owners:
                first = redact_url(owners[key])
                raise EncodeError(
                    f"key {key!r} is in {first} and again in {redact_url(tar.url)}; --prefix-keys "
                    "keeps the keys of different tars apart"
                )
            owners[key] = tar.url
            samples.append(sample._replace(key=key))
    return samples


def _list_tar(listed: FieldRef, options: StorageOptions) -> Iterator[SampleRef]:
    url = listed.url
    version = listed.version or storage.version(url, options=options)
    with storage.open_file(url, options=options) as file:
        if file.read(HEAD_STOP)[BLOCK:].startswith(MAGIC):
            raise EncodeError(
                "expected images, got a PCR shard; write its images with `pcrshard export` first",
                url=url,
            )
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_CheckedInfo) as tar:
                for key, fields in itertools.groupby(_fields(tar, url), operator.itemgetter(0)):
                    refs = tuple(ref._replace(version=version) for _, ref in fields)
                    names = [ref.name for ref in refs]
                    if not are_distinct(names):
                        raise EncodeError(
                            f"expected distinct fields in sample {key!r}, got {names}", url=url
                        )
                    yield SampleRef(key, refs)
                _check_end(file, tar.offset, url)
        except (tarfile.TarError, RecursionError) as error:
            raise EncodeError(f"not an uncompressed tar: {error}", url=url) from error
    if storage.version(url, options=options) != version:
        raise StorageError("the tar was replaced while it was listed: run again", url=url)


class _CheckedInfo(tarfile.TarInfo):
    """A header that advances the read position; tarfile loops forever on a negative size."""

    @classmethod
    def frombuf(cls, *args: Any, **how: Any) -> Self:
        info = super().frombuf(*args, **how)
        # tarfile reads extended headers into memory.
        if info.type in _LONG_HEADERS and info.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header claims {info.size} bytes")
        return info

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        info = super().fromtarfile(tarfile_)
        if info.size < 0 or tarfile_.offset <= info.offset:
            raise tarfile.ReadError(f"a member claims {info.size} bytes at {info.offset}")
        return info


def _fields(tar: tarfile.TarFile, url: str) -> Iterator[tuple[str, FieldRef]]:
    """Yield the key and the field of each member that WebDataset would read."""
    for number, info in enumerate(tar):
        if number == MAX_MEMBERS:
            raise tarfile.ReadError(
                f"expected at most {MAX_MEMBERS} members, got more; split the tar"
            )
        name = info.name.removeprefix("./")
        match = _MEMBER.fullmatch(name)
        hidden = is_metadata(name) or posixpath.basename(name).startswith(".")
        if (info.isreg() or info.islnk()) and match is not None and not hidden:
            key, field = match[1], match[2].lower()
            if not valid_key(key) or not valid_field(field):
                raise EncodeError(
                    f"member {info.name!r} does not give a valid key and field", url=url
                )
            if info.issparse() or info.islnk():
                raise EncodeError(
                    f"member {info.name!r} is a sparse file or a hard link; create the tar without "
                    "--sparse and with --hard-dereference",
                    url=url,
                )
            yield key, FieldRef(field, url, info.offset_data, info.offset_data + info.size)
        # tarfile would keep every header in memory.
        tar.members = []  # type: ignore[attr-defined]


def _check_end(file: BinaryIO, offset: int, url: str) -> None:
    """Reject a damaged header, which tarfile takes for the end, and concatenated tars."""
    file.seek(offset)
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise EncodeError(
                "expected nothing after the end of the tar, got a damaged header or another tar; "
                "join tars with `tar --concatenate`",
                url=url,
            )
