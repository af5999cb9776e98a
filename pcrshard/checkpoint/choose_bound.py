"""Algorithm 1 of Delta-DNN: the bound with the largest ratio within a loss of accuracy.

The paper accepts ``|loss| < theta``, which would refuse a network that got better; here the budget
is one-sided. Its score adds a ratio of about 10 to a loss of about 0.001, so it is the ratio.
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

# The finest candidate.
SAFE = CANDIDATES[0]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes:
        bound: The candidate.
        ratio: Bytes of the network by bytes of its delta.
        accuracy: What ``evaluate`` returned; NaN if it failed.
        loss: Accuracy of the network as it is, less this one's; negative for a gain.
        accepted: Whether the loss is within the budget.
        error: Why there is no accuracy.
    """

    bound: Bound
    ratio: float
    accuracy: float
    loss: float
    accepted: bool
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen bound, and why.

    Attributes:
        bound: The one to use.
        is_default: Whether it is the safe default because nothing could be decided.
        reason: In words.
        table: All candidates, in the order that they were given.
    """

    bound: Bound
    is_default: bool
    reason: str
    table: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be lost, and how sure one has to be.

    Attributes:
        max_loss: The accuracy that may be lost: 0.002 is 0.2 points.
        default: The bound where nothing can be decided (the paper's lambda).
        num_samples: Size of the test set, if ``evaluate`` returns a fraction of it: a step of one
            sample must be within the budget (the reduced test sets of the paper's Figure 4).
        repeats: How often the network as it is is evaluated: its spread must be within the budget.
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
    """Find the bound of weights with the largest ratio whose loss of accuracy is within a budget.

    Nothing is written; use the result as ``precision=Precision(weights=choice.bound)``.

    Args:
        target: The state of a network.
        reference: The state of an earlier version, as the delta's reference.
        evaluate: Returns the accuracy, 0 to 1, of a state like ``target``.
        candidates: The bounds to try.
        budget: What may be lost, and how sure the answer must be.
    """

    def compress(bound: Bound) -> tuple[float, Any]:
        return one_delta(target, reference, Precision(weights=bound))

    return choose(target, compress, evaluate, candidates, budget=budget)


def one_delta(target: Any, reference: Any, precision: Precision) -> tuple[float, Any]:
    """Return how many times smaller the delta of two states is, and the restored target."""
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
    """Evaluate all candidates of any coder, and choose; see :func:`choose_bound`.

    Args:
        exact: The network as it is.
        compress: Returns the ratio and the restored network for a bound.
        evaluate: Returns the accuracy of a network, 0 to 1.
        candidates: The bounds to try.
        budget: What may be lost.
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
    """Accuracy of the network as it is, and why it cannot be used."""
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
