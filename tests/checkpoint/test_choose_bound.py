"""Algorithm 1: the largest ratio within the budget, and a safe default where it cannot tell."""

import itertools
import math

import pytest
import torch

from pcrshard.checkpoint import choose_bound
from pcrshard.checkpoint.choose_bound import CANDIDATES, Budget, choose
from pcrshard.errorbound import RelativeStd

# Percent of the deviation -> (ratio, accuracy of the restored network); 0.9 without compression.
MEASURED = {0.5: (9, 0.9), 1: (11, 0.9), 2: (15, 0.8995), 3: (20, 0.903), 5: (36, 0.8985),
            7: (60, 0.8970), 10: (126, 0.86)}  # fmt: skip


def compress(bound):
    return MEASURED[round(bound.fraction * 100, 3)]


def ratio_and_name(bound):
    ratio, accuracy = compress(bound)
    return ratio, accuracy


def run(evaluate=lambda network: 0.9 if network == "exact" else network, **options):
    return choose("exact", ratio_and_name, evaluate, budget=Budget(**options))


def test_the_largest_ratio_within_the_budget_is_chosen():
    """36 times at a loss of 0.15 points; 60 times would lose 0.3."""
    choice = run()
    assert choice.bound == RelativeStd(0.05)
    assert not choice.is_default
    assert [row.accepted for row in choice.table] == [True] * 5 + [False] * 2
    assert [row.ratio for row in choice.table] == [9, 11, 15, 20, 36, 60, 126]


def test_a_gain_of_accuracy_is_no_loss():
    """The paper's absolute value would refuse it: the budget is one-sided."""
    row = run(max_loss=0.002).table[3]
    assert row.loss == pytest.approx(-0.003)
    assert row.accepted


@pytest.mark.parametrize("accuracy", [math.nan, math.inf])
def test_no_number_is_no_accuracy(accuracy):
    """A NaN or infinite accuracy keeps the default bound and reports the reason."""
    choice = run(lambda network: accuracy)
    assert choice.is_default
    assert "evaluate returned" in choice.reason
    assert choice.bound == Budget().default


def test_a_failing_evaluation_keeps_the_default(caplog):
    """For the network as it is: nothing can be compared. For candidates: they are not accepted."""

    def broken(network):
        raise RuntimeError("out of memory")

    choice = run(broken)
    assert choice.is_default
    assert choice.reason == "evaluate failed: RuntimeError: out of memory"
    choice = run(lambda network: 0.9 if network == "exact" else broken(network))
    assert choice.is_default
    assert all(row.error and not row.accepted for row in choice.table)
    assert "the bound stays at" in caplog.text


def test_a_noisy_evaluation_keeps_the_default():
    """The same network, two accuracies further apart than the budget."""
    values = itertools.cycle([0.9, 0.91])
    choice = run(lambda network: next(values), repeats=2)
    assert choice.is_default
    assert "too noisy" in choice.reason


def test_a_test_set_that_is_too_small_keeps_the_default():
    """Figure 4 reduces the test sets: 100 samples cannot tell 0.2 points, 1000 can."""
    choice = run(num_samples=100)
    assert choice.is_default
    assert "one sample is more" in choice.reason
    assert not run(num_samples=1000).is_default


def test_nothing_within_the_budget_keeps_the_default():
    """And says so."""
    choice = run(lambda network: 0.9 if network == "exact" else 0.5)
    assert choice.is_default
    assert "every candidate loses more" in choice.reason


@pytest.mark.parametrize("wrong", [{"max_loss": -1}, {"max_loss": math.nan}, {"repeats": 0}])
def test_a_budget_makes_sense(wrong):
    """Wrong options are an error at once."""
    with pytest.raises(ValueError, match="expected"):
        Budget(**wrong)


def test_bounds_are_chosen_on_real_tensors():
    """Ratios grow with the bound; the chosen one keeps to the budget."""
    generator = torch.Generator().manual_seed(0)
    reference = {"w": torch.randn(100, 100, generator=generator)}
    step = torch.randn(100, 100, generator=generator)
    target = {"w": reference["w"] + 0.05 * step}

    def evaluate(state):
        return 1 - float((state["w"] - target["w"]).abs().mean())

    budget = Budget(max_loss=0.02)
    choice = choose_bound(target, reference, evaluate, budget=budget)
    ratios = [row.ratio for row in choice.table]
    assert ratios == sorted(ratios)
    assert [row.bound for row in choice.table] == list(CANDIDATES)
    assert choice.bound == RelativeStd(0.03)
