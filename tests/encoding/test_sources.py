"""Sources of samples: the user's whole selection is encoded, or an error names the exception."""

import contextlib
import functools
import gzip
import http.server
import io
import os
import shutil
import subprocess
import tarfile
import threading
import time

import fsspec
import pytest
import servers
import webdataset as wds
from encode_support import read_fields

from pcrshard import Retry, storage
from pcrshard.encoding.sources import list_source
from pcrshard.errors import EncodeError, PCRError, StorageError
from pcrshard.testing import make_jpeg

JPEG = make_jpeg()


@pytest.fixture
def make_folder(tmp_path):
    def make(*names, content=JPEG):
        for name in names:
            path = (
                os.path.join(tmp_path, name)
                if isinstance(name, str)
                else os.path.join(os.fsencode(tmp_path), name)
            )
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        return str(tmp_path)

    return make


def make_tar(path, members, **options):
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def stock_samples(url):
    """What unmodified WebDataset makes of a tar."""
    samples = wds.WebDataset(url, shardshuffle=False, handler=wds.reraise_exception)
    return [{k: v for k, v in s.items() if k not in ("__url__", "__local_path__")} for s in samples]


def our_samples(url, **options):
    return [{"__key__": s.key} | read_fields(s) for s in list_source(url, **options).samples]


def test_a_folder_per_class(make_folder):
    """Sub-folders are the classes, numbered in the order of their names, and keys are the paths."""
    source = list_source(make_folder("dog/2.jpg", "cat/1.JPG", "dog/deep/er/3.jpeg"))
    assert source.classes == ("cat", "dog")
    assert [(s.key, dict(s.known)["cls"]) for s in source.samples] == [
        ("cat/1", b"0"),
        ("dog/2", b"1"),
        ("dog/deep/er/3", b"1"),
    ]
    assert all(read_fields(s)["jpg"] == JPEG for s in source.samples)


def test_a_folder_without_classes(make_folder):
    """Images beside each other have no class."""
    source = list_source(make_folder("b.jpg", "a.jpg"))
    assert (source.classes, [s.key for s in source.samples], source.samples[0].known) == (
        (),
        ["a", "b"],
        (),
    )


ODD_NAMES = [
    "a.b.c.jpg",
    "ü 漢字.jpg",
    "a#?&%20=+.jpg",
    "[x]*.jpg",
    "{1,2}.jpg",
    "~a.jpg",
    "back\\slash.jpg",
    "x::y.jpg",
    "n\nl.jpg",
]


@pytest.mark.parametrize("name", [*ODD_NAMES, b"latin-\xff.jpg"])
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
    assert len({s.key for s in source.samples}) == 4
    assert all(s.key.startswith("a_b") for s in source.samples)
    assert len({s.refs[0].url for s in source.samples}) == 4


def test_hidden_and_other_files(make_folder):
    """Hidden files and folders are not images of the user; other files are left out, and said to
    be.
    """
    source = list_source(
        make_folder("c/a.jpg", "c/._a.jpg", ".cache/b.jpg", "README.md", "c/list.csv")
    )
    assert [s.key for s in source.samples] == ["c/a"]
    assert source.ignored == ("README.md", "c/list.csv")


@pytest.mark.parametrize("names", [[], ["README.md"], [".hidden.jpg"], ["a.tar.gz"]])
def test_nothing_to_encode(make_folder, names):
    """A folder without images says so and names itself."""
    folder = make_folder(*names)
    with pytest.raises(EncodeError, match=f"found none|{folder}"):
        list_source(folder)


def test_images_and_tars_in_one_folder(make_folder):
    """What is meant is asked, not guessed."""
    with pytest.raises(EncodeError, match="found both"):
        list_source(make_folder("a.jpg", "b.tar"))


