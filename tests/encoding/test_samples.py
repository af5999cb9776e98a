"""Keys: legal and distinct, whatever files are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.encoding.samples import FieldRef, SampleRef, gather_lists, unique_keys
from pcrshard.errors import EncodeError
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


def numbered_samples(*counts, name="images"):
    """Return samples of a tar with these counts of numbered images each, the last one first."""
    label = FieldRef("cls", "t.tar", 90, 91)
    images = [FieldRef(f"{name}.{i}.jpg", "t.tar", i, i + 1) for i in range(max(counts))]
    return [
        SampleRef(f"s{row}", (*reversed(images[:count]), label)) for row, count in enumerate(counts)
    ]


def list_places(samples):
    return [[(ref.name, ref.place) for ref in sample.refs] for sample in samples]


def test_numbered_images_become_a_list_where_their_number_differs():
    """Some samples with one image, some with three, some with none: that is a list."""
    gathered = list_places(gather_lists(numbered_samples(3, 0, 1)))
    label = ("cls", None)
    assert gathered[0][-2:] == [("images.jpg", 1), ("images.jpg", 2)]
    assert sorted(gathered[0][:2], key=str) == [label, ("images.jpg", 0)]
    assert gathered[1:] == [[label], [("images.jpg", 0), label]]


@pytest.mark.parametrize("counts", [(2, 1), (64, 1)])
def test_up_to_64_images_are_a_list(counts):
    """The smallest and the largest list that is found without being named."""
    gathered = list_places(gather_lists(numbered_samples(*counts)))
    assert [sum(place is not None for _, place in refs) for refs in gathered] == list(counts)


@pytest.mark.parametrize("counts", [(2, 2), (1, 0), (65, 1)])
def test_numbered_images_that_may_mean_anything_stay_fields(counts):
    """Two cameras in each sample stay two fields, unless a user asks for a list."""
    samples = numbered_samples(*counts)
    assert gather_lists(samples) == samples
    assert gather_lists(samples, ()) == samples
    asked = list_places(gather_lists(samples, ["images.jpg"]))
    assert [sum(place is not None for _, place in refs) for refs in asked] == list(counts)


def test_a_list_with_a_gap_is_no_list():
    """Images 0 and 2 cannot be told from 0 and 1 in a list: they stay fields, or are an error."""
    whole, other = numbered_samples(3, 1)
    gap = whole._replace(refs=tuple(ref for ref in whole.refs if ref.name != "images.1.jpg"))
    assert gather_lists([gap, other]) == [gap, other]
    with pytest.raises(EncodeError, match=r"without a gap.*'images.jpg', got the numbers \[0, 2\]"):
        gather_lists([gap, other], ["images.jpg"])
    with pytest.raises(
        EncodeError, match=r"'views.0.jpg', .* list 'views.jpg', got the numbers \[\]"
    ):
        gather_lists([gap, other], ["views.jpg"])
    named = other._replace(refs=(*other.refs, FieldRef("images.jpg", "t.tar", 0, 1)))
    assert gather_lists([whole, named]) == [whole, named]
