"""Errors must survive WebDataset's handlers, DataLoader workers and process pools."""

import pickle

import pytest

from pcrshard import errors

NAMES = [
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
]


@pytest.mark.parametrize("name", NAMES)
def test_rebuilds_from_its_text_and_pickles(name):
    """An error crosses process borders with its message whole."""
    kind = getattr(errors, name)
    error = kind("expected 1, got 2", url="a/b-000001.tar", key="k", scan=3, offset=4)
    text = "expected 1, got 2 (shard=a/b-000001.tar, key=k, scan=3, offset=4)"
    assert str(error) == text
    assert str(kind(text)) == text
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == text
    assert isinstance(error, errors.PCRError)


def test_appended_arguments_do_not_change_the_message():
    """WebDataset appends the URL to args; the message stays readable."""
    error = errors.CorruptPiece("bad")
    error.args = (*error.args, "s3://bucket/x.tar")
    assert str(error) == "bad"


def test_an_error_may_be_its_own_cause():
    """An error of a library is reported, whatever it says that its cause is."""
    error, cause = OSError("a"), ValueError("b")
    error.__cause__, cause.__cause__ = cause, error
    assert errors.redacted_cause(error) is None


def test_the_tree_is_drawn_in_the_docstring():
    """Every class is in the tree that users read."""
    assert all(name in (errors.__doc__ or "") for name in NAMES)
