"""Keys: legal and distinct, whatever files are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import within

from pcrshard.encoding.samples import FieldRef, SampleRef, find_lists, unique_keys
from pcrshard.format.names import is_metadata, valid_key


@given(st.lists(st.text(min_size=1, max_size=12), max_size=20))
def test_any_names_make_legal_keys(names):
    """Each file has a key of its own that any reader takes."""
    keys = unique_keys(f"{name}/x.jpg" for name in names)
    assert len(set(keys)) == len(names)
    assert all(valid_key(key) and not is_metadata(f"{key}.jpg") for key in keys)


def test_keys_are_the_paths():
    """A key is the path of the image without its host; dots of the name and ways out are gone."""
    names = ["a/b.c.jpg", "../d.png", "http://host/e.jpg", "a/b_c.png"]
    assert unique_keys(names) == ["a/b_c", "d", "e", "a/b_c_1"]


def test_many_urls_that_differ_in_their_query_only():
    """A list of such URLs is numbered in a time that grows with its length only."""
    with within(10):
        keys = unique_keys(f"https://host/image?id={i}" for i in range(30_000))
    assert keys[:3] == ["image", "image_1", "image_2"]
    assert len(set(keys)) == 30_000


def numbered_samples(*places):
    """Return samples of a tar with images of these numbers."""
    return [
        SampleRef(str(row), tuple(FieldRef(f"images.{i}.jpg", "t.tar") for i in reversed(own)))
        for row, own in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "is_list"),
    [
        ([(0, 1, 2), (), (0,)], True),
        ([(0, 1), (0,)], True),
        ([range(64), (0,)], True),
        # Two cameras in each sample, for example, stay two fields.
        ([(0, 1), (0, 1)], False),
        ([(0,), ()], False),
        ([range(65), (0,)], False),
    ],
)
def test_numbered_images_are_a_list_if_their_number_differs(places, is_list):
    """Some samples with one image, some with three, some with none: that is a list."""
    samples = numbered_samples(*places)
    assert find_lists(samples) == (("images.jpg",) if is_list else ())


def test_a_list_with_a_gap_is_no_list():
    """Images 0 and 2 cannot be told from 0 and 1 in a list: they stay fields."""
    gap = numbered_samples((0, 2), (0,))
    named = [*numbered_samples((0, 1, 2)), SampleRef("s", (FieldRef("images.jpg", "t.tar"),))]
    assert find_lists(gap) == find_lists(named) == ()
