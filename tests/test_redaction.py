"""A secret in a URL is never shown: not by a message, a log, a warning, nor a file."""

import itertools
import json
import logging
import pickle
import random
import re
import shutil
import traceback
import warnings

import fsspec
import pytest
import servers
import webdataset
from imported_later import Later
from servers import Fault
from support import ROOT

import pcrshard
from pcrshard import PCRDataset, PCRLoader, PrefixCache, ReadOptions, Shard, errors
from pcrshard.cli.main import main
from pcrshard.encoding.sources import list_source
from pcrshard.integrations.lightning_checkpoint import delta_checkpoint_io
from pcrshard.reading.dataset_folder import open_dataset
from pcrshard.redaction import get_logger, redact, redact_url
from pcrshard.storage import join
from pcrshard.testing import make_jpeg

hf = Later("pcrshard.hf")
SECRET = "pl4ntedSecret"
MARKS = [
    "", "@", "'", "/", " ", '"', "?", "#", ":", "%40", "%20", "::", "\\", "é", "(", ")", ",", "&",
    "=", "@/", "/@", "?@", "//", "' ", "[", "{", "<", "$", "~", "+", ";", "`", "|", "*", "!", "^",
]  # fmt: skip
QUERIES = [
    "?X-Amz-Signature={}", "?v=1&token={}", "?a='{}'&b=1", '?a="{}"', "?a='{0}' {0}", "?({})",
    "?x=1, {}", "?x={}#frag", "?{}", "?a={0}&a={0}", "?sig={}%2F%2B", "?q=({0}), '{0}'",
]  # fmt: skip


def url_forms(count, host="127.0.0.1:1", schemes=("http", "memory")):
    """Prefixes and suffixes around a path, each with the secret in it once or more."""
    users = [f"me:{SECRET}{mark}{SECRET}@" for mark in MARKS]
    users += [f"{SECRET}@", f"{SECRET}:@", f"me%3A{SECRET}@", f":{SECRET}@"]
    queries = [query.format(SECRET) for query in QUERIES]
    plain = [(user, query) for user in users for query in ["", queries[0]]]
    pairs = [*plain, *(("", query) for query in queries), *itertools.product(users, queries)]
    forms = [(f"{s}://{user}{host}", query) for user, query in pairs for s in schemes]
    return random.Random(0).sample(forms, min(count, len(forms)))


FORMS = [pytest.param(3), pytest.param(200, marks=pytest.mark.long)]


@pytest.mark.parametrize("query", ["", *QUERIES])
def test_what_is_shown_of_a_url(query):
    """Of any password and query nothing is shown, of the path all, also where a library quotes
    the URL in a text of its own.
    """
    for mark in MARKS:
        url = f"http://me:{SECRET}{mark}{SECRET}@host/dir/a.jpg{query.format(SECRET)}"
        assert redact_url(url) == "http://host/dir/a.jpg" + "?..." * bool(query)
        for text in (url, f"get {url!r} failed", json.dumps({"url": url}), repr([url])):
            assert SECRET not in redact(text, url)
            assert "host/dir/a.jpg" in redact(text, url)


@pytest.mark.parametrize("query", ["", *QUERIES[:4], *QUERIES[7:9]])
def test_urls_that_nobody_named(query):
    """In the text of a library, where a URL may stand anywhere, no secret stays either."""
    for mark in sorted({*MARKS} - {" ", "' "}):
        url = f"http://me:{SECRET}{mark}{SECRET}@host/dir/a.jpg{query.format(SECRET)}"
        for text in (url, f"get {url!r} failed: x", f"404, url={url}, message", f"({url})\nmore"):
            assert SECRET not in redact(text)
            assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "expected 1 (shard=s3://bucket/photos@2x/a.tar, key=me@x)",
        "get http://127.0.0.1:8000/a.tar: 404, for me@x",
        "http://[::1]:80/a.tar (file=file:///a b@c.tar)",
        "a list: x@y, really? yes",
        "/data/a?b@c.tar",
    ],
)
def test_what_is_no_secret_stays(text):
    """Hosts, ports, buckets and keys are shown, because they tell what went wrong."""
    assert redact(text) == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("pipe:cat /data/a-000001.tar", "pipe:... a-000001.tar"),
        (f"pipe:curl -u me:{SECRET} https://host/a.tar", "pipe:... a.tar"),
        (f"pipe:TOKEN={SECRET} curl https://host/a.tar", "pipe:... a.tar"),
        (
            f"zip://a.jpg::https://me:{SECRET}@h/x.zip?s={SECRET}",
            "zip://a.jpg::https://h/x.zip?...",
        ),
        (f"simplecache::http://{SECRET}@h/a.tar", "simplecache::http://h/a.tar"),
        ("/data/a?b@c.tar", "/data/a?b@c.tar"),
        ("file:///data/a?b@c.tar", "file:///data/a?b@c.tar"),
        ("s3://bucket/a@b#1.tar", "s3://bucket/a@b#1.tar"),
    ],
)
def test_urls_of_other_kinds(url, shown):
    """Commands and chains hide what may be secret; names of files stay as they are."""
    assert redact_url(url) == shown


