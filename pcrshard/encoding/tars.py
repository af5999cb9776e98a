"""The samples of WebDataset tars, also compressed ones.

A tar is listed by its headers alone: what lies between them is not read. A compressed tar, or one
on a server that sends no ranges, is read once, into an unpacked copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import operator
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import are_distinct, is_metadata, valid_field, valid_key
from ..format.shard_head import BLOCK, HEAD_STOP, MAGIC
from ..redaction import get_logger, redact, redact_url
from .sample_table import SampleTable
from .samples import UNPACKED, FieldRef, SampleRef, StorageOptions, Unlayered

_log = get_logger("pcrshard")
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_ARCHIVE = re.compile(r"[.](tar|tar[.](gz|bz2|xz|zst|zstd)|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
# Bounds the memory of a listing (gigabytes beyond this) and terminates on endless streams.
MAX_MEMBERS = 1 << 22
# pax headers, and GNU's long names.
_LONG_HEADERS = (b"x", b"g", b"X", b"L", b"K")
_MAX_HEADER_BYTES = 1 << 20
TARS_AT_A_TIME = 16
# Members below this size are read with the headers around them: a request takes longer.
_LEAST_SKIP = 16 << 10
# A header, and the byte before it, by which tarfile sees that the member before is whole.
_LEAST_READ = 513
_MOST_READ = 1 << 20
# Of an unpacked stream, what is kept of what was read: tarfile steps back by two blocks at most.
_KEPT_BYTES = 4 << 10

# Reads bytes of a member: from a place in it, at most a number of them.
ReadMember = Callable[[int, int], bytes]
# What is wanted of a member, by its field and its size.
Look = Callable[[str, int, ReadMember], Any]
# Keys, and of each field its name and where it is.
_Rows = list[tuple[str, list[tuple[str, int, int]]]]


class TarListing(NamedTuple):
    """The samples of tars, and what of them was left out."""

    samples: Sequence[SampleRef]
    skipped: list[Unlayered]


def is_archive(name: str) -> bool:
    """Return whether a file is a tar by its name, compressed or not."""
    return _ARCHIVE.search(name) is not None


def list_tars(
    tars: Sequence[FieldRef],
    *,
    prefix_keys: bool = False,
    skip: bool = False,
    options: StorageOptions = None,
    scratch: str | None = None,
    retry: storage.Retry = storage.Retry(),
) -> TarListing:
    """List the samples of tars, whole files with their names, grouped as WebDataset does.

    That joins adjacent members only; if a key comes back later in a tar, its members are a sample
    of their own, and a warning says so.

    Args:
        tars: Whole files with their names.
        prefix_keys: Prefix keys with the names of their tars.
        skip: Leave out damaged tars from the damage on, and samples that a shard cannot hold.
        options: fsspec storage options.
        scratch: Local folder for unpacked copies, which all workers see, and for what was listed,
            which other parts need not read again.
        retry: When to give up on a tar.

    Raises:
        EncodeError: A tar is damaged, or a sample cannot be kept or has the key of another; without
            ``skip``. Or a tar must be unpacked and there is no ``scratch``.
        StorageError: A tar cannot be read.
    """

    def list_one(tar: FieldRef) -> list[SampleRef | Unlayered]:
        found = storage.collect(TarReader(tar, skip, options, scratch).run(), tar.url, retry)
        return [each for each in found if each is not None]

    # Which tar has a key.
    owners: dict[str, str] = {}
    skipped: list[Unlayered] = []

    def samples(threads: ThreadPoolExecutor) -> Iterator[SampleRef]:
        for tar, listed in zip(tars, threads.map(list_one, tars), strict=True):
            prefix = f"{_ARCHIVE.sub('', tar.name)}/" if prefix_keys else ""
            again: list[str] = []
            for each in listed:
                if isinstance(each, Unlayered):
                    skipped.append(each)
                    continue
                key = prefix + each.key
                if owners.get(key) == tar.url:
                    again.append(key)
                    key = free_key(key, owners)
                elif key in owners:
                    first = redact_url(owners[key])
                    reason = f"key {key!r} is in {first} and again in {redact_url(tar.url)}"
                    if not skip:
                        raise EncodeError(
                            f"{reason}; --prefix-keys keeps the keys of different tars apart"
                        )
                    skipped.append(_skipped(tar.url, reason, key))
                    continue
                owners[key] = tar.url
                yield each._replace(key=key)
            if again:
                warn_of_unsorted(tar.url, again)

    with ThreadPoolExecutor(TARS_AT_A_TIME, "pcrshard-list") as pool:
        return TarListing(SampleTable.of(samples(pool)), skipped)


def free_key(key: str, taken: Container[str]) -> str:
    """Return a key with the first number at its end that is not taken."""
    return next(free for i in itertools.count(1) if (free := f"{key}_{i}") not in taken)


def warn_of_unsorted(url: str, keys: Sequence[str]) -> None:
    """Say that members of the same key are several samples."""
    _log.warning(
        "%s: members of %d keys (first %r) are apart from each other, so that they are several "
        "samples (%s_1, ...), as in WebDataset; sort the tar to join them",
        redact_url(url),
        len(keys),
        keys[0],
        keys[0],
    )


def _skipped(
    url: str, reason: str, key: str = "", member: str | None = None, offset: int | None = None
) -> Unlayered:
    """Return a row of the report, which must not hold secrets of URLs."""
    return Unlayered(key, redact_url(url), redact(reason, url), "skipped", member, offset)


class TarSample(NamedTuple):
    """A sample of a tar: its key, and its members in order."""

    key: str
    members: list[Member]


class TarReader:
    """Lists one tar.

    Args:
        tar: The whole file.
        skip: As in :func:`list_tars`.
        options: fsspec storage options.
        scratch: Local folder for an unpacked copy of a compressed tar. Without ``look``.
        look: Called with each member while the tar is read; a compressed tar is then read as a
            stream.

    Attributes:
        is_packed: Whether the tar is compressed.
    """

    def __init__(
        self,
        tar: FieldRef,
        skip: bool,
        options: storage.Access,
        scratch: str | None = None,
        look: Look | None = None,
    ) -> None:
        self.url = tar.url
        self.skip = skip
        self.options = options
        self.scratch = scratch
        self.look = look
        self.is_packed = False
        self.size, self.version = tar.stop, tar.version

    def samples(self) -> Iterator[TarSample | Unlayered | None]:
        """Yield the samples and what was found of them; see :meth:`run`."""
        self.find_version()
        yield from self._read()
        self._check_version()

    def find_version(self) -> None:
        """Ask the store for the tar's size and version, if they are not known."""
        if not self.version or self.size is None:
            _, self.size, self.version = storage.look_up(self.url, options=self.options)

    def _check_version(self) -> None:
        now = storage.look_up(self.url, options=self.options).version
        if now != self.version:
            raise StorageError("the tar was replaced while it was listed: run again", url=self.url)

    def run(self) -> Iterator[SampleRef | Unlayered | None]:
        """Yield the samples, and what is left out; nothing is a sign of life."""
        self.find_version()
        found = self._listed_before()
        if found is None:
            found = []
            for sample in self._read():
                each = self._ref(sample) if isinstance(sample, TarSample) else sample
                yield each
                if each is not None:
                    found.append(each)
            self._keep(found)
        else:
            yield from found
        self._check_version()

    def _ref(self, sample: TarSample) -> SampleRef:
        """Return a sample as a reference to where it was read."""
        refs = (FieldRef(m.field, self._place, *m.range, self.version) for m in sample.members)
        return SampleRef(sample.key, tuple(refs))

    @property
    def _listing(self) -> str:
        """The path of a file with the samples; empty if it cannot be known again."""
        known = f"{redact_url(self.url, query='')}\n{self.version}".encode()
        name = f"listed-{hashlib.sha256(known).hexdigest()[:32]}.msgpack"
        return os.path.join(self.scratch, name) if self.scratch and self.version else ""

    def _listed_before(self) -> list[SampleRef | Unlayered] | None:
        """Return the samples that another part or an earlier run has listed."""
        if not self._listing or not os.path.exists(self._listing):
            return None
        try:
            rows = msgspec.msgpack.decode(storage.read_bytes(self._listing), type=_Rows)
        except (msgspec.MsgspecError, StorageError):
            return None
        return [
            SampleRef(key, tuple(FieldRef(n, self.url, a, b, self.version) for n, a, b in refs))
            for key, refs in rows
        ]

    def _keep(self, found: Sequence[SampleRef | Unlayered]) -> None:
        """Keep the samples of a sound tar for other parts."""
        rows: _Rows = []
        for each in found:
            if isinstance(each, Unlayered) or each.refs[0].url != self.url:
                return  # unpacked copies are shared already
            rows.append((each.key, [(r.name, r.start, r.stop or 0) for r in each.refs]))
        if self._listing:
            with storage.atomic_write(self._listing, durable=False) as file:
                file.write(msgspec.msgpack.encode(rows))

    def _read(self) -> Iterator[TarSample | Unlayered | None]:
        # Where the tar is read: the URL, or an unpacked copy.
        self._place = self.url
        with contextlib.ExitStack() as stack:
            file: Any = None
            if storage.has_ranges(self.url, options=self.options) and self.size is not None:
                file = stack.enter_context(_open(self.url, self.size, self.options))
            start = file.read(HEAD_STOP) if file else b""
            self.is_packed = storage.is_packed(start)
            if start[BLOCK:].startswith(MAGIC):
                raise EncodeError(
                    "expected images, got a PCR shard; write its images with `pcrshard export` "
                    "first",
                    url=self.url,
                )
            try:
                if (file is None or self.is_packed) and self.look:
                    stream = storage.open_unpacked(self.url, options=self.options)
                    file = _Forward(stack.enter_context(stream))
                elif file is None or self.is_packed:
                    self._place = yield from self._unpack()
                    file = stack.enter_context(open(self._place, "rb", buffering=0))
                file.seek(0)
                yield from self._samples(file)
            except storage.Damaged as error:
                if not self.skip:
                    raise EncodeError(str(error)) from error.__cause__
                yield _skipped(self.url, str(error))
            except _Damaged as damage:
                if not self.skip:
                    raise EncodeError(damage.reason, url=self.url) from damage.__cause__
                yield _skipped(self.url, damage.reason, offset=damage.offset)

    def _samples(self, file: BinaryIO) -> Iterator[TarSample | Unlayered]:
        tar = None
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_CheckedInfo) as tar:
                for key, members in itertools.groupby(
                    _members(tar, self.look), operator.attrgetter("key")
                ):
                    own = list(members)
                    if problem := _problem_of(own):
                        if not self.skip:
                            raise EncodeError(problem.reason, url=self.url)
                        yield _skipped(self.url, problem.reason, key, problem.name, problem.offset)
                        continue
                    yield TarSample(key, own)
                _check_end(file, tar.offset)
        except (tarfile.TarError, RecursionError) as error:
            offset = tar.offset if tar else 0
            raise _Damaged(f"not a tar, or a damaged one: {error}", offset) from error

    def _unpack(self) -> Generator[None, None, str]:
        """Return the path of an unpacked copy, which parts and later runs use, too."""
        if self.scratch is None:
            raise EncodeError(
                "a compressed tar, or one on a server without ranges, is unpacked next to the "
                "shards, for which the destination must be a local folder: unpack it first",
                url=self.url,
            )
        known = f"{redact_url(self.url, query='')}\n{self.version}".encode()
        name = f"{UNPACKED}{hashlib.sha256(known).hexdigest()[:16]}.tar"
        path = os.path.join(self.scratch, name)
        if self.version and os.path.exists(path):
            return path
        with storage.atomic_write(path, durable=False) as out:
            try:
                with storage.open_unpacked(self.url, options=self.options) as plain:
                    while data := plain.read(1 << 20):
                        out.write(data)
                        yield  # it may take longer than a store may be silent
            except storage.Damaged as error:
                # What was unpacked is listed, up to the damage.
                if not self.skip:
                    raise _Damaged(str(error), out.tell()) from error.__cause__
        return path