MEMBERS = [
    ("./", b""),
    ("n01/a.jpg", JPEG),
    ("n01/a.cls", b"3"),
    ("n01/a.seg.PNG", b"png"),
    ("v1.0/b.jpg", b"second"),
    ("v1.0/b.json", b""),
    ("README", b"no field"),
    ("__meta__", b"no field"),
    ("__notes__/x.txt", b"skipped"),
    ("a.jpg", b"other key"),
    ("n01/a.jpg", b"again, not a neighbor"),
    ("x" * 150 + ".jpg", b"long name"),
    ("日本.jpg", b"unicode"),
]


@pytest.mark.parametrize("layout", ["one", "ustar", "gnu"])
def test_tars_group_as_stock_webdataset_does(tmp_path, layout):
    """The samples of a tar are the ones that WebDataset would give: same keys, same fields, same
    bytes, same order.
    """
    members = [m for m in MEMBERS[1:] if m[0] != "n01/a.jpg" or m[1] == JPEG]
    form = {"one": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT}[
        layout
    ]
    members = [m for m in members if layout != "ustar" or len(m[0]) < 100]
    url = make_tar(tmp_path / "a.tar", members, format=form)
    assert our_samples(url) == stock_samples(url)


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("a.jpg", b"1"), ("a.jpg", b"2")], "a.jpg"),
        ([("a.jpg", b"1"), ("a.JPG", b"2")], "a.JPG"),
        ([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")], "'a'"),
        ([("a b.j pg", b"1")], "a b.j pg"),
        ([("../up.jpg", b"1")], "../up"),
        ([("/root.jpg", b"1")], "/root"),
        ([("back\\slash.jpg", b"1")], "back"),
        ([("a.", b"1")], "a."),
        ([("a." + "x" * 101, b"1")], "xxx"),
        ([("a.__x__", b"1")], "__x__"),
        ([("x" * 1025 + ".jpg", b"1")], "xxx"),
    ],
)
def test_tar_members_that_cannot_be_kept(tmp_path, members, word):
    """A name that is twice in a sample, or that a shard cannot hold, is refused by name, not
    renamed or dropped.
    """
    url = make_tar(tmp_path / "bad.tar", members)
    with pytest.raises(EncodeError, match=r"bad\.tar") as caught:
        list_source(url)
    assert word in str(caught.value)


def test_a_member_name_that_is_not_utf8(tmp_path):
    """A tar from another locale is refused by one of our errors, not a UnicodeEncodeError."""
    url = make_tar(
        tmp_path / "bad.tar", [("\xff.jpg", JPEG)], format=tarfile.GNU_FORMAT, encoding="latin-1"
    )
    with pytest.raises(EncodeError, match=r"bad\.tar"):
        list_source(url)


def test_the_same_key_in_two_tars(tmp_path):
    """Keys that collide between tars are refused with the option that keeps them apart; with it,
    both are there.
    """
    for name in "ab":
        make_tar(tmp_path / f"{name}.tar", [("0001.jpg", name.encode())])
    pattern = f"{tmp_path}/{{a,b}}.tar"
    with pytest.raises(EncodeError, match=r"'0001'.*a\.tar.*b\.tar.*--prefix-keys"):
        list_source(pattern)
    expected = [{"__key__": "a/0001", "jpg": b"a"}, {"__key__": "b/0001", "jpg": b"b"}]
    assert (
        our_samples(pattern, prefix_keys=True)
        == our_samples(str(tmp_path), prefix_keys=True)
        == expected
    )


