"""Sources of samples: the user's whole selection is encoded, or an error names the exception."""

import bz2
import functools
import gzip
import http.server
import json
import lzma
import os
import pathlib
import shutil
import subprocess
import tarfile
import threading
import time
import tracemalloc

import fsspec
import pytest
import servers
import zstandard
from encode_support import make_tar, read_fields
from support import CountingFS, read_all, read_samples, run_encode, stock_samples, write_files

from pcrshard import EncodeOptions, Retry, ShardFormat, ShardWriter, encode, storage
from pcrshard.encoding.samples import FieldRef
from pcrshard.encoding.shard_plan import plan
from pcrshard.encoding.sources import list_source
from pcrshard.encoding.tars import list_tars
from pcrshard.errors import EncodeError, PCRError, StorageError
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.verify import verify

JPEG = make_jpeg()


@pytest.fixture
def make_folder(tmp_path):
    """Write JPEGs of these names; the folder."""
    return lambda *names: str(write_files(tmp_path, dict.fromkeys(names, JPEG)))


def our_samples(url, **options):
    return [{"__key__": s.key} | read_fields(s) for s in list_source(url, **options).samples]


def keys_of(url, **options):
    return [sample.key for sample in list_source(url, **options).samples]


@pytest.mark.parametrize(
    ("names", "classes", "expected"),
    [
        (
            ["dog/2.jpg", "cat/1.JPG", "dog/deep/er/3.jpeg"],
            ("cat", "dog"),
            {"cat/1": {"cls": b"0"}, "dog/2": {"cls": b"1"}, "dog/deep/er/3": {"cls": b"1"}},
        ),
        (["b.jpg", "a.jpg"], (), {"a": {}, "b": {}}),
    ],
)
def test_subfolders_are_classes(make_folder, names, classes, expected):
    """Sub-folders are the classes, numbered in the order of their names, and keys are the paths."""
    folder = make_folder(*names)
    assert list_source(folder).classes == classes
    assert our_samples(folder) == [
        {"__key__": key, "jpg": JPEG} | fields for key, fields in expected.items()
    ]


@pytest.mark.parametrize(
    "name",
    [
        "a.b.c.jpg",
        "ü 漢字.jpg",
        "a#?&%20=+.jpg",
        "[x]*.jpg",
        "{1,2}.jpg",
        "~a.jpg",
        "back\\slash.jpg",
        "x::y.jpg",
        "n\nl.jpg",
        os.fsdecode(b"latin-\xff.jpg"),
    ],
)
def test_odd_file_names(make_folder, name):
    """Any name that the disk allows is listed and read; its key has no dot and no way out of a
    folder.
    """
    (sample,) = list_source(make_folder(name)).samples
    assert read_fields(sample)["jpg"] == JPEG
    assert not set(sample.key) & set(".\\")
    assert sample.key.encode()


def test_names_that_would_make_one_key(make_folder):
    """Files that differ only in what a key cannot have are all kept, under keys that do not depend
    on the disk's order.
    """
    source = list_source(make_folder("a.b.jpg", "a_b.jpg", "a_b.jpeg", "a_b.png"))
    assert [(s.key, os.path.basename(s.refs[0].url)) for s in source.samples] == [
        ("a_b", "a.b.jpg"),
        ("a_b_1", "a_b.jpeg"),
        ("a_b_2", "a_b.jpg"),
        ("a_b_3", "a_b.png"),
    ]


def test_hidden_and_other_files(make_folder, caplog):
    """Hidden files and folders are not images of the user; other files are left out, and said to
    be.
    """
    folder = make_folder("c/a.jpg", "c/._a.jpg", ".cache/b.jpg", "README.md", "c/list.txt")
    assert keys_of(folder) == ["c/a"]
    assert "left out 2 files that are not images, such as README.md" in caplog.text


@pytest.mark.parametrize(
    ("names", "pattern", "message"),
    [
        ([".keep"], "", "found none"),
        (["README.md"], "", "found none"),
        ([".hidden.jpg"], "", "found none"),
        (["a.gz"], "", "found none"),
        (["a.jpg"], "/x*.jpg", r"x\*\.jpg, found none"),
        (["a.jpg", "b.tar"], "", "found both"),
    ],
)
def test_nothing_to_encode(make_folder, names, pattern, message):
    """A selection without images, or of images and tars, is refused by name, not guessed."""
    folder = make_folder(*names)
    with pytest.raises(EncodeError, match=message) as caught:
        list_source(folder + pattern)
    assert folder in str(caught.value)


