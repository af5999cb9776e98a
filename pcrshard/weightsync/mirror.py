"""The server's side of a stream of weights."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from .. import storage
from ..checkpoint.folder import Folder, memory_bytes
from ..checkpoint.frame import HEAD_BYTES, damage_named, require
from ..checkpoint.tensors import tensor_from
from ..checkpoint.version_file import parallel_map
from ..checksum import crc32c
from ..errorbound import Words
from ..errors import BrokenChain, CorruptCheckpoint, StorageError, VersionUnavailable
from ..redaction import redact_url
from .disk_delta import INDEX, VERSION, Delta, folder_name, read_version
from .layout import blocks, u32
from .mirror_file import MirrorFile, State
from .publisher import LATEST
from .steps import KINDS, Step, read_step

_POLL_SECONDS = 0.05


class WeightMirror:
    """A local file in the safetensors format that mirrors published weights.

    By default, the file changes in place, through one memory mapping, and only inside
    :meth:`update` and :meth:`wait`. This process has the weights by :meth:`tensors`; for others, a
    file that changes while it is read would yield tensors of two steps. They call
    :func:`read_consistent`, and the file's name, ``model.safetensors.live``, is not one that
    engines look for.

    With ``replace=True``, each update writes a new ``model.safetensors`` and renames it, so that
    any engine can load it at any time: a copy of all weights on the disk per update.

    If the process is killed during an update in place, the next mirror of the folder finds that the
    file does not match its checksums, and reloads all weights into it.

    Args:
        url: The publisher's folder, or one that slime or miles publish disk deltas to.
        folder: A local folder, used by at most one mirror at a time.
        replace: Whether each update replaces the file.
        base: For a stream of disk deltas without a full checkpoint: the folder or URL of the
            Hugging Face checkpoint that its first delta refers to.
        workers: Number of threads.
        options: fsspec storage options of ``url``.
        max_bytes: Maximum accepted size of the weights in bytes; default: the machine's memory.

    Raises:
        ValueError: ``folder`` is not local.
        StorageError: ``folder`` cannot be created.

    Attributes:
        path: Path of the file.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        replace: bool = False,
        base: str | os.PathLike[str] | None = None,
        workers: int = 1,
        options: storage.Options = None,
        max_bytes: int | None = None,
    ) -> None:
        folder = storage.plain_path(os.fspath(folder))
        if not storage.is_local(folder):
            raise ValueError(f"expected a local folder for the mirror, got {redact_url(folder)}")
        self.url = os.fspath(url)
        limit = memory_bytes() if max_bytes is None else max_bytes
        self._folder = Folder(self.url, options, workers, limit)
        self._base = None if base is None else Folder(os.fspath(base), max_bytes=limit)
        self._file = MirrorFile(folder, is_replaced=replace)
        self.path = self._file.path

    @property
    def step(self) -> int:
        """Number of the last applied step; 0 for none."""
        state = self._file.state
        return 0 if state is None else state.number

    def wait(self, *, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Wait for a new step, apply it, and return its number.

        Args:
            newer_than: Wait for a step with a number above this one; default: the file's step.
            timeout: Seconds to wait.

        Raises:
            TimeoutError: No new step was published in time.
            PCRError: See :meth:`update`.
        """
        wanted = self.step if newer_than is None else max(newer_than, 0)
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.step <= wanted and not self._is_news(self._latest(), wanted):
            if time.monotonic() > end:
                raise TimeoutError(f"there is no step after {wanted}")
            time.sleep(_POLL_SECONDS)
        return self.update()

    def update(self) -> int:
        """Apply all available steps and return the number of the last one.

        Multiple steps are applied in one pass over the file.

        Raises:
            VersionUnavailable: Nothing has been published.
            BrokenChain: A step is a patch to other weights than the file's.
            CorruptCheckpoint: A step is damaged, and there is no keyframe after it.
            StorageError: The folder cannot be read.
        """
        newest = self._latest()
        if newest == 0:
            raise VersionUnavailable("no weights were published", url=self.url)
        if not (self._is_news(newest, self.step) or self._is_replaced()):
            return self.step
        steps: list[Step | Delta] = []
        if self.step:
            with suppress(CorruptCheckpoint, BrokenChain):
                steps = self._read_steps(newest, KINDS)
        # If a step is damaged or was pruned, begin with a keyframe.
        steps = steps or self._read_steps(newest, KINDS[::-1])
        if steps:
            with damage_named("the weights cannot be updated", self.url):
                self._apply(steps)
            return self.step
        if self._latest() != newest:
            return self.update()  # what was read has been pruned meanwhile
        raise VersionUnavailable("there is no keyframe", url=self.url)

    def tensors(self, *, pinned: bool = False) -> dict[str, torch.Tensor]:
        """Return the weights by name.

        They share the file's memory: in a file that changes in place, they change with it, unless
        names or shapes change; those of a replaced file keep their step. Call this method again
        after such an update.

        Args:
            pinned: Whether to copy them to page-locked memory, which a GPU reads several times as
                fast as a mapped file; they then keep their step. Needs a GPU.
        """
        parts = zip(self._file.layout, self._file.words, strict=True)
        found = {name: tensor_from(words, spec) for (name, spec), words in parts}
        return {name: each.pin_memory() for name, each in found.items()} if pinned else found

    def _is_news(self, latest: int, known: int) -> bool:
        """Return whether there is a step after a known one, or the stream was replaced."""
        if not 0 < latest < self.step:
            return latest > known
        return self._is_replaced()  # a cache may also give an older number

    def _is_replaced(self) -> bool:
        """Return whether the stream's file of the mirror's step is gone, or of another stream."""
        state = self._file.state
        if state is None:
            return True
        with suppress(StorageError):
            head = self._folder.read(state.source, 0, HEAD_BYTES)
            return state.head not in (b"", head)
        return True

    def _latest(self) -> int:
        text = self._folder.read_bytes(LATEST, 20)
        require(text is None or text.isdigit(), "expected the number of a step")
        return self._newest_version() if text is None else int(text)

    def _newest_version(self) -> int:
        """Return the number of the newest disk delta in a folder that others publish to."""
        with suppress(StorageError):  # a web server may have no listings
            numbers = self._folder.numbered(VERSION).values()
            for number in sorted(numbers, reverse=True):
                url = self._folder.join(f"{folder_name(number)}/{INDEX}")
                if storage.exists(url, options=self._folder.options):
                    return number
        return 0

    def _read_steps(self, newest: int, kinds: Sequence[str]) -> list[Step | Delta]:
        """Read back from a step to one that applies to the file, or that has all weights.

        Returns:
            The steps in order; none if one is missing.
        """
        steps: list[Step | Delta] = []
        known = None if self._file.state is None else self._file.state.id
        for number in range(newest, -1, -1):
            found = self._read(number, kinds)
            if found is None:
                break
            if steps and steps[0].parent != found.id:
                message = f"step {number + 1} is a patch of other weights"
                raise BrokenChain(message, url=self.url)
            steps.insert(0, found)
            if found.parent in (None, known):
                return steps
        return []

    def _read(self, number: int, kinds: Sequence[str]) -> Step | Delta | None:
        if number == 0:
            return None if self._base is None else read_version(self._base, 0, "")
        for kind in kinds:
            if (step := read_step(self._folder, kind, number)) is not None:
                return step
        return read_version(self._folder, number)

    def _apply(self, steps: Sequence[Step | Delta]) -> None:
        """Apply steps in one pass over the file, which must then match the last one's checksums."""
        layout = next((each.layout for each in steps if isinstance(each, Step)), self._file.layout)
        for each in steps:
            is_same = isinstance(each, Delta) or each.layout == layout
            require(is_same, "expected one layout")
        is_whole = steps[0].parent is None
        require(is_whole or layout == self._file.layout, "expected the file's layout")
        last, workers = steps[-1], self._folder.workers

        def work(words: Sequence[Words], steps: Sequence[Step | Delta]) -> State:
            parts = list(blocks(words))
            patches = [each for each in steps if isinstance(each, Step)]

            def patch(n: int) -> int:
                crc = 0
                for each in patches:
                    crc = each.apply(parts[n], n)
                return crc or crc32c(parts[n])

            if isinstance(last, Step):
                crcs = u32(parallel_map(workers, patch, range(len(parts))))
                is_same = last.crcs in (None, crcs)
                require(is_same, "the weights do not match their checksums")
            else:
                for n in range(len(parts) if patches else 0):
                    patch(n)
                names = [name for name, _ in layout]
                for each in steps:
                    if isinstance(each, Delta):
                        each.apply(dict(zip(names, words, strict=True)), workers)
                crcs = u32(parallel_map(workers, crc32c, parts))
            return State(last.number, last.id, last.source, last.head, layout, crcs)

        self._file.change(layout, steps, work)
