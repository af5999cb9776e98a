"""Reading a store: its versions, each as a state, as it is stored, or as a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from ..errors import PCRError, StorageError, VersionUnavailable
from . import rewrite
from .chain import chain_of, plan_layers, read_tensors
from .held_version import HeldVersion, Progress, restore_all, state_of, tensor_of
from .manifest import Manifest, VersionRecord, read_manifest, require_manifest
from .safetensors_file import export_safetensors
from .version_file import VersionFile
from .writer import Place

T = TypeVar("T")
_ATTEMPTS = 3


class StoreReader:
    """The versions of a store.

    Args:
        place: Where it is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def wait(self) -> None:
        """Wait until what is being written is in the store; who only reads waits for nothing."""

    @property
    def url(self) -> str:
        """The folder."""
        return self._place.url

    def versions(self) -> list[VersionRecord]:
        """The versions, oldest first; one request."""
        self.wait()
        manifest = read_manifest(self.url, self._place.options)
        return [] if manifest is None else list(manifest.versions)

    def load(
        self,
        version: int | None = None,
        *,
        names: Collection[str] | None = None,
        map_location: Any = None,
        verify: bool = True,
    ) -> Any:
        """Load a version.

        Args:
            version: Its number; ``None`` for the newest.
            names: Paths of tensors (``"model.conv1.weight"``); only what they need is read.
            map_location: The torch device of the tensors; the CPU by default.
            verify: Compare what is restored with its checksums.

        Returns:
            The state as it was saved; with ``names`` a dict of tensors.

        Raises:
            VersionUnavailable: The version or tensor is not there.
            BrokenChain: A reference is missing or is another version.
            CorruptCheckpoint: Something does not match its checksum; nothing is returned.
            StorageError: It cannot be read.
        """
        self.wait()
        if names is not None:
            return self._retried(
                lambda manifest: self._load_tensors(manifest, version, names, map_location, verify)
            )
        held = self.read(version, verify=False)
        words = restore_all(held, verify=verify, workers=self._place.workers)
        return state_of(held, words, map_location)

    def read(
        self,
        version: int | None = None,
        *,
        verify: bool = True,
        progress: Progress | None = None,
    ) -> HeldVersion:
        """A version as it is stored: codes, lattices, words; see :meth:`load`.

        The progress counts the payloads that are decoded.
        """
        self.wait()

        def read(manifest: Manifest) -> HeldVersion:
            number = _number(manifest, version)
            return self._place.read(manifest, number, verify=verify, progress=progress)

        return self._retried(read)

    def _load_tensors(
        self,
        manifest: Manifest,
        version: int | None,
        names: Collection[str],
        map_location: Any,
        verify: bool,
    ) -> dict[str, Any]:
        file = self._place.open(manifest.record(_number(manifest, version)))
        unknown = set(names) - {entry.path for entry in file.header.tensors}
        if unknown:
            raise VersionUnavailable("there is no such tensor", url=file.url, key=min(unknown))
        chain = chain_of(file, lambda number: self._place.open(manifest.record(number)))
        layers = plan_layers(chain, names)
        found = read_tensors(layers, verify=verify, workers=self._place.workers)
        return {name: tensor_of(found[name], found[name].restore(), map_location) for name in names}

    def _retried(self, work: Callable[[Manifest], T]) -> T:
        """The result of reading; once more if a writer replaced the files meanwhile."""
        manifest = require_manifest(self.url, self._place.options)
        for _ in range(_ATTEMPTS):
            try:
                return work(manifest)
            except StorageError:
                current = require_manifest(self.url, self._place.options)
                if current.generation == manifest.generation:
                    raise
                manifest = current
        return work(manifest)

    def open_file(self, version: int) -> VersionFile:
        """The file of a version, whose header tells coders and sizes of its tensors."""
        self.wait()
        return self._retried(lambda manifest: self._place.open(manifest.record(version)))

    def verify(
        self,
        versions: Collection[int] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[PCRError]:
        """Read every byte of versions and of what they need, and restore them.

        Args:
            versions: Their numbers; default: all.
            progress: Called with the versions that are checked, and those that are to be.

        Returns:
            What is wrong, in the order of the versions; empty if all is well.

        Raises:
            PCRError: The manifest cannot be read.
        """
        self.wait()
        manifest = require_manifest(self.url, self._place.options)
        numbers = [record.number for record in manifest.versions]
        wanted = numbers if versions is None else versions
        return rewrite.verify(self._place, manifest, wanted, progress)

    def export(
        self,
        version: int,
        url: str,
        *,
        progress: Progress | None = None,
    ) -> int:
        """Write a version's tensors as a safetensors file; returns its size in bytes.

        The progress counts the payloads that are decoded.

        Raises:
            MissingDependency: safetensors is not installed.
            VersionUnavailable: The version is not there.
        """
        return export_safetensors(self.read(version, progress=progress), url)


def _number(manifest: Manifest, version: int | None) -> int:
    if version is not None:
        return version
    if not manifest.versions:
        raise VersionUnavailable("the store has no versions")
    return manifest.versions[-1].number
