"""Choose the scan by gradients: section 4.3 of the VLDB paper."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel
from ..training.dataset import PCRDataset

Loss = Callable[[nn.Module, Any], Tensor]
# Quantiles 0.975 of Student's t distribution for 1, 2, ... degrees of freedom.
_T975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
)
_MIN_STEP = 1.1
_TUNING_EPOCHS = 1 << 31


class Similarity(NamedTuple):
    """Cosine between the gradients at a scan and at full fidelity: mean over trials, and its 95 % confidence interval."""

    scan: Scan
    mean: float
    lower: float
    upper: float


class TunerReport(NamedTuple):
    """What a tuning found, and what it cost."""

    epoch: int
    scan: Scan
    similarities: tuple[Similarity, ...]
    images: int
    seconds: float


def candidate_scans(prefix_bytes: Sequence[int]) -> list[Scan]:
    """Scans that are worth a measurement: each at least a tenth dearer than the one before; ``"full"`` is the reference.

    Args:
        prefix_bytes: Of scans 1..N and of ``"full"``.

    >>> candidate_scans([100, 220, 230, 600, 980, 1000])
    [1, 2, 4]
    """
    *sizes, full = prefix_bytes
    chosen: list[Scan] = []
    last = 0.0
    for scan, size in enumerate(sizes, 1):
        if size >= last * _MIN_STEP and size * _MIN_STEP <= full:
            chosen.append(scan)
            last = size
    return chosen


def confidence(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of some cosines, and the bounds of its 95 % confidence interval by Student's t; one trial has no interval.

    Where one is not a number, because the model has diverged, nothing is known: 0, between -1 and 1.

    >>> confidence([0.9, 0.9, 0.9])
    (0.9, 0.9, 0.9)
    """
    if not all(map(math.isfinite, values)):
        return 0.0, -1.0, 1.0
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    quantile = _T975[len(values) - 2] if len(values) - 2 < len(_T975) else 1.96
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def choose(similarities: Sequence[Similarity], threshold: float) -> Scan:
    """The lowest scan whose lower bound passes; ``"full"`` if none does."""
    return next((row.scan for row in similarities if row.lower >= threshold), FULL)


