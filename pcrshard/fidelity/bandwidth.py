"""Choose the scan by how long the training loop waits for data.

This is the future work of the papers (section 7 of the VLDB paper).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ..format.dataset_index import ShardEntry, prefix_totals
from ..format.scan import Scan
from ..reading.scan_level import ScanLevel, current_scan
from .agreement import Agreement
from .bandwidth_search import Search, SearchRules, Step

Batch = TypeVar("Batch")


class BandwidthTuner:
    """Takes the highest scan that keeps the accelerator fed.

    A step that waits has found nothing read ahead. Between two such steps data came as fast as they
    can, whatever is buffered where: their bytes over that time are the bandwidth. When waits take
    more than ``max_wait``, the tuner at once takes the scan whose bytes the loop can use at its own
    speed at that bandwidth (X = W / E[s], Theorem 4.1).

    While the loop does not wait, the bandwidth is at least what is used: after ``patience`` windows
    the next scan up is tried. Each try that ends in waiting at the same bandwidth doubles the time
    until the next one, up to 32 windows, or more where tries are so expensive that they would take
    half of ``max_wait``. After a fall of the bandwidth, and when a higher scan holds, the time is
    ``patience`` again.

    Waits that are as long at the lowest scan as they were above are not for bytes but for the
    processor: the tuner goes back up, and such waits are excused.

    With ``torch.distributed`` all ranks take the lowest scan that any of them asks for: make the
    tuner on every rank, after ``init_process_group`` and after the dataset. Ranks never wait for
    each other in it, so they may have different numbers of steps; they follow within a few steps.

    Args:
        level: The level that the readers follow. Of a dataset that is a staged copy no scan above
            those that it holds is taken.
        bytes_per_sample: Mean bytes of a sample at scans 1..N and then at ``"full"``, as
            :func:`bytes_per_sample` gives them.
        floor: Lowest scan that may be taken, which is what the task needs, by the user or by
            :class:`ScanTuner`. It may be a level itself.
        max_wait: Share of the time that may be spent waiting.
        window: Steps between decisions.
        patience: Windows without waiting until a higher scan is tried.
        ahead: Samples that are read ahead, and so come at the old scan after a change:
            (prefetch + 1) shards. By default those of a window.

    Attributes:
        search: What the tuner knows now; its ``rules`` are the numbers above.

    Raises:
        ValueError: The numbers make no sense.
        ScanUnavailable: The floor is above the scans that a staged copy holds.
    """

    def __init__(
        self,
        level: ScanLevel,
        bytes_per_sample: Sequence[float],
        *,
        floor: Scan | ScanLevel = 1,
        max_wait: float = 0.05,
        window: int = 10,
        patience: int = 3,
        ahead: int | None = None,
    ) -> None:
        level.check(current_scan(floor))
        self.level = level
        self.sizes = tuple(bytes_per_sample)
        self.floor = floor
        rules = SearchRules(self.sizes, max_wait, window, patience, ahead)
        self.search = Search(rules, hold=patience)
        self._agreement = Agreement()
        self._wish = rules.last
        self._taken: Scan | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, as last measured; ``None`` while the loop has never waited."""
        return self.search.bandwidth

    @property
    def excused(self) -> float:
        """Share of the time that is waited whatever the scan."""
        return self.search.excused

    def watch(self, batches: Iterable[Batch], *, samples: int) -> Iterator[Batch]:
        """Iterate batches and tune meanwhile.

        The wait for the first batch is not counted, because nothing is read ahead across epochs.

        Args:
            batches: The loader.
            samples: Number of samples in a batch.
        """
        begun = time.monotonic()
        for number, batch in enumerate(batches):
            came = time.monotonic()
            yield batch
            waited = came - begun if number else 0.0
            self.step(waited, time.monotonic() - came, samples)
            begun = time.monotonic()

    def step(
        self,
        waited: float,
        used: float,
        samples: int,
    ) -> Scan:
        """Note a step of the training loop, and decide when it is time.

        Args:
            waited: Seconds for which the loop waited for the batch.
            used: Seconds that it spent on the batch.
            samples: Number of samples in the batch.

        Returns:
            The scan that the level has now: the lowest that a rank asks for.
        """
        if self.search.rules.top != self.level.highest:
            rules = self.search.rules.below(self.level.highest)
            self.search = Search(rules, hold=rules.patience)
        given = self.level.value
        floor = current_scan(self.floor)
        self.search = self.search.advance(Step(waited, used, samples, given, floor))
        self._taken = self._agree(given, floor)
        self.level.value = self._taken
        return self._taken

    def _agree(self, given: Scan, floor: Scan) -> Scan:
        """The lowest scan that a rank asks for, not below the floor."""
        rules = self.search.rules
        wish = self.search.scan
        # What this rank asks for holds until it asks for something else, or the level was set.
        if wish != given or given != self._taken:
            self._wish = rules.position(wish)
        agreed = self._agreement.lowest(self._wish)
        return rules.scan(max(agreed, rules.position(floor)))


def bytes_per_sample(entries: Sequence[ShardEntry]) -> list[float]:
    """Mean bytes of a sample at scans 1..N and at ``"full"``.

    Args:
        entries: The ``shards`` of a dataset index.
    """
    num_samples = sum(entry.num_samples for entry in entries)
    return [total / num_samples for total in prefix_totals(entries)]