@pytest.mark.parametrize(
    "damage",
    [
        "compressed",
        "empty",
        "text",
        "cut in data",
        "cut in header",
        "garbage header",
        "joined by cat",
    ],
)
def test_damaged_tars(tmp_path, damage):
    """A truncated or damaged tar raises an error that names it, never a shorter dataset."""
    path = tmp_path / "a.tar"
    make_tar(path, [(f"{i}.jpg", JPEG) for i in range(4)])
    data = path.read_bytes()
    member = 512 + -(-len(JPEG) // 512) * 512
    path.write_bytes({
        "compressed": gzip.compress(data),
        "empty": b"",
        "text": b"not a tar" * 200,
        "cut in data": data[: 3 * member + 600],
        "cut in header": data[: 3 * member + 100],
        "joined by cat": data + data,
        "garbage header": data[: 2 * member] + b"\xaa" * 512 + data[2 * member + 512 :],
    }[damage])  # fmt: skip
    with pytest.raises(EncodeError, match=r"a\.tar"):
        list_source(str(path))


def with_size(tar, size):
    """A tar whose first header claims a size, with a right checksum."""
    header = bytearray(tar[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + tar[512:]


@pytest.mark.parametrize("size", [-512, -1024, -1536, -(1 << 40)])
def test_a_tar_that_leads_back_is_refused_at_once(tmp_path, size):
    """A tar member of negative size is refused instead of causing an endless loop."""
    path = tmp_path / "a.tar"
    make_tar(path, [("0.jpg", JPEG), ("1.jpg", JPEG)])
    claimed = b"\xff" + (size % (1 << 88)).to_bytes(11, "big")
    path.write_bytes(with_size(path.read_bytes(), claimed))
    with pytest.raises(EncodeError, match=r"a member claims -.*a\.tar"):
        list_source(str(path))


def test_a_pax_header_that_leads_back_is_refused(tmp_path):
    """A negative size in an extended header is refused as well."""
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("0.jpg")
    info.size = len(JPEG)
    info.pax_headers = {"size": "-2048"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(JPEG))
    with pytest.raises(EncodeError, match=r"a member claims -2048.*a\.tar"):
        list_source(str(path))


def test_what_finder_adds_to_tars_is_left_out(tmp_path):
    """Archives made on a Mac have ``._`` files beside the images; as in folders, hidden files are
    none of the dataset's.
    """
    members = [
        ("d/._1.jpg", b"Mac OS X"),
        ("d/1.jpg", JPEG),
        ("._d", b""),
        ("d/.DS_Store", b""),
        ("d/1.cls", b"0"),
    ]
    assert our_samples(make_tar(tmp_path / "a.tar", members)) == [
        {"__key__": "d/1", "jpg": JPEG, "cls": b"0"}
    ]


@pytest.mark.parametrize("folder", ["__background__", "____", "___x__"])
def test_a_class_that_webdataset_would_take_for_metadata(make_folder, tmp_path, folder):
    """Its images are under a key that stock WebDataset does not pass over; its name stays."""
    source = list_source(make_folder(f"{folder}/1.jpg", "cat/1.jpg"))
    assert source.classes == tuple(sorted(["cat", folder]))
    members = [(f"{sample.key}.jpg", JPEG) for sample in source.samples]
    assert len(stock_samples(make_tar(tmp_path / "a.tar", members))) == 2


def test_a_server_that_cannot_be_sought_in(tmp_path):
    """Images come from a server without ranges; tars there are one error that names them."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "1.jpg").write_bytes(JPEG)
    make_tar(tmp_path / "a.tar", [(f"{i}.jpg", bytes(1 << 20)) for i in range(8)])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert our_samples(f"{url}/d/") == [{"__key__": "1", "jpg": JPEG}]
            with pytest.raises(StorageError, match=r"range requests.*a\.tar"):
                list_source(f"{url}/a.tar")
        finally:
            server.shutdown()


def test_a_sparse_member_is_not_misread(tmp_path):
    """A member that GNU tar stored with holes is refused, or gives the bytes that WebDataset
    gives.
    """
    if shutil.which("tar") is None:
        pytest.skip("GNU TAR IS NOT INSTALLED")
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    (tmp_path / "b.bin").write_bytes(bytes(range(256)) * 8192)
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", "a.bin", "b.bin"], cwd=tmp_path, check=True)
    url = str(tmp_path / "a.tar")
    try:
        assert our_samples(url) == stock_samples(url)
    except PCRError as error:
        assert "a.bin" in str(error)


def test_tars_made_of_a_folder(tmp_path):
    """What ``tar cf x.tar -C folder .`` makes is read, and a hard link in it is the file it links
    to.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"image")
    os.link(tmp_path / "in" / "a.jpg", tmp_path / "in" / "b.jpg")
    subprocess.run(["tar", "cf", tmp_path / "x.tar", "-C", tmp_path / "in", "."], check=True)
    samples = list_source(str(tmp_path / "x.tar")).samples
    assert sorted(sample.key for sample in samples) == ["a", "b"]
    assert [
        storage.read_ranges([(ref.url, ref.start, ref.stop)])
        for sample in samples
        for ref in sample.refs
    ] == [[b"image"]] * 2


def test_tars_of_one_name_in_several_folders(tmp_path):
    """Keys that collide between tars of the same name are kept apart by the folders."""
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
        with tarfile.open(tmp_path / folder / "000.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(EncodeError, match="--prefix-keys"):
        list_source(str(tmp_path))
    assert [sample.key for sample in list_source(str(tmp_path), prefix_keys=True).samples] == [
        "train/000/a",
        "val/000/a",
    ]


def test_a_key_twice_in_a_tar_is_named_as_that(tmp_path):
    """Advice that would not help is not given."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("a.jpg", "b.jpg", "a.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(EncodeError, match=r"'a' is in .*x\.tar and again in .*x\.tar"):
        list_source(str(tmp_path))


@pytest.mark.parametrize(
    ("pattern", "keys", "classes"),
    [
        ("*/*.jpg", ["cat/1", "cat/2", "dog/3"], ("cat", "dog")),
        ("**/*.jpg", ["cat/1", "cat/2", "dog/3"], ("cat", "dog")),
        ("cat/*.jpg", ["1", "2"], ()),
        ("c*/?.jpg", ["cat/1", "cat/2"], ("cat",)),
        ("*/[2-9].*", ["cat/2", "dog/3"], ("cat", "dog")),
        ("{cat,dog}/*.jpg", ["cat/1", "cat/2", "dog/3"], ("cat", "dog")),
    ],
)
@pytest.mark.parametrize("store", ["local", "relative", "file", "memory"])
def test_patterns_of_images(make_folder, tmp_path, monkeypatch, store, pattern, keys, classes):
    """A pattern takes what matches; keys and classes are as in the folder before its wildcards."""
    folder = make_folder("cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "dog/notes.txt")
    if store == "memory":
        memory = fsspec.filesystem("memory")
        for path in tmp_path.rglob("*.jpg"):
            memory.pipe_file(f"/patterns/{path.relative_to(tmp_path)}", path.read_bytes())
        folder = "memory://patterns"
    if store == "file":
        folder = f"file://{folder}"
    if store == "relative":
        monkeypatch.chdir(tmp_path)
    source = list_source(pattern if store == "relative" else f"{folder}/{pattern}")
    assert [sample.key for sample in source.samples] == keys
    assert source.classes == classes
    assert all(read_fields(sample)["jpg"] == JPEG for sample in source.samples)


def test_patterns_of_tars(tmp_path):
    """Tars may be named by a pattern, beside images that it leaves out."""
    for name in ("a-0", "a-1", "b-0"):
        make_tar(tmp_path / f"{name}.tar", [(f"{name}.jpg", JPEG)])
    (tmp_path / "x.jpg").write_bytes(JPEG)
    keys = [sample.key for sample in list_source(f"{tmp_path}/a-*.tar").samples]
    assert keys == ["a-0", "a-1"]


def test_a_pattern_that_matches_nothing(make_folder):
    """A pattern without matches raises an error that repeats the pattern."""
    with pytest.raises(EncodeError, match=r"x\*\.jpg, found none"):
        list_source(make_folder("a.jpg") + "/x*.jpg")


@pytest.mark.parametrize("name", ["[x]*.d", "a*b"])
def test_a_folder_named_like_a_pattern(make_folder, name):
    """A folder that is there is that folder."""
    folder = make_folder(f"{name}/1.jpg", f"{name}/2.jpg")
    assert len(list_source(f"{folder}/{name}").samples) == 2


@pytest.fixture
def web_server(tmp_path):
    """Python's ``http.server``, which lists folders, of a folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None
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


@pytest.mark.parametrize("path", ["nothing", "empty", "page"])
def test_a_web_server_that_lists_nothing(tmp_path, web_server, path):
    """Where a server lists no files, the error says how to name them."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<p>No listing here.</p>")
    with pytest.raises(PCRError, match=r"brace pattern.*\.csv list of URLs"):
        list_source(f"{web_server}/{path}")


def test_a_file_that_nobody_answers_for(tmp_path):
    """A file whose open call hangs, as on a dead network drive, raises an error that names it."""
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(StorageError, match=r"nothing came for 0\.2 s after 0 entries.*a\.tar"):
        list_source(str(tmp_path / "a.tar"), retry=Retry(deadline=0.2))
    # Lets the thread go that waits for a writer.
    os.close(os.open(tmp_path / "a.tar", os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("end", ["photos/?token=SECRET", "a.tar?token=SECRET"])
def test_a_silent_server(make_folder, tmp_path, end):
    """A server that takes the question and says no more is given up, and named without secrets."""
    make_folder("photos/1.jpg")
    make_tar(tmp_path / "a.tar", [("1.jpg", JPEG)])
    with servers.faulty(tmp_path, lambda _: servers.Fault(stall=60)) as server:
        begin = time.monotonic()
        with pytest.raises(StorageError, match=r"no answer within 0\.3 s") as caught:
            list_source(f"{server.url()}{end}", retry=Retry(deadline=0.3))
        assert time.monotonic() - begin < 10
    assert "SECRET" not in str(caught.value)
    assert end.partition("?")[0] in str(caught.value)


def test_a_server_that_falls_silent_within_a_tar(tmp_path):
    """The error says how far it came."""
    tar = make_tar(tmp_path / "a.tar", [(f"{i}.jpg", bytes(3 << 20)) for i in range(4)])
    late = servers.Fault(stall=60)
    faults = [None, None, None, *[late] * 50]
    with servers.faulty(tmp_path, faults) as server:
        assert os.path.getsize(tar) > 12 << 20
        with pytest.raises(StorageError, match=r"came for 0\.5 s after [1-3] entries.*a\.tar"):
            list_source(server.url("a.tar"), retry=Retry(deadline=0.5))


class _EndlessTar(http.server.BaseHTTPRequestHandler):
    """A tar of a petabyte, of empty members whose names ``name`` makes of their number."""

    protocol_version = "HTTP/1.1"
    size = 1 << 50
    name = staticmethod("{}.jpg".format)
    nameless = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
    nameless_sum = sum(nameless[:148]) + 8 * 32 + sum(nameless[156:])

    def _header(self, number):
        """As tarfile writes it, in a tenth of the time."""
        name = self.name(number).encode()
        checksum = self.nameless_sum + sum(name)
        head = name + self.nameless[len(name) : 148] + b"%06o\0 " % checksum
        return head + self.nameless[156:]

    def do_HEAD(self):
        self._answer(200, self.size)

    def do_GET(self):
        first, stop = servers.parse_range(self.headers["Range"])
        stop = min(stop or self.size, first + (1 << 22))
        numbers = range(first // 512, -(-stop // 512))
        blocks = b"".join(map(self._header, numbers))
        self._answer(206, stop - first, first)
        self.wfile.write(blocks[first % 512 :][: stop - first])

    def _answer(self, status, length, first=0):
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + length - 1}/{self.size}")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def endless_tar(name):
    handler = type("_Handler", (_EndlessTar,), {"name": staticmethod(name)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/endless.tar"
        server.shutdown()


def test_a_tar_without_end_and_without_samples(tmp_path):
    """A petabyte of hidden members, none of which is a sample, does not keep ``encode`` busy."""
    with endless_tar(".{}.jpg".format) as url:
        with pytest.raises(StorageError, match=r"nothing came for 1 s.*endless\.tar"):
            list_source(url, retry=Retry(deadline=1))


@pytest.mark.long
def test_a_tar_without_end(tmp_path):
    """A petabyte of samples is refused at a number that is in the message."""
    with endless_tar("{}.jpg".format) as url:
        with pytest.raises(EncodeError, match=r"at most 4194304 members.*endless\.tar"):
            list_source(url)


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
