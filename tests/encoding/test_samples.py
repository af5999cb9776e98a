"""Keys: legal and distinct, whatever files are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import within

from pcrshard.encoding.samples import unique_keys
from pcrshard.errors import EncodeError
from pcrshard.format.kinds import find_lists
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
    """Return the keys of samples and the names of their images of these numbers."""
    return [
        (str(row), [f"images.{i}.jpg" for i in reversed(own)]) for row, own in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "is_list"),
    [
        ([(0, 1, 2), (), (0,)], True),
        ([(0, 1), (0, 1)], True),
        ([(0,), ()], True),
        ([range(64), (0,)], True),
        ([(1, 2), (1, 2)], False),
        ([range(65)], False),
    ],
)
def test_images_numbered_from_0_are_a_list(places, is_list):
    """However many there are: a split whose samples all have two has the field of another, where
    their number varies.
    """
    assert find_lists(numbered_samples(*places), ()) == ({"images.jpg"} if is_list else set())


@pytest.mark.parametrize("places", [[(0, 2), (0,)], [range(65), (0,)]])
def test_a_list_with_a_gap_is_refused(places):
    """Images 0 and 2 would become 0 and 1 in a list: the sample and the way out are named."""
    with pytest.raises(EncodeError, match="keep-numbered") as caught:
        find_lists(numbered_samples(*places), ())
    assert caught.value.key == "0"


def test_a_field_that_is_one_image_and_a_list_is_refused():
    """A job could not tell what is in it."""
    samples = [*numbered_samples((0, 1)), ("s", ["images.jpg"])]
    with pytest.raises(EncodeError, match="a list of images in every sample"):
        find_lists(samples, ())
    assert find_lists([("s", ["jpg"])], ("views.jpg",)) == {"views.jpg"}