class ScanTuner:
    """Sets a level to the lowest scan whose gradient points where that of full fidelity does.

    The parameters stay as they are, and so do BatchNorm's statistics, the gradients in ``.grad``, and the state of the random numbers: each
    scan sees the same images, the same crops and the same dropout. With ``torch.distributed`` each rank takes a share of the images,
    and gradients are averaged before the cosine, so that all ranks choose the same scan.

    Args:
        dataset: That is trained on; images are read from it at full fidelity.
        loss: Called with the model and a batch of the dataset; gives the mean loss. Move the batch to the device in it.
        level: What the readers follow.
        candidates: Scans to try, ascending; by default :func:`candidate_scans`.
        threshold: Least cosine (0.8 in the paper).
        images: Per trial, over all ranks.
        trials: Whose spread makes the confidence interval.
        first: Epochs in which models are too unstable to tune.
        every: Epochs between tunings.
    """

    def __init__(
        self,
        dataset: PCRDataset,
        loss: Loss,
        level: ScanLevel,
        *,
        candidates: Sequence[Scan] | None = None,
        threshold: float = 0.8,
        images: int = 2560,
        trials: int = 3,
        first: int = 5,
        every: int = 20,
    ) -> None:
        if images < 1 or trials < 1 or every < 1:
            raise ValueError(
                f"expected at least one image, trial and epoch, got {images}, {trials}, {every}"
            )
        entries = dataset.shards.entries
        sizes = [
            sum(entry.prefix_stops[i] for entry in entries)
            for i in range(len(entries[0].prefix_stops))
        ]
        self.dataset, self.loss, self.level = dataset, loss, level
        self.candidates = list(candidates or candidate_scans(sizes))
        self.threshold, self.images, self.trials, self.first, self.every = (
            threshold,
            images,
            trials,
            first,
            every,
        )
        self.reports: list[TunerReport] = []

    def due(self, epoch: int) -> bool:
        """Whether an epoch begins with a tuning."""
        return epoch >= self.first and (epoch - self.first) % self.every == 0

    def step(self, model: nn.Module, epoch: int) -> TunerReport | None:
        """Tune if it is time; call it on every rank before the epoch is iterated.

        Returns:
            What was found and set, or ``None`` if it was not time.
        """
        if not self.due(epoch):
            return None
        begun = time.monotonic()
        similarities = self.measure(model, epoch)
        scan = choose(similarities, self.threshold)
        images = self.images * self.trials * (len(similarities) + 1)
        report = TunerReport(epoch, scan, tuple(similarities), images, time.monotonic() - begun)
        self.reports.append(report)
        self.level.value = scan
        return report

    def measure(self, model: nn.Module, epoch: int = 0) -> list[Similarity]:
        """The cosine of each candidate; the level stays as it is."""
        model = (
            getattr(model, "module", model)
            if type(model).__name__.endswith("DataParallel")
            else model
        )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        cosines: dict[Scan, list[float]] = {scan: [] for scan in self.candidates}
        with _untouched(model):
            for trial in range(self.trials):
                gradients = self._gradients(model, parameters, epoch, trial)
                reference = gradients.pop(FULL)
                for scan, gradient in gradients.items():
                    cosines[scan].append(
                        float(
                            nn.functional.cosine_similarity(gradient, reference, dim=0, eps=1e-30)
                        )
                    )
        return [
            Similarity(scan, *(max(-1.0, min(1.0, v)) for v in confidence(values)))
            for scan, values in cosines.items()
        ]

    def _gradients(
        self, model: nn.Module, parameters: list[nn.Parameter], epoch: int, trial: int
    ) -> dict[Scan, Tensor]:
        """The mean gradient at each candidate and at full fidelity, as one vector each."""
        sums: dict[Scan, Tensor] = {}
        scans = [*self.candidates, FULL]
        crops = (
            _TUNING_EPOCHS + epoch * self.trials + trial
        )  # other crops than any epoch of training has
        for number, views in enumerate(
            self.dataset.views(self._batches(epoch, trial), scans, epoch=crops)
        ):
            for scan, batch in views.items():
                torch.manual_seed(
                    number
                )  # the same dropout for each scan; _untouched puts the state back
                gradients = torch.autograd.grad(
                    self.loss(model, batch), parameters, allow_unused=True
                )
                parts = [
                    torch.zeros_like(p) if g is None else g
                    for g, p in zip(gradients, parameters, strict=True)
                ]
                flat = torch.cat([part.reshape(-1).float() for part in parts])
                sums[scan] = sums[scan].add_(flat) if scan in sums else flat
        if dist.is_available() and dist.is_initialized():
            for flat in sums.values():
                dist.all_reduce(flat)
        return sums

    def _batches(self, epoch: int, trial: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        """This rank's batches of a trial's images, taken from as few shards as hold them: encoding has shuffled the samples."""
        shards, (rank, world), size = (
            self.dataset.shards,
            self.dataset.rank,
            self.dataset.batch_size,
        )
        rng = random.Random(f"{self.dataset.options.seed} {epoch} {trial}")
        order = list(range(len(shards.urls)))
        rng.shuffle(order)
        ids: list[int] = []
        for shard in order:
            if len(ids) >= self.images:
                break
            ids += range(int(shards.starts[shard]), int(shards.starts[shard + 1]))
        count = max(1, min(len(ids), self.images) // (size * world))
        chosen = (
            np.array(ids[: count * size * world], np.int64).reshape(-1, world, size)
            if len(ids) >= size * world
            else np.array(ids)[None, None]
        )
        return list(chosen[:, min(rank, chosen.shape[1] - 1)])

    def state_dict(self) -> dict[str, Any]:
        """The level and what was found, in JSON's terms."""
        return {
            "scan": self.level.value,
            "reports": [
                [*r[:2], [list(row) for row in r.similarities], *r[3:]] for r in self.reports
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.level.value = state["scan"]
        self.reports = [
            TunerReport(epoch, scan, tuple(Similarity(*row) for row in rows), images, seconds)
            for epoch, scan, rows, images, seconds in state["reports"]
        ]


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put buffers (BatchNorm's statistics), modes and random numbers back as they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted(
        {
            p.device.index
            for p in model.parameters()
            if p.device.type == "cuda" and p.device.index is not None
        }
    )
    python, numbers = random.getstate(), copy.deepcopy(np.random.get_state())  # noqa: NPY002  # a model may draw from it
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            model.train()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for module, training in modes:
            module.training = training