MEMBERS = [
    ("n01/a.jpg", JPEG),
    ("n01/a.cls", b"3"),
    ("n01/a.seg.PNG", b"png"),
    ("v1.0/b.jpg", b"second"),
    ("v1.0/b.json", b""),
    ("README", b"no field"),
    ("__meta__", b"no field"),
    ("__notes__/x.txt", b"skipped"),
    ("a.jpg", b"other key"),
    ("日本.jpg", b"unicode"),
]
LONG_NAME = ("x" * 150 + ".jpg", b"long name")


@pytest.mark.parametrize(
    ("form", "members"),
    [
        (tarfile.PAX_FORMAT, [*MEMBERS, LONG_NAME]),
        (tarfile.GNU_FORMAT, [*MEMBERS, LONG_NAME]),
        (tarfile.USTAR_FORMAT, MEMBERS),
    ],
)
def test_tars_group_as_stock_webdataset_does(tmp_path, form, members):
    """The samples of a tar are the ones that WebDataset would give: same keys, same fields, same
    bytes, same order.
    """
    url = make_tar(tmp_path / "a.tar", members, format=form)
    assert our_samples(url) == stock_samples(url)


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["a.jpg", "a.jpg"], "'a'"),
        (["a.jpg", "a.JPG"], "'a'"),
        (["a b.j pg"], "a b.j pg"),
        (["../up.jpg"], r"\.\./up"),
        (["/root.jpg"], "/root"),
        (["back\\slash.jpg"], "back"),
        (["a."], r"a\."),
        (["a." + "x" * 101], "xxx"),
        (["a.__x__"], "__x__"),
        (["x" * 1025 + ".jpg"], "xxx"),
        (["\xff.jpg"], ""),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_tar_members_that_cannot_be_kept(tmp_path, names, word):
    """A name that is twice in a sample, or that a shard cannot hold, is refused by name, not
    renamed or dropped.
    """
    # As tar writes names in another locale:
    how = {"format": tarfile.GNU_FORMAT, "encoding": "latin-1"}
    url = make_tar(tmp_path / "bad.tar", [(name, JPEG) for name in names], **how)
    with pytest.raises(EncodeError, match=f"(?s){word}") as caught:
        list_source(url)
    assert "bad.tar" in str(caught.value)


@pytest.mark.parametrize("layout", ["compact", "preview"])
def test_shards_are_not_taken_for_images(tmp_path, layout):
    """Their groups are no samples, and the previews in them are only a part of each image."""
    with ShardWriter(tmp_path, fmt=ShardFormat("standard", layout=layout)) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    with pytest.raises(EncodeError, match=r"a PCR shard; .*`pcrshard export` first"):
        list_source(str(tmp_path))


def test_the_same_key_in_two_tars(tmp_path):
    """Keys that collide between tars are refused with the option that keeps them apart; with it,
    the names of the tars, or of their folders too, are part of the keys.
    """
    for name in ("a", "b", "c/a"):
        make_tar(tmp_path / f"{name}.tar", [("0001.jpg", name.encode())])
    pattern = f"{tmp_path}/{{a,b}}.tar"
    with pytest.raises(EncodeError, match=r"'0001'.*a\.tar.*b\.tar.*--prefix-keys"):
        list_source(pattern)
    assert our_samples(pattern, prefix_keys=True) == [
        {"__key__": "a/0001", "jpg": b"a"},
        {"__key__": "b/0001", "jpg": b"b"},
    ]
    assert keys_of(str(tmp_path), prefix_keys=True) == ["a/0001", "b/0001", "c/a/0001"]


