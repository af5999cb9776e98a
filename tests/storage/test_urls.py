"""What a URL says without a request."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard import storage
from pcrshard.errors import PCRError
from pcrshard.storage import urls


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("a-{0..2}.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("s3://b/{x,y}.tar::c.tar", ["s3://b/x.tar", "s3://b/y.tar", "c.tar"]),
        ("http://[fe80::1]:80/{x,y}::a", ["http://[fe80::1]:80/x", "http://[fe80::1]:80/y", "a"]),
        (["a{1,2}", pathlib.Path("b")], ["a1", "a2", "b"]),
        ("plain", ["plain"]),
        ([], []),
    ],
)
def test_expand(urls, expected):
    """Patterns mean what they mean to WebDataset."""
    assert storage.expand(urls) == expected


def test_braces_of_an_existing_name_are_no_pattern(tmp_path):
    """A folder is found whatever its name is, as it is with wildcards."""
    (tmp_path / "a{1,2}").mkdir()
    (tmp_path / "a{3").mkdir()
    names = [f"{tmp_path}/a{{1,2}}", f"{tmp_path}/a{{3"]
    assert storage.expand(names) == names


def test_expand_refuses_an_unbalanced_brace():
    """A typing error in a pattern is one of our errors, not a library's traceback."""
    with pytest.raises(PCRError, match=r"a-\{0"):
        storage.expand("a-{0..3.tar")


NAMES = st.text(
    st.characters(exclude_characters="/\\?#{}:", exclude_categories=["Cs", "Cc"]), min_size=1
)
FOLDERS = [
    "d", "/a/d", "s3://b/d/", "https://h/d?sig=x/y", "file:///d",
    "http://[::1]:80/d", "zip://::s3://b/c.zip", "zip://d::c.zip", "simplecache::https://h/d?sig=x",
]  # fmt: skip


@given(name=NAMES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_joined_name_comes_back(folder, name):
    """A file in a folder has a URL with its name, and the folder's query or chain."""
    url = storage.join(folder, name)
    assert storage.file_name(url) == name
    assert urls.split(url)[2] == urls.split(folder)[2]
    assert storage.join(storage.parent(url), name) == url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b.tar", "/a/b.tar"),
        ("b.tar", "b.tar"),
        ("file:///a/b.tar", "/a/b.tar"),
        ("local:///a/b.tar", "/a/b.tar"),
        ("~/b.tar", "/home/me/b.tar"),
        ("a::b.tar", "a::b.tar"),
    ],
)
def test_paths_and_their_urls_are_local(monkeypatch, url, path):
    """Every place of the package treats a path and its ``file://`` URL alike."""
    monkeypatch.setenv("HOME", "/home/me")
    assert storage.is_local(url)
    assert storage.plain_path(url) == path


@pytest.mark.parametrize("url", ["s3://b/a.tar", "https://h/a.tar", "pipe:cat a.tar", "memory://a"])
def test_other_urls_are_not_local(url):
    """What is elsewhere keeps its URL."""
    assert not storage.is_local(url)
    assert storage.plain_path(url) == url
