"""Algorithm 1: the largest ratio within the budget, and the finest bound if there is none."""

import math

import pytest
import torch

from pcrshard.checkpoint import choose_bound
from pcrshard.checkpoint.choose_bound import CANDIDATES, choose
from pcrshard.errorbound import RelativeStd

# Percent of the deviation -> (ratio, accuracy of the restored network); 0.9 without compression.
MEASURED = {0.5: (9, 0.9), 1: (11, 0.9), 2: (15, 0.8995), 3: (20, 0.903), 5: (36, 0.8985),
            7: (60, 0.8970), 10: (126, 0.86)}  # fmt: skip


def run(evaluate=lambda network: 0.9 if network == "exact" else network):
    return choose(
        "exact", lambda bound: MEASURED[round(bound.fraction * 100, 3)], evaluate, CANDIDATES, 0.002
    )


def test_the_largest_ratio_within_the_budget_is_chosen():
    """36x loses 0.15 points, which the budget allows; 60x loses 0.3. A gain is not a loss."""
    choice = run()
    assert choice.bound == RelativeStd(0.05)
    assert not choice.is_default
    assert [row.accepted for row in choice.table] == [True] * 5 + [False] * 2
    assert [row.ratio for row in choice.table] == [9, 11, 15, 20, 36, 60, 126]
    assert choice.table[3].loss == pytest.approx(-0.003)


@pytest.mark.parametrize("accuracy", [0.5, math.nan])
def test_nothing_within_the_budget_keeps_the_finest_bound(accuracy, caplog):
    """The finest bound is kept, and a warning is logged."""
    choice = run(lambda network: 0.9 if network == "exact" else accuracy)
    assert choice.is_default
    assert choice.bound == CANDIDATES[0]
    assert "every candidate loses more" in caplog.text


def test_an_exact_network_without_an_accuracy_is_an_error():
    """Losses cannot be computed from an accuracy that is not finite."""
    with pytest.raises(ValueError, match="got nan"):
        run(lambda network: math.nan)


def test_bounds_are_chosen_on_real_tensors():
    """Ratios grow with the bound, and the chosen bound stays within the budget."""
    generator = torch.Generator().manual_seed(0)
    reference = {"w": torch.randn(100, 100, generator=generator)}
    step = torch.randn(100, 100, generator=generator)
    target = {"w": reference["w"] + 0.05 * step}

    def evaluate(state):
        return 1 - float((state["w"] - target["w"]).abs().mean())

    choice = choose_bound(target, reference, evaluate, max_loss=0.02)
    ratios = [row.ratio for row in choice.table]
    assert ratios == sorted(ratios)
    assert [row.bound for row in choice.table] == list(CANDIDATES)
    assert choice.bound == RelativeStd(0.03)
