"""The exceptions of pcrshard.

PCRError
├── FormatError (ValueError)          bytes break SPEC.md or ITU-T T.81
│   ├── NotAShard                     not a PCR shard at all (a plain tar, another file)
│   ├── UnsupportedVersion            a format version unknown to this reader
│   ├── CorruptIndex                  the index breaks a rule or its checksum
│   ├── CorruptPiece                  a scan's bytes do not match their checksum
│   ├── TruncatedShard                fewer bytes than the index promises
│   ├── CorruptCheckpoint             a checkpoint breaks a rule or its checksum
│   ├── CorruptJpeg                   a damaged JPEG
│   └── UnsupportedJpeg               a legal JPEG that cannot be stored losslessly here
├── ScanUnavailable (LookupError)     the scan exceeds those available
├── EncodeError (ValueError)          the dataset cannot be written as requested
├── StorageError (OSError)            bytes could not be read or written
│   └── ConcurrentWriter              another process has written to the store
├── BrokenChain (LookupError)         a delta's reference is missing or differs
├── UnsupportedState (TypeError)      a state holds an unsupported value
├── VersionUnavailable (LookupError)  a checkpoint or tensor does not exist
└── MissingDependency (ImportError)   an optional package or library is absent
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .redaction import redact, redact_url

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_ARGS: Any = vars(BaseException)["args"]
_MAX_CAUSES = 100
_PLAIN_ERRORS = (FileNotFoundError, NotADirectoryError, PermissionError, TimeoutError)


def redacted_cause(error: BaseException | None, *urls: str) -> BaseException | None:
    """Return an error fit to be a cause: itself, or a copy of its kind without secrets.

    ``urls`` are URLs that its text may contain. Tracebacks also print causes, and those of workers
    end up in job logs.
    """
    chain = error
    for _ in range(_MAX_CAUSES):  # a library may make an error its own cause
        if chain is None or redact(str(chain), *urls) != str(chain):
            break
        chain = chain.__cause__ or chain.__context__
    if chain is None or error is None:
        return error
    kinds = [kind for kind in _PLAIN_ERRORS if isinstance(error, kind)]
    return kinds[0](redact(str(error), *urls)) if kinds else None


class PCRError(Exception):
    """Base class of all errors that pcrshard raises deliberately.

    The message includes the context, because WebDataset appends to ``args`` and DataLoader workers
    rebuild an exception as ``type(message)``. The message and ``args`` never contain passwords or
    signatures of URLs.

    Args:
        message: The expected and actual values.
        url: The shard or file; the attribute has no passwords or signatures.
        key: The sample's key.
        scan: The scan group.
        offset: Absolute byte offset.

    Attributes:
        url, key, scan, offset: The same, or ``None``; all ``None`` in an error that a DataLoader
            worker sent.
    """

    def __init__(
        self,
        message: str = "",
        *,
        url: str | None = None,
        key: str | None = None,
        scan: int | str | None = None,
        offset: int | None = None,
    ) -> None:
        file = "shard" if url is not None and url.endswith(".tar") else "file"
        urls = () if url is None else (url,)
        shown = None if url is None else redact_url(url)
        context = {
            file: shown,
            "key": key,
            "scan": scan,
            "offset": offset,
        }
        named = ", ".join(f"{name}={value}" for name, value in context.items() if value is not None)
        text = redact(message, *urls)
        self.url = shown
        self.key = key
        self.scan = scan
        self.offset = offset
        super().__init__(f"{text} ({named})" if named else text)

    @property
    def args(self) -> tuple[Any, ...]:
        """The message, and anything handlers append."""
        args: tuple[Any, ...] = _ARGS.__get__(self)
        return args

    @args.setter
    def args(self, values: Iterable[Any]) -> None:
        # Handlers append URLs as they are.
        shown = (redact(each, each) if isinstance(each, str) else each for each in values)
        _ARGS.__set__(self, tuple(shown))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class FormatError(PCRError, ValueError):
    """Bytes break SPEC.md or ITU-T T.81."""


class NotAShard(FormatError):
    """The file is not a PCR shard."""


class UnsupportedVersion(FormatError):
    """This reader does not support the format version of the file."""


class CorruptIndex(FormatError):
    """The index breaks a rule or its checksum."""


class CorruptCheckpoint(FormatError):
    """The file breaks a rule or checksum of docs/checkpoints-format.md."""


class CorruptPiece(FormatError):
    """A scan's bytes do not match their checksum."""


class TruncatedShard(FormatError):
    """The shard has fewer bytes than its index promises."""


class CorruptJpeg(FormatError):
    """The JPEG is damaged."""


class UnsupportedJpeg(FormatError):
    """The JPEG is legal, but cannot be stored losslessly as progressive scans here."""


class ScanUnavailable(PCRError, LookupError):
    """The requested scan does not exist."""


class EncodeError(PCRError, ValueError):
    """The dataset cannot be written as requested."""


class StorageError(PCRError, OSError):
    """Bytes could not be read or written."""


class ConcurrentWriter(StorageError):
    """Another process has written to the store concurrently."""


class BrokenChain(PCRError, LookupError):
    """The reference version of a delta is missing, or differs from the original one."""


class UnsupportedState(PCRError, TypeError):
    """A state holds a value that a checkpoint cannot store; the message names its path."""


class VersionUnavailable(PCRError, LookupError):
    """The checkpoint, or the tensor in it, does not exist."""


class MissingDependency(PCRError, ImportError):
    """An optional package or library is absent."""


class naming:  # noqa: N801  # used as a function; a generator would take twice the calls
    """Name a file and a sample in the errors of a block.

    A :class:`PCRError` that names a file already is unchanged. Errors of other types, which a
    user's function may raise, get a note.

    Args:
        url: The file.
        key: Key of the sample.
        where: Field or argument; first in the message.
    """

    def __init__(self, url: str | None = None, key: str | None = None, where: str = "") -> None:
        self._about = url, key, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if not isinstance(error, Exception):
            return
        url, key, where = self._about
        if not isinstance(error, PCRError):
            error.add_note(str(PCRError(where, url=url, key=key)))
        elif error.url is None:
            message = f"{where}: {error}" if where else str(error)
            raise type(error)(message, url=url, key=key) from error
