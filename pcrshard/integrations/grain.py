"""Samples for Grain: ``grain.MapDataset.source(PCRSource("shards", scan=2))``."""

from __future__ import annotations

from typing import Any

from ..training.dataset import PCRDataset


class PCRSource(PCRDataset):
    """A :class:`PCRDataset` as a Grain source: samples are dicts even with ``fields``.

    Grain chooses the order, and requests one sample at a time from many threads. An order that
    jumps between more shards than fit in ``held_bytes`` reads a prefix for each sample; to avoid
    this, shuffle within windows of a few shards.
    """

    def __getitem__(self, sample: Any) -> Any:
        found = super().__getitem__(sample)
        return dict(zip(self.fields, found, strict=True)) if self.fields else found

    def __repr__(self) -> str:
        # Grain compares the repr when loading a state: equal for equal samples, at any scan.
        return f"<PCRSource {self.shards}, {self.fingerprint}>"
