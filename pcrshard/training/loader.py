"""A ``DataLoader`` that knows how many batches it has given."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from .epoch_progress import State

if TYPE_CHECKING:
    from .dataset import PCRDataset


def refuse_batching(caller: FrameType) -> None:
    """Raise ``TypeError`` where a ``DataLoader`` is about to make batches of batches.

    It tells a dataset nothing; what iterates the dataset, in its process or in a worker, knows.

    Args:
        caller: The frame that asks the dataset for its iterator.
    """
    if getattr(caller.f_locals.get("self"), "auto_collation", False):
        raise TypeError(
            "PCRDataset gives batches already: expected DataLoader(dataset, batch_size=None), or "
            "dataset.loader(num_workers)"
        )


class PCRLoader(DataLoader[Any]):
    """A ``DataLoader`` that counts the batches it has given; from :meth:`PCRDataset.loader`."""

    dataset: PCRDataset

    def __len__(self) -> int:
        # DataLoader's own remembers the length of one epoch, and warns when the next one has more.
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own class
        return self.dataset.hand_out(super().__iter__)

    def state_dict(self) -> State:
        """Where the training loop is: after the last batch that it got."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue after that batch; see :meth:`PCRDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)
