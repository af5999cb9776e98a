"""Names: what is legal is what WebDataset and file systems take back unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from pcrshard.errors import EncodeError
from pcrshard.format.names import (
    are_legal_keys,
    check_name,
    is_metadata,
    numbered,
    place_in_list,
    shard_name,
    valid_field,
    valid_key,
)

HOSTILE = st.text(st.sampled_from("ab./\\\0 é_"), max_size=9)


@pytest.mark.parametrize(
    ("key", "valid"),
    [
        ("a", True),
        ("a/b", True),
        ("x.y/b", True),
        ("ünï 1", True),
        ("a//b", False),
        ("a/./b", False),
        ("", False),
        ("a.b", False),
        ("../a", False),
        ("a/../b", False),
        ("a/", False),
        ("a\\b", False),
        ("é" * 512, True),
        ("é" * 512 + "a", False),
        ("..", False),
    ],
)
def test_keys_stay_inside_a_folder_and_split_as_joined(key, valid):
    """A key can neither escape an export folder nor confuse WebDataset."""
    assert valid_key(key) is valid


@given(HOSTILE, HOSTILE)
def test_a_legal_key_and_field_are_split_as_joined(key, field):
    """WebDataset gives back the key and the field that a member's name was made of."""
    if valid_key(key) and valid_field(field):
        assert base_plus_ext(f"{key}.{field}") == (key, field)


@given(st.lists(HOSTILE, min_size=1, max_size=4))
def test_many_keys_are_judged_as_one_by_one(keys):
    """The check of all keys of a shard at once says what a check of each says."""
    joined = "\0".join(keys)
    assert are_legal_keys(joined) == all(map(valid_key, joined.split("\0")))


@pytest.mark.parametrize("name", ["train", "a-b_C9", "x" * 64])
def test_names_of_datasets(name):
    """Letters, digits, '-' and '_' begin a shard's name, whose number follows."""
    check_name(name)
    assert shard_name(name, 12) == f"{name}-000012.tar"


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/b", "é", "x" * 65, "train\n"])
def test_other_names_are_refused(name):
    """A name that a shell, a URL or a tar could take for something else is refused."""
    with pytest.raises(EncodeError, match="expected a name"):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "passed_over"),
    [("__x__", True), ("__x__/a.jpg", True), ("__x__.jpg", False), ("a/__x__", False)],
)
def test_members_that_webdataset_passes_over(name, passed_over):
    """A sample may not be called what stock WebDataset takes for metadata."""
    assert is_metadata(name) is passed_over


@pytest.mark.parametrize("field", ["jpg", "images.jpg", "a.b.jpeg"])
def test_numbered_names_are_told_back(field):
    """What export numbers, encode gathers; other names are not numbered."""
    for place in (0, 9, 10, 63):
        assert place_in_list(numbered(field, place)) == (field, place)
    for other in (field, f"01.{field}", f"-1.{field}", "0.png", "images0.jpg", "0"):
        assert place_in_list(other) is None
