"""The trainer's side of a stream of weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .. import storage
from ..checkpoint.folder import Folder
from ..checkpoint.frame import damage_named
from ..checkpoint.safetensors_file import FileLayout, in_order, parse_file, words_by_name
from ..errorbound import Words
from ..errors import ConcurrentWriter, StorageError
from . import disk_delta
from .steps import encode_steps

LATEST = "latest"
_FILE = re.compile(r"(?:step-|keyframe-|weight_v)([0-9]{6,18})(?:\.pcw)?")


class WeightPublisher:
    """A publisher that writes weights to a folder as patches to the previously published ones.

    It keeps a copy of the weights. It publishes a keyframe with all weights when it starts, when
    names or shapes change, and every ``keyframe_every`` steps, for new mirrors. A folder has one
    publisher at a time; the next one continues the numbers, and removes what is old.

    Args:
        url: The folder, local or at any fsspec URL; any web server can serve it.
        keep: Number of steps that a mirror may be behind without loading all weights again. Steps
            and keyframes that are not needed for that are removed.
        keep_seconds: Nothing younger than this is removed, for mirrors that are still reading.
        keyframe_every: Number of steps between keyframes.
        layout: ``"pcrshard"``, or ``"disk-delta"``: the folders that SGLang's ``/pull_weights``
            takes, written as slime and miles do, about twice as large.
        model: A local Hugging Face checkpoint, whose configuration and tokenizer accompany each
            full checkpoint of a ``"disk-delta"`` stream.
        slow_link: Make steps about 20 % smaller at a tenth of the encoding speed.
        workers: Number of threads.
        options: fsspec storage options.

    Raises:
        ValueError: A number is too small, or the layout is unknown.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int = 50,
        keep_seconds: float = 0.0,
        keyframe_every: int = 50,
        layout: Literal["pcrshard", "disk-delta"] = "pcrshard",
        model: str | os.PathLike[str] | None = None,
        slow_link: bool = False,
        workers: int = 1,
        options: storage.Options = None,
    ) -> None:
        if keyframe_every < 1 or keep < 1:
            got = f"got {keyframe_every} and {keep}"
            raise ValueError(f"expected keyframe_every and keep to be at least 1, {got}")
        if layout not in ("pcrshard", "disk-delta"):
            raise ValueError(f"expected the layout 'pcrshard' or 'disk-delta', got {layout!r}")
        self._folder = Folder(os.fspath(url), options, workers)
        self._keep = keep
        self._keep_seconds = keep_seconds
        self._every = keyframe_every
        self._is_disk_delta = layout == "disk-delta"
        self._model = None if model is None else os.fspath(model)
        self._is_slow_link = slow_link
        # The last step and its id, None if unknown; its layout, and the words of each tensor.
        self._number = 0
        self._id: bytes | None = None
        self._layout: FileLayout = []
        self._held: list[Words] = []
        # Numbers of its steps that hold all weights.
        self._keyframes: list[int] = []

    def publish(self, weights: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> int:
        """Publish weights and return the step number.

        Args:
            weights: Tensors by name, or the path of a safetensors file. A local file is mapped, not
                read into memory: replace it by renaming another, never write into it meanwhile.

        Raises:
            CorruptCheckpoint: The file is none.
            UnsupportedState: A tensor has no dense local values or a type unknown to safetensors.
            ConcurrentWriter: Another process is publishing to this folder.
            StorageError: The folder cannot be written to.
        """
        if isinstance(weights, str | os.PathLike):
            with damage_named("expected a safetensors file", os.fspath(weights)):
                layout, found = in_order(parse_file(_contents(os.fspath(weights)))[1])
            words: Iterable[Words] = (x.copy() for x in found)  # once, in turn
        else:
            layout, words = words_by_name(weights)
        # If publishing fails, the copy does not match the published weights.
        parent, self._id = self._id, None
        if parent is None or self._layout != layout:
            parent, self._layout = None, layout
            self._held = [np.empty(spec.num_words, spec.word) for _, spec in layout]
            self._folder.clean()
            self._number = max(self._folder.numbered(_FILE).values(), default=0)
            # A mirror of an earlier step loads all weights again.
            self._keyframes = []
        elif self._folder.read_bytes(LATEST, 20) != str(self._number).encode():
            # Creating a file finds this in one layout only.
            raise self._refused()
        number = self._number + 1
        is_full = parent is None or number % self._every == 0
        if self._is_disk_delta:
            step_id = disk_delta.version_id(number)
            contents = disk_delta.encode_version(
                number, layout, words, self._held, is_full=is_full, model=self._model,
                is_slow_link=self._is_slow_link, workers=self._folder.workers,
            )  # fmt: skip
        else:
            step_id, contents = encode_steps(
                number, layout, words, self._held, parent, with_keyframe=is_full,
                is_slow_link=self._is_slow_link, workers=self._folder.workers,
            )  # fmt: skip
        for name, parts in contents.items():
            try:
                self._folder.put(name, parts, replace=False)
            except StorageError as error:
                if isinstance(error.__cause__, FileExistsError):
                    raise self._refused() from error
                raise
        self._folder.put(LATEST, [str(number).encode()])
        self._number, self._id = number, step_id
        if is_full:
            self._keyframes.append(number)
            self._prune()
        return number

    def _refused(self) -> ConcurrentWriter:
        message = "another process publishes to this folder"
        return ConcurrentWriter(message, url=self._folder.url)

    def _prune(self) -> None:
        """Remove what is before the newest keyframe that mirrors ``keep`` steps behind may need."""
        old = [number for number in self._keyframes if number <= self._number - self._keep]
        first = max(old, default=self._keyframes[0])
        self._keyframes = [number for number in self._keyframes if number >= first]
        files = self._folder.numbered(_FILE)
        for name, number in sorted(files.items(), key=lambda item: item[1]):
            if number >= first or self._is_young(name):
                break
            self._folder.remove([name])

    def _is_young(self, name: str) -> bool:
        if not self._keep_seconds:
            return False
        # Object stores know no times of folders.
        file = f"{name}/{disk_delta.INDEX}" if name.startswith("weight_v") else name
        try:
            age = storage.age_seconds(self._folder.join(file), options=self._folder.options)
        except StorageError:  # a killed publisher left a folder without an index
            return False
        return age < self._keep_seconds


def _contents(path: str) -> bytes | NDArray[np.uint8]:
    """Return the bytes of a file, of a local one without reading it."""
    if not storage.is_local(path):
        return storage.read_bytes(path)
    try:
        return np.memmap(storage.plain_path(path), np.uint8, "r")
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", url=path) from error
