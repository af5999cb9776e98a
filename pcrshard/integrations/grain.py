"""Samples for Grain: ``grain.MapDataset.source(PCRSource("shards", scan=2))``."""

from __future__ import annotations

from typing import Any

from ..training.dataset import PCRDataset


class PCRSource(PCRDataset):
    """A :class:`PCRDataset` as Grain takes one: samples are dicts also with ``fields``.

    Grain chooses the order, and asks for one sample at a time from many threads. An order that
    jumps between more shards than ``held_bytes`` holds reads a prefix for each sample: shuffle by
    windows of some shards then.
    """

    def __getitem__(self, sample: Any) -> Any:
        found = super().__getitem__(sample)
        return dict(zip(self.fields, found, strict=True)) if self.fields else found

    def __repr__(self) -> str:
        # Grain compares it when a state is loaded: the same for the same samples, at any scan.
        return f"<PCRSource {self.shards}, {self.fingerprint}>"