def test_every_logger_redacts():
    """Every module of the package gets its logger from the function that redacts."""
    direct = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "pcrshard").rglob("*.py"))
        if re.search(r"getLogger\(", path.read_text())
    ]
    assert direct == ["pcrshard/cli/main.py", "pcrshard/redaction.py"]


def test_a_log_record_has_no_secret(caplog):
    """What a handler gets is redacted, whatever the handler, and so is a traceback."""
    caplog.set_level(logging.DEBUG, "pcrshard")
    url = f"http://me:{SECRET}@h/a?s={SECRET}"
    get_logger("pcrshard.x").info("%s of %d", url, 3)
    assert caplog.messages == ["http://h/a?... of 3"]
    try:
        raise ValueError(url)
    except ValueError:
        get_logger("pcrshard.x").exception("failed")
    assert caplog.text.count("http://h/a?...") == 2
    assert SECRET not in caplog.text


def test_errors_take_no_secret():
    """Neither the message, nor what a handler appends, nor a copy in another process has it."""
    url = f"http://me:{SECRET} {SECRET}@host/a.tar?s='{SECRET}'"
    error = pickle.loads(pickle.dumps(errors.StorageError(f"cannot read {url}", url=url)))
    error.args = (*error.args, url, "key", 3)
    assert SECRET not in repr(error) + str(error) + repr(error.args)
    assert error.args[1:] == ("http://host/a.tar?...", "key", 3)


def test_options_do_not_show_credentials():
    """Reading options can be printed: keys of a store are left out."""
    options = ReadOptions(storage_options={"key": "me", "secret": SECRET}, prefetch=1)
    assert SECRET not in repr(options)
    assert "prefetch=1" in repr(options)


def test_keys_come_from_the_path(tmp_path):
    """Keys have the URL's path, without host, user or query, and stay distinct."""
    rows = [f"http://me:{SECRET}@host/a/b.jpg?s={SECRET}", "s3://bucket/a/b.jpg", "img/c.jpg",
            f"http://host/?id={SECRET}", f"simplecache::http://{SECRET}@host/d.jpg"]  # fmt: skip
    path = tmp_path / "list.jsonl"
    path.write_text("\n".join(json.dumps({"path": row}) for row in rows))
    keys = [sample.key for sample in list_source(str(path)).samples]
    assert keys == ["a/b", "a/b_1", f"{str(tmp_path)[1:]}/img/c"[-5:], "host", "d"]


# All that is written and printed


def shouting(error):
    """As ``wds.warn_and_continue``, without its half a second of sleep."""
    warnings.warn(repr(error), stacklevel=1)
    return True


def read_by_webdataset(url, cache):
    stock = webdataset.WebDataset([url], shardshuffle=False, handler=shouting)
    for sample in stock.pcr_scan(2, cache_dir=str(cache)).decode("rgb", handler=shouting):
        print(sample["__key__"], sample["__url__"])


def read_by_huggingface(url, cache):
    for streaming in (True, False):
        known = hf.load_dataset(url, scan=2, streaming=streaming, cache_dir=str(cache))
        print(known, list(known))


