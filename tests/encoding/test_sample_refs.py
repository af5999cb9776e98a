"""Keys: legal and distinct, whatever files are called."""

from hypothesis import given
from hypothesis import strategies as st

from pcrshard.encoding.sample_refs import unique_keys
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
