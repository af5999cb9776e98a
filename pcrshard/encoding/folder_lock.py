"""Who may write to a local folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from ..errors import EncodeError, StorageError
from ..redaction import get_logger

LOCK = ".encode.lock"
# Bytes of the lock file: part I locks byte I, a whole run all bytes, and whoever writes the dataset
# index this one.
_FINISHING = 1 << 40
_log = get_logger("pcrshard")


class FolderLock:
    """A lock of a local folder by POSIX record locks of a file in it.

    They end with the process, workers that it forked do not hold them, and NFS, Lustre and GPFS
    know them.
    """

    # Of all objects: record locks do not keep a process from itself.
    _held: set[tuple[str, int, int]] = set()  # noqa: RUF012

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(os.path.realpath(folder), LOCK)
        self._handle = -1

    @contextlib.contextmanager
    def held(self, part: int | None) -> Iterator[None]:
        """Hold the folder for one part, or for a whole run.

        Raises:
            EncodeError: Another one holds it.
            StorageError: The folder cannot be written to.
        """
        start, length = (0, 0) if part is None else (part, 1)  # length 0 means all
        range_ = (self.path, start, length)
        if range_ in self._held:
            raise self._busy()
        while not self._open(start, length):
            pass
        self._held.add(range_)
        try:
            yield
        finally:
            self._held.discard(range_)
            if part is None:
                self.remove()
            os.close(self._handle)

    def _open(self, start: int, length: int) -> bool:
        """Open the file and lock it; false if it was removed meanwhile."""
        self._handle = self._open_file()
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(self._handle)
                raise self._busy() from error
            _log.warning(
                "%s: this file system has no locks; let no other encode write there", self.path
            )
            return True
        if self._is_there():
            return True
        os.close(self._handle)
        return False

    def _open_file(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self.path, flags, 0o666)
        except OSError as error:
            what = f"cannot write: {type(error).__name__}: {error}"
            raise StorageError(what, url=self.path) from error

    def _is_there(self) -> bool:
        """Whether the open file still has its name."""
        with contextlib.suppress(FileNotFoundError):
            # By name: to open the file once more and close it would end the lock.
            return os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        return False

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Wait until no other part looks whether all is done."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._handle, fcntl.LOCK_EX, 1, _FINISHING)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, _FINISHING)

    def remove(self) -> None:
        """Remove the file; whoever has opened it looks for it again once it has the lock."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _busy(self) -> EncodeError:
        return EncodeError(
            "another encode, of the same part or of the whole dataset, is writing to "
            f"{os.path.dirname(self.path)}: wait for it, or use another folder"
        )