class _Damaged(Exception):
    """What is wrong with a tar, and where."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = offset


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


class Member(NamedTuple):
    """A member that WebDataset would read; ``reason`` says why a shard cannot hold it.

    ``found`` is what ``look`` has found.
    """

    key: str
    field: str
    range: tuple[int, int]
    name: str
    offset: int
    reason: str
    found: Any = None


def _members(tar: tarfile.TarFile, look: Look | None) -> Iterator[Member]:
    file: Any = tar.fileobj
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
            reason = ""
            if not valid_key(key) or not valid_field(field):
                reason = f"member {info.name!r} does not give a valid key and field"
            elif info.issparse() or info.islnk():
                reason = (
                    f"member {info.name!r} is a sparse file or a hard link; create the tar without "
                    "--sparse and with --hard-dereference"
                )
            where = info.offset_data, info.offset_data + info.size
            found = None
            if look is not None and not reason:
                try:
                    found = look(field, info.size, partial(_read_member, file, where))
                except tarfile.ReadError as error:  # the sample before it is whole
                    reason = f"member {info.name!r} is cut off: {error}"
            yield Member(key, field, where, info.name, info.offset, reason, found)
        # tarfile would keep every header in memory.
        tar.members = []  # type: ignore[attr-defined]


def _read_member(file: BinaryIO, where: tuple[int, int], start: int, count: int) -> bytes:
    """Return bytes of a member, fewer if it ends before.

    Raises:
        tarfile.ReadError: The tar ends before the member does.
    """
    place = where[0] + start
    wanted = min(count, where[1] - place)
    file.seek(place)
    data = b""
    while len(data) < wanted:
        more = file.read(wanted - len(data))
        if not more:
            raise tarfile.ReadError("unexpected end of data")
        data += more
    return data


def _problem_of(members: Sequence[Member]) -> Member | None:
    """Return the member for which a sample cannot be kept."""
    names = [member.field for member in members]
    if not are_distinct(names):
        reason = f"expected distinct fields in sample {members[0].key!r}, got {names}"
        return members[-1]._replace(reason=reason)
    return next((member for member in members if member.reason), None)


def _check_end(file: BinaryIO, offset: int) -> None:
    """Reject a damaged header, which tarfile takes for the end, and concatenated tars."""
    file.seek(offset)
    while rest := file.read(_MOST_READ):
        if rest.strip(b"\0"):
            raise _Damaged(
                "expected nothing after the end of the tar, got a damaged header or another tar; "
                "join tars with `tar --concatenate`",
                offset,
            )


def _open(url: str, size: int, options: storage.Access) -> Any:
    """Open a tar to read headers; a local one without the read-ahead of a buffer."""
    if storage.is_local(url):
        return storage.open_stream(url, options=options)
    return contextlib.nullcontext(_Headers(url, size, options))


class _Seekable(io.RawIOBase):
    """A file that is read from wherever it was told to go."""

    _position = 0
    _size = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position


class _Forward(_Seekable):
    """A stream, of which the bytes that were read last can be read again."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        super().__init__()
        self._stream = stream
        self._position = self._start = 0
        self._held = b""

    def readinto(self, buffer: Any) -> int:
        if self._position < self._start:
            raise io.UnsupportedOperation("a stream is read forward")
        while self._position >= self._start + len(self._held):
            data = self._stream.read(_MOST_READ)
            if not data:
                return 0
            self._start += max(len(self._held) - _KEPT_BYTES, 0)
            self._held = self._held[-_KEPT_BYTES:] + data
        place = self._position - self._start
        data = self._held[place : place + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Headers(_Seekable):
    """A remote tar of which mostly headers are read, each run of them with one request.

    After a jump over a large member, as many bytes are read as the last run of small members took;
    where members are small, ever more at a time.
    """

    def __init__(self, url: str, size: int, options: storage.Access) -> None:
        super().__init__()
        self._url = url
        self._size = size
        self._options = options
        self._position = 0
        self._start = 0  # of the bytes held
        self._held = b""
        self._begin = self._reached = 0  # of this run
        self._usual = _LEAST_READ

    def readinto(self, buffer: Any) -> int:
        start = self._position
        stop = min(start + len(buffer), self._size)
        if start >= stop:
            return 0
        held_stop = self._start + len(self._held)
        if not self._start <= start <= stop <= held_stop:
            if self._start <= start < held_stop + _LEAST_SKIP:
                wanted = min(max(2 * len(self._held), _LEAST_READ), _MOST_READ)
            else:
                self._usual = min(max(self._reached - self._begin, _LEAST_READ), _MOST_READ)
                self._begin = start
                wanted = self._usual
            end = min(max(start + wanted, stop), self._size)
            how: Any = {"options": self._options}
            self._start, self._held = start, storage.read(self._url, start, end, **how).tobytes()
        self._position = self._reached = stop
        buffer[: stop - start] = self._held[start - self._start : stop - self._start]
        return stop - start
