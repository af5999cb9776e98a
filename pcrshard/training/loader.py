"""A ``DataLoader`` that knows how many batches it has given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from .dataset import PCRDataset


class PCRLoader(DataLoader[Any]):
    """A ``DataLoader`` that knows how many batches it has given; from :meth:`PCRDataset.loader`."""

    dataset: PCRDataset

    def __len__(self) -> int:
        # Not DataLoader's, which remembers the length of this epoch, and warns when the next one has more.
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator class
        dataset = self.dataset
        dataset._check_rank()  # here, too: a spawned worker does not know its parent's process group
        # Who stops after len() batches, as Lightning does, never comes behind the loop.
        if dataset._all_given:
            dataset.set_epoch(dataset.epoch + 1)
        dataset._done, dataset._ended, dataset._loaded, epoch, count = (
            0,
            False,
            False,
            dataset.epoch,
            len(dataset),
        )
        for given, batch in enumerate(super().__iter__(), 1):
            dataset._done, dataset._all_given = given, given == count
            yield batch
        dataset.set_epoch(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop is: behind the batch that it had last."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind that batch; see :meth:`PCRDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)