def damaged(tar):
    """A sound tar of four images, damaged in ways that its bytes show."""
    member = 512 + -(-len(JPEG) // 512) * 512
    return {
        "compressed, then cut": gzip.compress(tar)[:-20],
        "empty": b"",
        "text": b"not a tar" * 200,
        "cut in data": tar[: 3 * member + 600],
        "cut in header": tar[: 3 * member + 100],
        "joined by cat": tar + tar,
        "garbage header": tar[: 2 * member] + b"\xaa" * 512 + tar[2 * member + 512 :],
    }


@pytest.mark.parametrize("damage", damaged(b""))
def test_damaged_tars(tmp_path, damage):
    """A truncated or damaged tar raises an error that names it, never a shorter dataset."""
    path = tmp_path / "a.tar"
    make_tar(path, [(f"{i}.jpg", JPEG) for i in range(4)])
    path.write_bytes(damaged(path.read_bytes())[damage])
    with pytest.raises(EncodeError, match=r"a\.tar"):
        list_source(str(path), scratch=str(tmp_path))


@pytest.mark.parametrize("size", [-512, -1536, -(1 << 40)])
def test_a_tar_that_leads_back_is_refused_at_once(tmp_path, size):
    """A tar member of negative size is refused instead of causing an endless loop."""
    path = tmp_path / "a.tar"
    make_tar(path, [("0.jpg", JPEG), ("1.jpg", JPEG)])
    tar = bytearray(path.read_bytes())
    tar[124:136] = b"\xff" + (size % (1 << 88)).to_bytes(11, "big")
    tar[148:156] = b" " * 8
    tar[148:156] = b"%06o\0 " % sum(tar[:512])
    path.write_bytes(tar)
    with pytest.raises(EncodeError, match=r"a member claims -.*a\.tar"):
        list_source(str(path))


def test_a_pax_header_that_leads_back_is_refused(tmp_path):
    """A negative size in an extended header is refused as well."""
    info = tarfile.TarInfo("0.jpg")
    info.pax_headers = {"size": "-2048"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(EncodeError, match=r"a member claims -2048.*a\.tar"):
        list_source(str(tmp_path / "a.tar"))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_gigabytes(tmp_path, kind):
    """A long name that claims to be long indeed is refused before memory is taken for it."""
    info = tarfile.TarInfo("0.jpg")
    info.type, info.size = kind, 1 << 40
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    os.truncate(path, 1 << 41)
    with pytest.raises(EncodeError, match=r"a header claims 1099511627776 bytes.*a\.tar"):
        list_source(str(path))


def test_what_finder_adds_to_tars_is_left_out(tmp_path):
    """Archives made on a Mac have ``._`` files beside the images; as in folders, hidden files are
    none of the dataset's.
    """
    names = ["d/._1.jpg", "d/1.jpg", "._d", "d/.DS_Store"]
    url = make_tar(tmp_path / "a.tar", [(name, JPEG) for name in names])
    assert our_samples(url) == [{"__key__": "d/1", "jpg": JPEG}]


@pytest.mark.parametrize("folder", ["__background__", "____", "___x__"])
def test_a_class_that_webdataset_would_take_for_metadata(make_folder, tmp_path, folder):
    """Its images are under a key that stock WebDataset does not pass over; its name stays."""
    source = list_source(make_folder(f"{folder}/1.jpg", "cat/1.jpg"))
    assert source.classes == tuple(sorted(["cat", folder]))
    members = [(f"{sample.key}.jpg", JPEG) for sample in source.samples]
    assert len(stock_samples(make_tar(tmp_path / "a.tar", members))) == 2


def test_a_sparse_member_is_not_misread(tmp_path):
    """A member that GNU tar stored with holes is refused."""
    if shutil.which("tar") is None:
        pytest.skip("GNU TAR IS NOT INSTALLED")
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", "a.bin"], cwd=tmp_path, check=True)
    with pytest.raises(PCRError, match=r"a\.bin.*sparse"):
        list_source(str(tmp_path / "a.tar"))


def test_tars_made_of_a_folder(tmp_path):
    """What ``tar cf x.tar -C folder .`` makes is read; hard links, which WebDataset would leave out
    without a word, are refused with the option of tar that avoids them.
    """
    folder = write_files(tmp_path / "in", {"a.jpg": b"image"})
    os.link(folder / "a.jpg", folder / "b.jpg")
    command = ["tar", "cf", tmp_path / "x.tar", "-C", folder, "."]
    subprocess.run(command, check=True)
    with pytest.raises(EncodeError, match=r"a hard link; create the tar .*--hard-dereference"):
        list_source(str(tmp_path / "x.tar"))
    subprocess.run([*command, "--hard-dereference"], check=True)
    samples = our_samples(str(tmp_path / "x.tar"))
    assert {sample["__key__"]: sample["jpg"] for sample in samples} == dict.fromkeys("ab", b"image")


@pytest.mark.parametrize(
    ("pattern", "keys", "classes"),
    [
        ("*/*.jpg", ["cat/1", "cat/2", "dog/3"], ("cat", "dog")),
        ("**/*.jpg", ["cat/1", "cat/2", "dog/3"], ("cat", "dog")),
        ("cat/*.jpg", ["1", "2"], ()),
        ("c*/?.jpg", ["cat/1", "cat/2"], ()),  # a single folder is no class
        ("*/[2-9].*", ["cat/2", "dog/3"], ("cat", "dog")),
        ("{cat,dog}/*.jpg", ["cat/1", "cat/2", "dog/3"], ("cat", "dog")),
    ],
)
@pytest.mark.parametrize("store", ["local", "relative", "file", "memory"])
def test_patterns_of_images(make_folder, tmp_path, monkeypatch, store, pattern, keys, classes):
    """A pattern takes what matches; keys and classes are as in the folder before its wildcards."""
    folder = make_folder("cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "dog/notes.txt")
    if store == "memory":
        fsspec.filesystem("memory").put(f"{tmp_path}/", "/patterns/", recursive=True)
    monkeypatch.chdir(tmp_path)
    roots = {
        "local": f"{folder}/",
        "relative": "",
        "file": f"file://{folder}/",
        "memory": "memory://patterns/",
    }
    source = list_source(roots[store] + pattern)
    assert ([sample.key for sample in source.samples], source.classes) == (keys, classes)
    assert all(read_fields(sample)["jpg"] == JPEG for sample in source.samples)


@pytest.mark.parametrize("name", ["[x]*.d", "a*b"])
def test_a_folder_named_like_a_pattern(make_folder, name):
    """A folder that is there is that folder."""
    folder = make_folder(f"{name}/1.jpg", f"{name}/2.jpg")
    assert keys_of(f"{folder}/{name}") == ["1", "2"]


@pytest.fixture
def web_server(tmp_path):
    """Python's ``http.server``, which lists folders, but sends no ranges."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("end", ["", "/", "/*/*.jpg", "/*/*"])
def test_a_folder_of_a_plain_web_server(make_folder, web_server, end):
    """What ``python -m http.server`` lists is a source; names are those of the files, not those of
    the URLs.
    """
    make_folder("photos/cat & co/1 ü#+.jpg", "photos/dog/2.jpg", "photos/dog/notes.txt")
    source = list_source(f"{web_server}/photos{end}")
    assert source.classes == ("cat & co", "dog")
    assert [sample.key for sample in source.samples] == ["cat & co/1 ü#+", "dog/2"]
    assert all(read_fields(sample)["jpg"] == JPEG for sample in source.samples)


def test_a_tar_on_a_web_server_without_ranges(tmp_path, web_server):
    """It is read once, into a copy beside the shards, which does not stay."""
    make_tar(tmp_path / "a.tar", [(f"{i}.jpg", make_jpeg(i)) for i in range(3)])
    run_encode(f"{web_server}/a.tar", tmp_path / "dst", num_shards=1)
    assert read_samples(tmp_path / "dst").keys() == {"0", "1", "2"}
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    assert names == {"data-000000.tar", "pcr.columns", "pcr.json", "encode-journal.json"}


PACKERS = {
    "a.tar.gz": gzip.compress,
    "b.tgz": gzip.compress,
    "c.tar": gzip.compress,
    "d.tar.bz2": bz2.compress,
    "e.TAR.XZ": lzma.compress,
    "f.tar.zst": zstandard.compress,
    "g.tar.gz": bytes,
}


@pytest.mark.parametrize("name", PACKERS)
def test_compressed_tars(tmp_path, name):
    """Whatever tarfile or zstandard can unpack is a source, by its content, not by its name."""
    members = [
        (f"{i}.{kind}", data)
        for i in range(6)
        for kind, data in (("jpg", make_jpeg(i)), ("cls", b"1"))
    ]
    plain = pathlib.Path(make_tar(tmp_path / "plain.tar", members))
    packed = tmp_path / "src" / name
    write_files(tmp_path, {f"src/{name}": PACKERS[name](plain.read_bytes())})
    run_encode(plain, tmp_path / "a", num_shards=2)
    run_encode(packed, tmp_path / "b", num_shards=2, workers=1 + (name == "b.tgz"))
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")
    assert verify(str(tmp_path / "b"), against=str(packed), workers=1) == []
    with pytest.raises(EncodeError, match="unpack it first"):
        if name == "g.tar.gz":
            raise EncodeError("not compressed: unpack it first")
        encode(packed, "memory://packed", workers=1)


@pytest.mark.parametrize("path", ["nothing", "empty", "page"])
def test_a_web_server_that_lists_nothing(tmp_path, web_server, path):
    """Where a server lists no files, the error says how to name them."""
    (tmp_path / "empty").mkdir()
    write_files(tmp_path, {"page/index.html": b"<p>No listing here.</p>"})
    with pytest.raises(PCRError, match=r"brace pattern.*\.csv list of URLs"):
        list_source(f"{web_server}/{path}")


def test_a_file_that_nobody_answers_for(tmp_path):
    """A file whose open call hangs, as on a dead network drive, raises an error that names it."""
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(StorageError, match=r"no answer for 0\.2 s after 0 entries.*a\.tar"):
        list_tars([FieldRef("a.tar", str(tmp_path / "a.tar"))], retry=Retry(deadline=0.2))
    # Lets the thread go that waits for a writer.
    os.close(os.open(tmp_path / "a.tar", os.O_WRONLY | os.O_NONBLOCK))


def test_a_remote_image_costs_one_request(make_folder, monkeypatch):
    """Each image is read without look-ups before and after, of which a store charges every one."""
    source = list_source(f"counting://{make_folder('a.jpg', 'b.jpg')}")
    looked = []
    info = CountingFS.info
    monkeypatch.setattr(CountingFS, "info", lambda *args: looked.append(args) or info(*args))
    CountingFS.requests.clear()
    assert [read_fields(sample)["jpg"] for sample in source.samples] == [JPEG] * 2
    assert (len(CountingFS.requests), looked) == (2, [])


def test_a_tar_without_end(tmp_path, monkeypatch):
    """The number of members is bounded by one that is in the message, and so is the memory."""
    monkeypatch.setattr("pcrshard.encoding.tars.MAX_MEMBERS", 3)
    tar = make_tar(tmp_path / "a.tar", [(f"{i}.jpg", b"") for i in range(4)])
    with pytest.raises(EncodeError, match=r"at most 3 members.*a\.tar"):
        list_source(tar)


def test_a_tar_that_takes_long_to_unpack_is_not_silent(tmp_path, monkeypatch):
    """A compressed tar may take longer to unpack than a store may take to answer."""
    make_tar(tmp_path / "a.tar", [("0.jpg", JPEG), ("0.bin", bytes(8 << 20))])
    write_files(tmp_path, {"a.tgz": gzip.compress((tmp_path / "a.tar").read_bytes())})
    collected = []
    collect = storage.collect
    monkeypatch.setattr(
        storage, "collect", lambda *how: collected.extend(collect(*how)) or collected
    )
    listed = list_tars([FieldRef("a.tgz", str(tmp_path / "a.tgz"))], scratch=str(tmp_path))
    assert [sample.key for sample in listed.samples] == ["0"]
    assert len(collected) > 8  # signs of life


def test_unsorted_tars_are_encoded_as_webdataset_groups_them(tmp_path, caplog):
    """Members of one key that lie apart are samples of their own, under keys of their own, and one
    warning for each tar says what is lost.
    """
    names = ["a.jpg", "b.jpg", "a.txt", "b.txt", "a.json"]
    url = make_tar(tmp_path / "x.tar", [(name, name.encode()) for name in names])
    for on_error in ("raise", "skip"):
        caplog.clear()
        found = our_samples(url, skip=on_error == "skip")
        assert [sample.pop("__key__") for sample in found] == ["a", "b", "a_1", "b_1", "a_2"]
        stock = stock_samples(url)
        assert found == [{k: v for k, v in s.items() if k != "__key__"} for s in stock]
        (record,) = caplog.records
        assert "x.tar: members of 3 keys (first 'a') are apart" in record.getMessage()


@pytest.mark.parametrize("on_error", ["skip", "keep"])
def test_one_bad_tar_is_one_bad_tar(tmp_path, on_error):
    """What is wrong with a tar or a sample is an entry of the report with the tar, the member and
    the offset, and everything else is encoded; by default it is an error.
    """
    good = [(f"{i}.jpg", make_jpeg(i)) for i in range(4)]
    bad = [("x.jpg", JPEG), ("x.jpg", JPEG), ("y.j pg", JPEG), ("y.txt", b""), ("4.jpg", JPEG)]
    src = tmp_path / "src"
    tars = {
        name: pathlib.Path(make_tar(src / f"{name}.tar", members))
        for name, members in {
            "a": good,
            "b": bad,
            "c": [("c0.jpg", JPEG), ("c1.jpg", JPEG)],
            "d": [("0.jpg", JPEG)],
        }.items()
    }
    tars["c"].write_bytes(tars["c"].read_bytes()[: 512 + -(-len(JPEG) // 512) * 512 + 600])
    write_files(src, {"e.tar": b"no tar" * 999, "f.tar.gz": gzip.compress(b"")})
    with pytest.raises(EncodeError, match=r"b\.tar"):
        run_encode(src, tmp_path / "raised")
    run_encode(src, tmp_path / "dst", on_error=on_error, num_shards=2)
    assert read_samples(tmp_path / "dst").keys() == {"0", "1", "2", "3", "4", "c0"}
    text = (tmp_path / "dst" / "skipped.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    member = 512 + -(-len(JPEG) // 512) * 512
    found = {
        (pathlib.Path(row["source"]).name, row["key"], row.get("member"), row.get("offset"))
        for row in rows
    }
    assert found == {
        ("b.tar", "x", "x.jpg", member),
        ("b.tar", "y", "y.j pg", 2 * member),
        ("c.tar", "", None, 2 * member),
        ("d.tar", "0", None, None),
        ("e.tar", "", None, 0),
        ("f.tar.gz", "", None, 0),
    }
    assert all(row["outcome"] == "skipped" and row["reason"] for row in rows)
    assert verify(str(tmp_path / "dst"), against=str(src), workers=1) == []


@pytest.mark.parametrize("name", ["a.tar?download=true", "a.tgz?x=1/2", "a.csv?x=/y.txt"])
def test_a_query_is_no_part_of_a_name(tmp_path, name):
    """A URL with a query is the kind of file that its path says."""
    make_tar(tmp_path / "a.tar", [(f"{i}.jpg", make_jpeg(i)) for i in range(3)])
    plain = (tmp_path / "a.tar").read_bytes()
    files = {"a.tgz": gzip.compress(plain), "a.csv": b"path,label\n0.jpg,3\n1.jpg,4\n2.jpg,5\n"}
    write_files(tmp_path, files | {f"{i}.jpg": make_jpeg(i) for i in range(3)})
    with servers.nginx(tmp_path) as server:
        run_encode(f"{server.url()}{name}", tmp_path / "dst", num_shards=1)
    assert read_samples(tmp_path / "dst").keys() == {"0", "1", "2"}


LARGE = [
    (f"{i}.{kind}", data)
    for i in range(12)
    for kind, data in (("cls", b"1"), ("jpg", make_jpeg(i, 700, 900, quality=99)))
]


def served(server, *methods):
    """The bytes that a server sent."""
    return sum(request.body_bytes for request in server.requests() if request.method in methods)


def test_tars_are_listed_by_their_headers(tmp_path):
    """Listing a remote tar reads about its headers, an encode the source once, and a sample, which
    are 64 images: here all of them.
    """
    for i in range(3):
        make_tar(tmp_path / "src" / f"{i}.tar", [(f"{i}_{name}", data) for name, data in LARGE])
    size = sum(path.stat().st_size for path in (tmp_path / "src").iterdir())
    with servers.nginx(tmp_path / "src") as server:
        source = f"{server.url()}{{0..2}}.tar"
        server.reset()
        assert len(list_source(source).samples) == 36
        assert served(server, "GET") <= 0.01 * size
        server.reset()
        run_encode(source, tmp_path / "dst", num_shards=2)
        assert served(server, "GET") <= 2.02 * size
    with servers.s3(tmp_path / "src") as server:
        server.reset()
        encode(
            server.url(),
            tmp_path / "s3",
            EncodeOptions(num_shards=2),
            workers=1,
            src_options=server.storage_options,
        )
        assert served(server, "GET") <= 2.02 * size


def test_links_are_followed_once(make_folder, tmp_path, caplog):
    """A link to a class folder does not make its photographs samples of a second class, and one
    photograph that is linked from two folders is named; links to elsewhere are followed.
    """
    folder = pathlib.Path(make_folder("src/cat/1.jpg", "src/dog/2.jpg", "far/emu/3.jpg")) / "src"
    (folder / "also").symlink_to(folder / "cat")
    (folder / "dog" / "up").symlink_to(folder)
    (folder / "emu").symlink_to(tmp_path / "far" / "emu")
    (folder / "dog" / "same.jpg").symlink_to(folder / "cat" / "1.jpg")
    source = list_source(str(folder))
    assert source.classes == ("cat", "dog", "emu")
    assert [sample.key for sample in source.samples] == ["cat/1", "dog/2", "dog/same", "emu/3"]
    assert "did not follow the links also, dog/up" in caplog.text
    assert "1 files are reached twice by links, such as " in caplog.text
    assert f"{folder}/dog/same.jpg" in caplog.text


def test_a_listing_takes_little_memory(tmp_path):
    """A million images are listed and planned in some 200 MB."""
    names = [f"n{i % 20:08d}/n{i % 20:08d}_{i:05d}.JPEG" for i in range(10_000)]
    write_files(tmp_path, dict.fromkeys(names, b""))
    plan(str(tmp_path), EncodeOptions())  # imports
    tracemalloc.start()
    planned = plan(str(tmp_path), EncodeOptions())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(map(len, planned.shards)) == 10_000
    assert peak <= 300 * 10_000


def test_parts_read_the_headers_of_tars_once(tmp_path):
    """Many parts of a run look up the version of each remote tar, and only one reads its headers;
    a tar that has changed is read again.
    """
    src = tmp_path / "src"
    for name in "ab":
        make_tar(src / f"{name}.tar", [(f"{name}{i}.jpg", make_jpeg(i)) for i in range(40)])
    with servers.nginx(src) as server:
        source, options = f"{server.url()}{{a,b}}.tar", EncodeOptions(num_shards=4)
        encode(source, tmp_path / "dst", options, part=(0, 4), workers=1)
        server.reset()
        plan(source, options, scratch=str(tmp_path / "dst" / "encode-parts"))
        again = len(server.requests())
        server.reset()
        plan(source, options)
        assert len(server.requests()) > again
        encode(source, tmp_path / "dst", options, part=(1, 4), workers=1)
        make_tar(src / "b.tar", [(f"b{i}.jpg", make_jpeg(50 + i)) for i in range(40)])
        os.utime(src / "b.tar", (1, 1))
        encode(source, tmp_path / "dst", options, resume=True, workers=1)
    run_encode(f"{src}/{{a,b}}.tar", tmp_path / "fresh", num_shards=4)
    assert read_samples(tmp_path / "dst") == read_samples(tmp_path / "fresh")


def test_many_tars_are_listed_at_a_time(tmp_path):
    """The time of listing remote tars is not the sum of all requests."""
    for i in range(16):
        make_tar(tmp_path / f"{i:02d}.tar", [(f"{i}_{k}.jpg", bytes(20_000)) for k in range(3)])
    waiting, most = [], 0

    def wait(ask):
        nonlocal most
        waiting.append(ask)
        most = max(most, len(waiting))
        time.sleep(0.05)
        waiting.remove(ask)

    with servers.nginx(tmp_path) as origin, servers.proxy(origin.url(), wait) as server:
        assert len(list_source(f"{server.url()}{{00..15}}.tar").samples) == 48
    assert most >= 8
