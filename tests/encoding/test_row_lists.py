"""Lists of files: paths, labels and whatever else a line says."""

import json

import fsspec
import pytest
from encode_support import read_fields
from support import write_files

from pcrshard.encoding.sources import list_source
from pcrshard.errors import EncodeError
from pcrshard.testing import make_jpeg

JPEG = make_jpeg()


@pytest.fixture
def write_list(tmp_path):
    """Write a list beside img/x.jpg; its path."""

    def write(name, text):
        data = text if isinstance(text, bytes) else text.encode()
        write_files(tmp_path, {"img/x.jpg": JPEG, name: data})
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.tsv", "img/x.jpg\n", {}),
        ("a.tsv", "img/x.jpg\t7\n", {"cls": b"7"}),
        ("a.tsv", "img/x.jpg\t-1\n", {"cls": b"-1"}),
        ("a.tsv", "img/x.jpg\t007\n", {"cls": b"0"}),  # a class of that name
        pytest.param("a.tsv", f"img/x.jpg\t{'9' * 5000}\n", {"cls": b"0"}, id="long"),
        ("a.tsv", "img/x.jpg\tcat\thello\n", {"cls": b"0", "json": b'{"extra": "hello"}'}),
        ("a.tsv", "path\tlabel\nimg/x.jpg\t7\n", {"cls": b"7"}),
        # The annotations of a detection list are no label.
        (
            "a.jsonl",
            '{"path": "img/x.jpg", "labels": [1, 2]}',
            {"json": b'{"labels": [1, 2]}'},
        ),
        (
            "a.tsv",
            "sha\tclass\tpath\r\nabc\tcat\timg/x.jpg\r\n",
            {"cls": b"0", "json": b'{"sha": "abc"}'},
        ),
        ("a.tsv", "img/x.jpg\t\tonly extra\n\n", {"json": b'{"extra": "only extra"}'}),
        ("a.csv", "img/x.jpg,7\r\n", {"cls": b"7"}),
        (
            "a.csv",
            'file_name,text\nimg/x.jpg,"a, ""b""\nc"\n',
            {"json": b'{"text": "a, \\"b\\"\\nc"}'},
        ),
        ("a.csv", "label,path,split\n3,img/x.jpg,\n\n", {"cls": b"3"}),
        # Blanks beside a comma belong to no path, number or name.
        (
            "a.csv",
            'path, label, text\nimg/x.jpg , 3 , "a, b"\n',
            {"cls": b"3", "json": b'{"text": "a, b"}'},
        ),
        ("a.tsv", "\ufeffpath\tlabel\nimg/x.jpg\t1\n", {"cls": b"1"}),  # as a spreadsheet saves it
        ("a.jsonl", '{"path": "img/x.jpg"}\n', {}),
        ("a.jsonl", '\n{"path": "img/x.jpg", "label": -3}\n', {"cls": b"-3"}),
        # The metadata.jsonl of a HuggingFace ImageFolder.
        ("a.jsonl", '{"file_name": "img/x.jpg", "text": ""}', {"json": b'{"text": ""}'}),
        (
            "a.ndjson",
            '{"path": "img/x.jpg", "label": "dog", "box": [1, 2]}',
            {"cls": b"0", "json": b'{"box": [1, 2]}'},
        ),
    ],
)
def test_lists(write_list, name, text, expected):
    """A list gives paths relative to itself, labels as numbers or names, and everything else as
    JSON.
    """
    source = list_source(write_list(name, text))
    (sample,) = source.samples
    assert (sample.key.endswith("img/x"), read_fields(sample)) == (True, {"jpg": JPEG} | expected)


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (["2", "-1", "10"], (), [2, -1, 10]),
        (["3.0", "-1.0", "10"], (), [3, -1, 10]),
        (["01", "02", "10"], ("01", "02", "10"), [0, 1, 2]),
        (["-0", "0"], ("-0", "0"), [0, 1]),
        (["n02", "n01"], ("n01", "n02"), [1, 0]),
    ],
)
def test_a_column_of_labels_is_numbers_or_names(write_list, labels, classes, numbers):
    """Labels are numbers if all are written as numbers are; with leading zeros they are the names
    of classes.
    """
    source = list_source(
        write_list("a.tsv", "".join(f"{i}.jpg\t{label}\n" for i, label in enumerate(labels)))
    )
    assert source.classes == classes
    assert [int(dict(sample.known)["cls"]) for sample in source.samples] == numbers


