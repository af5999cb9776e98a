"""A network that the user names: what it is given, and what is wrong with it."""

import pytest
import torch
from torch import nn

from pcrshard.errors import PCRError
from pcrshard.fidelity.user_network import Network, load_network
from pcrshard.testing import make_jpeg

MODULE = """
import torch
def linear():
    return torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.LazyLinear(4))
def broken():
    return 5
def failing():
    raise RuntimeError("no weights")
answer = 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory."""
    (tmp_path / "my_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    return "my_networks"


def test_a_function_of_ones_own_module(module):
    """It is found in the working directory, called, and asked in evaluation mode."""
    network = load_network(f"{module}:linear", 32)
    jpegs = [make_jpeg(i, 50, 60) for i in range(3)]
    answers = network.classify(jpegs)
    assert answers == [network.classify([jpeg])[0] for jpeg in jpegs]
    assert isinstance(network.function, nn.Module)
    assert not network.function.training


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_networks", "returns a network"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
        ("my_networks:nothing", "has no attribute 'nothing'"),
        ("my networks", "expected package.module:function, got 'my networks'"),
        ("my_networks:answer", "returns a network"),
        ("my_networks:broken", "returns a network"),
        ("my_networks:failing", "the model failed with RuntimeError: no weights"),
    ],
)
def test_a_wrong_name_is_one_line(module, name, words):
    """It says what was expected."""
    with pytest.raises(PCRError, match=words):
        load_network(name)


def test_what_is_no_logits_is_refused():
    """Features or one image's logits would be counted as wrong answers."""
    with pytest.raises(
        PCRError, match=r"expected logits \(1, classes\) from the model, got \(5,\)"
    ):
        Network(lambda batch: torch.zeros(5), 32).classify([make_jpeg()])
    with pytest.raises(PCRError, match="the model failed with RuntimeError: mat1 and mat2"):
        Network(nn.Linear(5, 5), 32).classify([make_jpeg()])
