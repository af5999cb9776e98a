"""Samples that cannot be read or decoded: what to do with them, and which ones they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from ..errors import PCRError
from ..redaction import get_logger, redact_url

log = get_logger(__name__)
OnError = Annotated[
    Literal["raise", "replace"] | Callable[[PCRError], bool],
    "'raise', 'replace' or a function of the error that returns whether to replace the sample",
]
# A sample or shard, and its error; one for each sample that was replaced.
Replaced = tuple[str, str]
# More of an epoch than this has other causes than bad samples.
_MAX_FRACTION = 0.25


class BadSamples:
    """Decides about the bad samples of an epoch, and records those that are replaced.

    Args:
        on_error: See :class:`PCRDataset`.
        num_samples: Samples of the epoch.
    """

    def __init__(self, on_error: OnError, num_samples: int) -> None:
        self._on_error = on_error
        self._left = max(1, int(num_samples * _MAX_FRACTION))
        self._found: list[Replaced] = []

    def __call__(self, error: PCRError) -> bool:
        """Return whether to replace a sample that has this error.

        Raises:
            TypeError: The function of the user returns neither True nor False.
        """
        choice = self._on_error
        if choice == "raise":
            return False
        answer = True if choice == "replace" else choice(error)
        if not isinstance(answer, bool):
            raise TypeError(
                f"expected on_error to return True to replace the sample, or False, got {answer!r}"
            )
        if answer:
            self._left -= 1
            if self._left < 0:
                error.add_note(
                    f"more than {_MAX_FRACTION:.0%} of the samples of an epoch had to be replaced"
                )
                return False
            self._found.append((error.key or redact_url(error.url or ""), str(error)))
        return answer

    def take(self) -> list[Replaced]:
        """Return the samples replaced since the last call."""
        found, self._found = self._found, []
        return found


def report(found: Iterable[Replaced], known: dict[str, str]) -> None:
    """Log the samples that are not known yet, and add them."""
    for name, message in found:
        if name not in known:
            known[name] = message
            log.warning("replaced a sample: %s", message)
