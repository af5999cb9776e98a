"""Algorithm 1 of Delta-DNN: the error bound with the best ratio within an accuracy budget.

The paper accepts ``|loss| < theta``, which would reject a network that improved; here the budget is
one-sided. The paper's score adds a ratio near 10 to a loss near 0.001, so the ratio decides.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from .. import storage
from ..errorbound import Bound, RelativeStd
from ..redaction import get_logger
from .codec import Precision
from .store import DeltaStore

log = get_logger(__name__)

Evaluate = Callable[[Any], float]
CANDIDATES = tuple(RelativeStd(percent / 100) for percent in (0.5, 1, 2, 3, 5, 7, 10))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The measurements of one candidate bound.

    Attributes:
        bound: The candidate error bound.
        ratio: Size of the network divided by the size of its delta.
        accuracy: What ``evaluate`` returned.
        loss: Accuracy of the exact network minus this accuracy; negative for a gain.
        accepted: Whether the loss is within the budget.
    """

    bound: Bound
    ratio: float
    accuracy: float
    loss: float
    accepted: bool


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen bound and the measurements behind it.

    Attributes:
        bound: The bound to use.
        is_default: Whether it is the first candidate because none was accepted.
        table: All candidates, in the order given.
    """

    bound: Bound
    is_default: bool
    table: tuple[Candidate, ...]


def choose_bound(
    target: Any,
    reference: Any,
    evaluate: Evaluate,
    *,
    candidates: Sequence[Bound] = CANDIDATES,
    max_loss: float = 0.002,
) -> Choice:
    """Find the bound for weights with the largest ratio whose accuracy loss is within a budget.

    Nothing is written; use the result as ``precision=Precision(weights=choice.bound)``.

    Args:
        target: The state of a network.
        reference: The state of an earlier version, to which the delta refers.
        evaluate: Returns the accuracy, 0 to 1, of a state like ``target``.
        candidates: The bounds to try, finest first; the first is the choice if none is accepted.
        max_loss: The largest acceptable loss of accuracy: 0.002 is 0.2 percentage points. It must
            be at least one sample of the test set.

    Raises:
        ValueError: The accuracy of the exact network is not finite, or there are no candidates.
    """

    def compress(bound: Bound) -> tuple[float, Any]:
        return one_delta(target, reference, Precision(weights=bound, lossy=("*",)))

    return choose(target, compress, evaluate, candidates, max_loss)


def one_delta(target: Any, reference: Any, precision: Precision) -> tuple[float, Any]:
    """Return the compression ratio of the delta between two states, and the restored target."""
    url = f"memory://choose-bound-{secrets.token_hex(8)}"
    with DeltaStore(url, precision) as store:
        store.save(reference)
        store.save(target)
        record = store.versions()[-1]
        restored = store.load()
    storage.remove(url)
    return record.raw_bytes / (record.file_bytes - record.header_bytes), restored


def choose(
    exact: Any,
    compress: Callable[[Bound], tuple[float, Any]],
    evaluate: Evaluate,
    candidates: Sequence[Bound],
    max_loss: float,
) -> Choice:
    """Evaluate all candidates with any coder and choose one; see :func:`choose_bound`.

    Args:
        exact: The exact network.
        compress: Returns the ratio and the restored network for a bound.
        evaluate: Returns the accuracy of a network, 0 to 1.
        candidates: The bounds to try, finest first.
        max_loss: The largest acceptable loss of accuracy.
    """
    if not candidates:
        raise ValueError("expected at least one candidate")
    accuracy = float(evaluate(exact))
    if not math.isfinite(accuracy):
        raise ValueError(f"expected an accuracy of the exact network, got {accuracy}")
    table = []
    for bound in candidates:
        ratio, restored = compress(bound)
        found = float(evaluate(restored))
        loss = accuracy - found
        table.append(Candidate(bound, ratio, found, loss, loss <= max_loss))
    accepted = [row for row in table if row.accepted]
    if not accepted:
        log.warning("every candidate loses more than %s: keeping %s", max_loss, candidates[0])
    best = max(accepted or table[:1], key=lambda row: row.ratio)
    return Choice(best.bound, not accepted, tuple(table))
