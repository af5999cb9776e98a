"""Choose the scan by gradient similarity (section 4.3 of the VLDB paper)."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import Positive, check_fields
from ..format.dataset_index import prefix_totals
from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel
from ..redaction import get_logger
from ..training.loader import PCRLoader
from ..training.sequence import Dataset, Rules, one_pass
from .intervals import confidence
from .schedule import ScanPolicy

log = get_logger(__name__)
Loss = Callable[[nn.Module, Any], Tensor]
State = dict[str, Any]
_MIN_STEP = 1.1
# Epoch numbers beyond any training epoch, so that tuning draws different crops.
_TUNING_EPOCHS = 1 << 31


class Similarity(NamedTuple):
    """Cosine between the gradients at a scan and at full fidelity.

    Attributes:
        scan: The scan.
        mean: Mean over the trials.
        lower: Lower bound of the mean's 95 % confidence interval.
        upper: Upper bound of that interval.
    """

    scan: Scan
    mean: float
    lower: float
    upper: float


class TunerReport(NamedTuple):
    """Result and cost of one tuning.

    Attributes:
        epoch: Epoch before which tuning ran.
        scan: The chosen scan.
        similarities: One for each candidate.
        images: Images decoded by all ranks.
        seconds: Wall time.
    """

    epoch: int
    scan: Scan
    similarities: tuple[Similarity, ...]
    images: int
    seconds: float


def candidate_scans(prefix_bytes: Sequence[int]) -> list[int]:
    """Return the scans worth measuring, each with at least 10 % more bytes than the last.

    Args:
        prefix_bytes: Bytes at scans 1..N and at ``"full"``, which is the reference; for a staged
            copy, at the scans that it holds.

    >>> candidate_scans([100, 220, 230, 600, 980, 1000])
    [1, 2, 4]
    """
    *sizes, full = prefix_bytes
    chosen: list[int] = []
    last = 0.0
    for scan, size in enumerate(sizes, 1):
        if size >= last * _MIN_STEP and size * _MIN_STEP <= full:
            chosen.append(scan)
            last = size
    return chosen


def choose(
    similarities: Sequence[Similarity],
    threshold: float,
    top: Scan = FULL,
) -> Scan:
    """Return the first scan whose lower bound passes, or ``top`` if none does."""
    return next((found.scan for found in similarities if found.lower >= threshold), top)


@dataclass(eq=False, repr=False)
class ScanTuner(ScanPolicy):
    """A policy that picks the lowest scan whose gradient is close to that of full fidelity.

    A tuning reads ``images * trials * (candidates + 1)`` images; a warning is logged if that is
    more than an epoch. It leaves the parameters, BatchNorm statistics, ``.grad`` and random states
    unchanged. Each scan sees the same images, crops and dropout. With ``torch.distributed``, the
    images are divided among the ranks and gradients are averaged before the cosine, so all ranks
    choose the same scan.

    For a staged copy, the highest scan that it holds replaces full fidelity, unless the loader
    reads the original dataset: the level then still follows the copy.

    Attributes:
        loader: The training loader, or one like it over the original dataset of a staged copy;
            images of its dataset are read at full fidelity.
        loss: Function of the model and a batch of the loader that returns the mean loss. It must
            move the batch to the device.
        level: The level that the readers follow.
        candidates: Scans to try, ascending; by default :func:`candidate_scans`.
        threshold: Minimum cosine (0.8 in the paper).
        images: Images per trial, over all ranks.
        trials: Number of trials, whose spread gives the confidence interval.
        first: Number of initial epochs in which the model is too unstable to tune.
        every: Epochs between tunings.
        reports: Results of the tunings so far.

    Raises:
        TypeError: An argument is of another type, such as a ``DataLoader``.
        ValueError: ``images``, ``trials`` or ``every`` is below 1.
        ScanUnavailable: A candidate is above the dataset's or the level's highest scan.
    """

    loader: PCRLoader
    loss: Loss
    level: ScanLevel
    _: KW_ONLY
    candidates: Sequence[Scan] = ()
    threshold: float = 0.8
    images: Positive = 2560
    trials: Positive = 3
    first: int = 5
    every: Positive = 20
    reports: list[TunerReport] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self)
        shards = self.loader.dataset.shards
        totals = prefix_totals(shards.entries)
        held = self.loader.dataset.max_scan
        found = candidate_scans(totals if held == FULL else totals[:held])
        highest = self.level.highest
        usable = [scan for scan in found if highest == FULL or scan <= highest]
        self.candidates = list(self.candidates) or usable
        for scan in self.candidates:
            shards.check_scan(scan)
            self.level.check(scan)
        if self._images_read > len(self.loader.dataset):
            log.warning(
                "each tuning reads %d images, more than the epoch of %d: pass a smaller images= or "
                "trials=, or choose a scan before training with `pcrshard fidelity`",
                self._images_read,
                len(self.loader.dataset),
            )

    @property
    def _images_read(self) -> int:
        """Images that all ranks decode in a tuning."""
        dataset = self.loader.dataset
        scans = {*self.candidates, dataset.max_scan}
        return min(self.images, len(dataset)) * self.trials * len(scans)

    def step(self, model: nn.Module, epoch: int) -> TunerReport | None:
        """Tune if due; call it on every rank before iterating over the epoch.

        Args:
            model: The model to train, which may be wrapped in ``DistributedDataParallel``; its
                parameters, buffers and gradients do not change.
            epoch: Number of the epoch, from 0.

        Returns:
            The result, already applied to the level, or ``None`` if no tuning was due.
        """
        if epoch < self.first or (epoch - self.first) % self.every:
            return None
        begun = time.monotonic()
        similarities = tuple(self.measure(model, epoch))
        scan = choose(similarities, self.threshold, self.level.highest)
        seconds = time.monotonic() - begun
        report = TunerReport(epoch, scan, similarities, self._images_read, seconds)
        self.reports.append(report)
        self.level.value = scan
        return report

    def measure(self, model: nn.Module, epoch: int = 0) -> list[Similarity]:
        """Measure the cosine of each candidate without changing the level."""
        if type(model).__name__.endswith("DataParallel"):
            model = model.get_submodule("module")
        first = _TUNING_EPOCHS + epoch * self.trials
        with _untouched(model):
            trials = [self._cosines(model, first + trial) for trial in range(self.trials)]
        return [
            Similarity(scan, *confidence(cosines))
            for scan, *cosines in zip(self.candidates, *trials, strict=True)
        ]

    def _cosines(self, model: nn.Module, epoch: int) -> list[float]:
        """Return the cosine of each candidate's mean gradient with that of the reference.

        The images are the first of an epoch that no training reads, so that they and their crops
        differ from trial to trial.
        """
        loader = self.loader
        rules = Rules(loader.rules.seed)
        order = one_pass(Dataset(loader.dataset.shard_sizes, rules), epoch)
        rank, world = loader.rank
        ids = order.ids(np.arange(min(self.images, len(order))))
        # Every rank has equally many batches; the first images fill those of the last ranks.
        own = np.resize(ids, -(-len(ids) // world) * world)[rank::world]
        size = loader.batch_size
        if loader.buckets is not None and loader.buckets.pixels is not None:
            largest = int(loader.dataset.sizes.prod(axis=1).max())
            size = min(size, loader.buckets.pixels // largest)
        batches = np.array_split(own, -(-len(own) // size))
        top = loader.dataset.max_scan
        scans = list(dict.fromkeys([*self.candidates, top]))
        sums: dict[Scan, Any] = dict.fromkeys(scans, 0)
        for number, batch_at in enumerate(loader.at_scans(batches, scans, epoch=epoch)):
            for scan, batch in batch_at.items():
                # Use the same dropout for each scan; _untouched restores the random state.
                torch.manual_seed(number)
                sums[scan] += _gradient(self.loss(model, batch), model)
        if dist.is_available() and dist.is_initialized():
            for gradient in sums.values():
                dist.all_reduce(gradient)
        similarity = functools.partial(nn.functional.cosine_similarity, dim=0, eps=1e-30)
        return [float(similarity(sums[scan], sums[top])) for scan in self.candidates]

    def state_dict(self) -> State:
        """Return the level and the results as JSON-serializable values."""
        return super().state_dict() | {"reports": msgspec.to_builtins(self.reports)}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`; on a staged copy at most at its highest scan."""
        super().load_state_dict(state)
        self.reports = msgspec.convert(state["reports"], list[TunerReport])


def _gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """Return a loss's gradient as one float32 vector, zero for unused parameters."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"expected loss to return a tensor of one value, got {loss!r}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.reshape(-1).float() for gradient in gradients])


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers (BatchNorm statistics), modes and random states on exit."""
    devices = sorted({p.get_device() for p in model.parameters() if p.is_cuda})
    with ExitStack() as stack:
        # A model may also draw from these global generators.
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002  # above
        for buffer in model.buffers():
            stack.callback(buffer.detach().copy_, buffer.detach().clone())
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        with torch.random.fork_rng(devices), torch.enable_grad():
            model.train()
            yield
