"""How the commands for stores of checkpoints tell their results."""

import argparse
import doctest
import json

from pcrshard.cli import store_commands


def test_examples():
    """Tables and ratios."""
    assert doctest.testmod(store_commands).failed == 0
    assert doctest.testmod(store_commands).attempted == 3


def test_results_for_people_and_for_programs(capsys):
    """The same figures."""
    store_commands.report(argparse.Namespace(json=False), {"a": 1, "b": "x"})
    assert capsys.readouterr().out == "a=1, b=x\n"
    store_commands.report(argparse.Namespace(json=True), {"a": 1, "b": "x"})
    assert json.loads(capsys.readouterr().out) == {"a": 1, "b": "x"}


def test_bars_are_silent_without_a_terminal(capsys):
    """Standard error stays empty, however long it takes."""
    with store_commands.bar("verify", "versions") as bar:
        bar.logged = bar.started = -1e9
        bar(1, 2)
        bar(2, 2)
    assert capsys.readouterr().err == ""