def test_a_list_may_name_other_stores_and_absolute_paths(write_list, tmp_path):
    """Paths with a scheme or a leading slash are taken as they are, in one list with others."""
    fsspec.filesystem("memory").pipe_file("/far/y.jpg", b"far")
    path = write_list("a.tsv", f"img/x.jpg\nmemory://far/y.jpg\n{tmp_path}/img/x.jpg\n")
    found = [read_fields(sample)["jpg"] for sample in list_source(path).samples]
    assert found == [JPEG, b"far", JPEG]


def test_a_json_line_ends_with_a_line_feed_only(write_list):
    """Characters that Unicode calls line ends are ordinary ones inside JSON."""
    rows = [{"path": "img/x.jpg", "text": "a\u2028b\x85c"}, {"path": "img/y.jpg"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert len(list_source(write_list("a.jsonl", text)).samples) == 2


GOOD_TSV, GOOD_JSONL = "img/x.jpg\t1\n", '{"path": "img/x.jpg", "label": 1}\n'
BAD_ROWS = [
    ("a.tsv", GOOD_TSV + "\tcat\n"),
    ("a.tsv", "label\tpath\n1\t\n"),
    ("a.tsv", GOOD_TSV + "img/y.jpg\t1\textra\tone too many\n"),
    ("a.tsv", GOOD_TSV + "img/y.jpg\r1\n"),
    ("a.tsv", GOOD_TSV.encode() + b"img/\xff.jpg\t1\n"),
    ("a.tsv", GOOD_TSV + "/\t1\n"),
    ("a.csv", "path,label\n,1\n"),
    ("a.csv", "path\nimg/x.jpg,1\n"),
    ("a.csv", 'path\n"img/x.jpg" and more\n'),
    ("a.csv", b"path\nimg/\xff.jpg\n"),
    ("a.jsonl", GOOD_JSONL + "{\n"),
    ("a.jsonl", GOOD_JSONL + '["img/x.jpg"]\n'),
    ("a.jsonl", GOOD_JSONL + '{"label": 1}\n'),
    ("a.jsonl", GOOD_JSONL + '{"path": 3}\n'),
    ("a.jsonl", GOOD_JSONL + '{"path": ""}\n'),
    ("a.jsonl", GOOD_JSONL + '{"path": ".."}\n'),
    ("a.jsonl", GOOD_JSONL + '{"path": "x.jpg", "label": true}\n'),
    ("a.jsonl", GOOD_JSONL + '{"path": "x.jpg", "label": 1.5}\n'),
    ("a.jsonl", GOOD_JSONL + '{"path": "x.jpg", "label": 1' + "0" * 5000 + "}\n"),
    ("a.jsonl", GOOD_JSONL + '{"path": "x.jpg", "label": null}\n'),
    ("a.jsonl", GOOD_JSONL + "[" * 200_000 + "\n"),
    ("a.jsonl", GOOD_JSONL.encode() + b'{"path": "\xff.jpg"}\n'),
]


@pytest.mark.parametrize(("name", "text"), BAD_ROWS, ids=lambda value: repr(value)[:40])
def test_a_bad_row_is_named_by_file_and_line(write_list, name, text):
    """Whatever is wrong with a row, one error names the list and the line."""
    path = write_list(name, text)
    with pytest.raises(EncodeError) as caught:
        list_source(path)
    assert path in str(caught.value)
    assert "line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"path": "a", "label": 1}\n{"path": "b", "label": "x"}'),
        ("a.tsv", "a\t10\nb\tcat"),
        ("a.tsv", ""),
        ("a.csv", ""),
        ("a.csv", "path,label\n"),
        ("a.csv", "id,breed\nabc,pug\n"),
        ("a.csv", 'path\n"img/x.jpg\n'),
    ],
)
def test_a_bad_list_is_named(write_list, name, text):
    """Labels of both kinds, or no rows at all, are refused with the list's name."""
    path = write_list(name, text)
    with pytest.raises(EncodeError, match=path):
        list_source(path)
