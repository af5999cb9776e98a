"""Algorithm 1: the largest ratio within the budget, and the finest bound if there is none."""

import math

import pytest
import torch

from pcrshard.checkpoint import choose_bound
from pcrshard.checkpoint.bound_choice import CANDIDATES
from pcrshard.errorbound import RelativeStd

GENERATOR = torch.Generator().manual_seed(0)
REFERENCE = {"w": torch.randn(100, 100, generator=GENERATOR)}
TARGET = {"w": REFERENCE["w"] + 0.05 * torch.randn(100, 100, generator=GENERATOR)}


def evaluate(state):
    """Return an accuracy that falls with the error, of which small errors gain a little."""
    error = float((state["w"] - TARGET["w"]).abs().mean())
    return 0.9 + 0.001 * (0 < error < 0.01) - error * (error >= 0.01)


def test_the_largest_ratio_within_the_budget_is_chosen():
    """Every candidate is tried on the real delta; a gain of accuracy is not a loss."""
    choice = choose_bound(TARGET, REFERENCE, evaluate, max_loss=0.02)
    assert [row.bound for row in choice.table] == list(CANDIDATES)
    ratios = [row.ratio for row in choice.table]
    assert ratios == sorted(ratios)
    assert [row.accepted for row in choice.table] == [True] * 4 + [False] * 3
    assert choice.table[0].loss == pytest.approx(-0.001)
    assert choice.bound == RelativeStd(0.03)
    assert not choice.is_default


@pytest.mark.parametrize("accuracy", [0.5, math.nan])
def test_nothing_within_the_budget_keeps_the_finest_bound(accuracy, caplog):
    """The finest bound is kept with a warning; the exact network must have an accuracy."""
    choice = choose_bound(TARGET, REFERENCE, lambda state: 0.9 if state is TARGET else accuracy)
    assert (choice.is_default, choice.bound) == (True, CANDIDATES[0])
    assert "every candidate loses more" in caplog.text
    with pytest.raises(ValueError, match="got nan"):
        choose_bound(TARGET, REFERENCE, lambda state: math.nan)