def doors(url, shard, image, folder):
    """Every way in which a URL comes into the package, by name."""
    given = folder.parent / f"{folder.name}.jsonl"
    given.write_text(json.dumps({"path": image}))
    cache = PrefixCache(str(folder / "cache"))
    return {
        "encode a list": lambda: main(["encode", str(given), str(folder / "b"), "--workers=1"]),
        "encode a pattern": lambda: main(
            ["encode", image.replace("a.jpg", "?.jp*"), str(folder / "i")]
        ),
        "encode splits": lambda: main(["encode", url, str(folder / "j"), "--split", "all"]),
        "encode tars": lambda: main(
            ["encode", f"{shard}::{shard}", str(folder / "k"), "--prefix-keys"]
        ),
        "encode a tar": lambda: pcrshard.encode(shard, folder / "c", workers=1),
        "encode a folder": lambda: pcrshard.encode(url, folder / "d", workers=1),
        "open_dataset": lambda: open_dataset(url),
        "shard": lambda: print(Shard(shard), Shard(shard, cache=cache).load(2)),
        "no such scan": lambda: Shard(shard).prefix_stop(99),
        "verify": lambda: main(["verify", url, "--workers=1"]),
        "info": lambda: main(["info", url]),
        "stage": lambda: main(["stage", url, str(folder / "f"), "--scan=2"]),
        "export": lambda: main(["export", url, str(folder / "g"), "--on-error=skip"]),
        "loader": lambda: list(PCRLoader(PCRDataset(url, scan=2), 4)),
        "huggingface": lambda: read_by_huggingface(url, folder / "arrow"),
        "webdataset": lambda: read_by_webdataset(shard, folder / "cache"),
        "cache": lambda: main(["cache", "ls", str(folder / "cache")]),
        "wrong use": lambda: main(["encode", url, "--no-such-option", shard]),
        "the destination": lambda: print(pcrshard.ShardWriter(url)),
    }


def said_by(door):
    """What a door raises, with its traceback, and its warnings; prints are captured elsewhere."""
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            door()
        except (Exception, SystemExit) as raised:
            error = raised
    said = "".join(traceback.format_exception(error)) + repr(error) if error else ""
    return said + "".join(str(each.message) for each in caught)


def leaks(folder):
    """Files whose name or content has the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes() + bytes(path)]


def urls_of(form):
    """(dataset, shard, image) under a form of URL."""
    start, query = form
    return [f"{start}/{name}{query}" for name in ("ds", "ds/data-000000.tar", "a.jpg")]


@pytest.fixture
def nothing_shown(tmp_path, caplog, capfd):
    """Go through all doors with URLs; afterwards the secret is nowhere."""
    caplog.set_level(logging.DEBUG, "pcrshard")
    shown = []

    def go(number, form, refused=None):
        folder = tmp_path / str(number) / "out"
        folder.mkdir(parents=True)
        for name, door in doors(*urls_of(form), folder).items():
            said = said_by(door)
            assert refused is None or bool(said) == (name in refused), (name, said)
            out, err = capfd.readouterr()
            text = said + out + err + caplog.text
            caplog.clear()
            shown.extend((form, name, line) for line in text.splitlines() if SECRET in line)
        shown.extend((form, "file", str(path)) for path in leaks(folder))
        return shown

    return go


@pytest.mark.parametrize("count", FORMS)
def test_datasets_at_any_url(nothing_shown, dataset, count):
    """No form of URL shows its secret when all goes well: not in keys, journals, caches."""
    store = fsspec.filesystem("memory")
    for number, form in enumerate(url_forms(count, schemes=["memory"])):
        folder, shard, image = urls_of(form)
        store.pipe_file(image, make_jpeg(1))
        store.pipe_file(shard, (dataset / "data-000000.tar").read_bytes())
        for path in dataset.iterdir():
            store.pipe_file(join(folder, path.name), path.read_bytes())
        assert nothing_shown(number, form) == []
        store.store.clear()


@pytest.mark.parametrize("fault", [None, Fault(status=404)])
def test_http_servers(nothing_shown, dataset, tmp_path, fault):
    """With a real server the secret is shown neither when it answers, and each way in gives its
    result, nor when it refuses.
    """
    shutil.copytree(dataset, tmp_path / "served" / "ds")
    (tmp_path / "served" / "a.jpg").write_bytes(make_jpeg(1))
    refused = {"encode a folder", "no such scan", "wrong use", "the destination", "encode a tar"}
    with servers.faulty(tmp_path / "served", lambda _: fault) as server:
        host = f"127.0.0.1:{server.port}"
        form = (f"http://me:{SECRET}@{host}", f"?a={SECRET}")
        assert nothing_shown(0, form, None if fault else refused) == []
        for number, form in enumerate(url_forms(1, host, ["http"]), 1):
            assert nothing_shown(number, form) == []


def test_a_file_that_names_a_version_has_no_secret(tmp_path):
    """Where Lightning's checkpoint file says which store it means, the password is left out."""
    url = f"memory://me:{SECRET}@host/store"
    store = pcrshard.DeltaStore(url)
    plugin = delta_checkpoint_io(store)
    plugin.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert SECRET not in (tmp_path / "a.ckpt").read_text()
    assert plugin.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
