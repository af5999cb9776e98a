"""Algorithm 1 of Delta-DNN: the error bound with the best ratio within an accuracy budget.

The paper accepts ``|loss| < theta``, which would reject a network that improved; here the budget is
one-sided. The paper's score adds a ratio near 10 to a loss near 0.001, so the ratio decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errorbound import Bound, RelativeStd
from ..redaction import get_logger
from .codec import Precision, encode_tensor, store_leaf
from .tensors import tensor_from
from .typed_tree import TreeReader, flatten

log = get_logger(__name__)

Evaluate = Callable[[Any], float]
CANDIDATES = tuple(RelativeStd(percent / 100) for percent in (0.5, 1, 2, 3, 5, 7, 10))

# The tightest candidate.
SAFE = CANDIDATES[0]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The measurements of one candidate bound.

    Attributes:
        bound: The candidate error bound.
        ratio: Size of the network divided by the size of its delta.
        accuracy: What ``evaluate`` returned; NaN if it failed.
        loss: Accuracy of the exact network minus this accuracy; negative for a gain.
        accepted: Whether the loss is within the budget.
        error: Why ``evaluate`` failed; empty otherwise.
    """

    bound: Bound
    ratio: float
    accuracy: float
    loss: float
    accepted: bool
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen bound and the reason for it.

    Attributes:
        bound: The bound to use.
        is_default: Whether it is the safe default, used when no decision was possible.
        reason: A human-readable explanation.
        table: All candidates, in the order given.
    """

    bound: Bound
    is_default: bool
    reason: str
    table: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Budget:
    """The acceptable accuracy loss and the required certainty.

    Attributes:
        max_loss: The largest acceptable loss of accuracy: 0.002 is 0.2 percentage points.
        default: The bound used when no decision is possible (the paper's lambda).
        num_samples: Size of the test set, if ``evaluate`` returns a fraction of it. One sample must
            not exceed the budget (the reduced test sets of the paper's Figure 4).
        repeats: Number of evaluations of the exact network, whose spread must be within the budget.
    """

    max_loss: float = 0.002
    default: Bound = SAFE
    num_samples: int | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        if not self.max_loss >= 0 or self.repeats < 1:
            raise ValueError(f"expected a loss of at least 0 and a repeat, got {self}")


def choose_bound(
    target: Any,
    reference: Any,
    evaluate: Evaluate,
    *,
    candidates: Sequence[Bound] = CANDIDATES,
    budget: Budget = Budget(),
) -> Choice:
    """Find the bound for weights with the largest ratio whose accuracy loss is within a budget.

    Nothing is written; use the result as ``precision=Precision(weights=choice.bound)``.

    Args:
        target: The state of a network.
        reference: The state of an earlier version, to which the delta refers.
        evaluate: Returns the accuracy, 0 to 1, of a state like ``target``.
        candidates: The bounds to try.
        budget: The acceptable loss and the required certainty.
    """

    def compress(bound: Bound) -> tuple[float, Any]:
        return one_delta(target, reference, Precision(weights=bound))

    return choose(target, compress, evaluate, candidates, budget=budget)


def one_delta(target: Any, reference: Any, precision: Precision) -> tuple[float, Any]:
    """Return the compression ratio of the delta between two states, and the restored target."""
    before = {
        leaf.path: store_leaf(leaf, precision.bound_of(leaf), None)[0]
        for leaf in flatten(reference).leaves
    }
    flat = flatten(target)
    stored = raw = 0
    tensors = []
    for leaf in flat.leaves:
        known = before.get(leaf.path)
        tensor, words = store_leaf(leaf, precision.bound_of(leaf), known)
        stored += encode_tensor(tensor, known)[0].num_bytes
        raw += words.nbytes
        tensors.append(tensor_from(words, tensor.spec))
    return raw / max(stored, 1), TreeReader(flat.tree, tensors.__getitem__).read()


def choose(
    exact: Any,
    compress: Callable[[Bound], tuple[float, Any]],
    evaluate: Evaluate,
    candidates: Sequence[Bound] = CANDIDATES,
    *,
    budget: Budget = Budget(),
) -> Choice:
    """Evaluate all candidates with any coder and choose one; see :func:`choose_bound`.

    Args:
        exact: The exact network.
        compress: Returns the ratio and the restored network for a bound.
        evaluate: Returns the accuracy of a network, 0 to 1.
        candidates: The bounds to try.
        budget: The acceptable loss and the required certainty.
    """
    accuracy, problem = _reference(exact, evaluate, budget)
    if problem:
        return _default(budget, problem, ())
    table = []
    for bound in candidates:
        ratio, restored = compress(bound)
        found, error = _evaluated(restored, evaluate)
        loss = accuracy - found
        table.append(Candidate(bound, ratio, found, loss, loss <= budget.max_loss, error))
    return _pick(tuple(table), budget)


def _pick(table: tuple[Candidate, ...], budget: Budget) -> Choice:
    accepted = [row for row in table if row.accepted]
    if not accepted:
        failed = next((row.error for row in table if row.error), "")
        reason = failed or f"every candidate loses more than {budget.max_loss}"
        return _default(budget, reason, table)
    best = max(accepted, key=lambda row: row.ratio)
    reason = f"{best.ratio:.1f} times smaller at a loss of {best.loss:.4f}"
    return Choice(best.bound, is_default=False, reason=reason, table=table)


def _reference(
    exact: Any,
    evaluate: Evaluate,
    budget: Budget,
) -> tuple[float, str]:
    """Return the exact network's accuracy, and why it cannot be used (empty if it can)."""
    if budget.num_samples is not None and budget.max_loss * budget.num_samples < 1:
        return math.nan, (
            f"{budget.num_samples} samples cannot tell a loss of {budget.max_loss}: "
            "one sample is more"
        )
    found = []
    for _ in range(budget.repeats):
        accuracy, error = _evaluated(exact, evaluate)
        if error:
            return math.nan, error
        found.append(accuracy)
    spread = max(found) - min(found)
    if spread > budget.max_loss:
        return math.nan, f"the same network's accuracy varies by {spread:.4f}: too noisy"
    return sum(found) / len(found), ""


def _evaluated(network: Any, evaluate: Evaluate) -> tuple[float, str]:
    try:
        accuracy = float(evaluate(network))
    except Exception as error:
        log.exception("an evaluation failed")
        return math.nan, f"evaluate failed: {type(error).__name__}: {error}"
    if not math.isfinite(accuracy):
        return math.nan, f"evaluate returned {accuracy}"
    return accuracy, ""


def _default(
    budget: Budget,
    reason: str,
    table: tuple[Candidate, ...],
) -> Choice:
    log.warning("the bound stays at %s: %s", budget.default, reason)
    return Choice(budget.default, is_default=True, reason=reason, table=table)
