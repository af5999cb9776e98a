"""Keys that are exchanged and signed URLs that expire while a job runs, and uploads that fail."""

import itertools
import os

import fsspec
import pytest
import servers

from pcrshard import PCRDataset, PCRLoader, Retry, ShardWriter, open_dataset, storage
from pcrshard.errors import StorageError
from pcrshard.testing import make_jpeg

HASTY = Retry(attempts=4, first_delay=0.01, timeout=5)
EXPIRED = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)


def with_keys(server, valid):
    """Let an S3 server refuse all keys but those that are valid at the time."""
    answer = server._origin

    def check(method, target, headers, body):
        if any(f"Credential={key}/" in headers.get("Authorization", "") for key in valid):
            return answer(method, target, headers, body)
        return servers.Answer(400, {"Content-Type": "application/xml"}, EXPIRED)

    server._origin = check


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Write a key to the file in which botocore looks for one."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return lambda key: path.write_text(
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
    )


def options_of(server):
    return {name: server.storage_options[name] for name in ("client_kwargs", "config_kwargs")}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_key_that_is_exchanged_during_an_epoch(dataset, keys, num_workers):
    """A job outlives its keys: the epoch ends with all samples, and so do the next one and a new
    dataset, as long as the new key is where the old one was.
    """
    with servers.s3(dataset) as server:
        valid = {"first"}
        with_keys(server, valid)
        keys("first")
        how = {"storage_options": options_of(server), "retry": HASTY}
        opened = PCRDataset(server.url(), scan=1, **how)
        loader = PCRLoader(opened, 2, shuffle=False, num_workers=num_workers)
        for number in range(3):
            seen = []
            for place, batch in enumerate(loader):
                seen += batch["__key__"]
                if place == 1:
                    keys(f"key{number}")
                    valid.clear()
                    valid.add(f"key{number}")
            assert len(seen) == len(set(seen)) == len(opened)
        keys("last")
        valid.clear()
        valid.add("last")
        assert len(PCRDataset(server.url(), scan=1, **how).keys) == len(opened)


def test_a_wrong_key_is_refused_at_once_and_the_right_one_then_taken(dataset, keys):
    """A key that never worked costs one request; once it is mended, the same process reads."""
    with servers.s3(dataset) as server:
        with_keys(server, {"right"})
        keys("wrong")
        how = {"storage_options": options_of(server), "retry": HASTY}
        server.reset()
        with pytest.raises(StorageError, match="PermissionError"):
            open_dataset(server.url(), **how)
        assert len(server.requests()) == 1
        keys("right")
        assert open_dataset(server.url(), **how)[0].num_samples == 24


class Signer:
    """Signs a URL with what is valid at the time."""

    def __init__(self, server):
        self.server, self.number, self.calls = server, 0, 0

    def __call__(self, url):
        self.calls += 1
        return f"{url}?signature=secret{self.number}"

    def check(self, ask):
        if ask.query == f"signature=secret{self.number}":
            return None
        return servers.Fault(status=(403, 400)[self.number % 2], body=EXPIRED)


def test_signed_urls_that_expire_are_signed_anew(dataset):
    """``storage_options={"sign": ...}`` reads a store by signed URLs, however long the epoch is."""
    with servers.faulty(dataset) as server:
        sign = Signer(server)
        server.policy = sign.check
        opened = PCRDataset(
            server.url(""), scan=1, storage_options={"sign": sign}, retry=HASTY, held_bytes=1
        )
        for number in range(len(opened)):
            if number % 5 == 4:
                sign.number += 1
            assert opened[number]["cls"] in (0, 1)
        refused = sum(request.status in (400, 403) for request in server.requests())
        assert refused <= 5  # each expiry costs one request
        sign.check = lambda ask: servers.Fault(status=403)
        server.policy = sign.check
        with pytest.raises(StorageError) as failed:
            _ = opened[0]
        assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    "fault",
    [servers.Fault(drop=True, reset=True), servers.Fault(length_error=9, cut_after=0, reset=True)],
    ids=["before", "after"],
)
def test_uploads_through_a_server_that_resets(fault):
    """One request in five fails, before or after the store has done it: all is written, once."""
    with servers.s3() as server:
        count = itertools.count()

        def policy(ask):
            if ask.method != "PUT" or next(count) % 5 != 3:
                return None
            return fault

        server.policy = policy
        options = {**server.storage_options, "config_kwargs": {"retries": {"max_attempts": 0}}}
        with ShardWriter(server.url("out"), samples_per_shard=1, storage_options=options) as writer:
            for number in range(12):
                writer.write({"__key__": f"{number}", "jpg": make_jpeg(number % 3)})
        index, _ = open_dataset(server.url("out"), storage_options=options)
        assert index.num_samples == 12
        found = storage.list_files(server.url("out"), options=options)
        assert len(found) == 14  # twelve shards, pcr.json and pcr.columns


class Short(fsspec.get_filesystem_class("memory")):
    """A store that loses the end of the first uploads."""

    protocol = ("short",)
    store: dict = {}
    pseudo_dirs: list = [""]
    left = 2

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as file:
            data = file.read()
        Short.left -= 1
        self.pipe_file(rpath, data[:-1] if Short.left >= 0 else data)


def test_an_upload_of_the_wrong_size_is_sent_again():
    """What a store says it holds is compared with what was sent."""
    fsspec.register_implementation("short", Short, clobber=True)
    store = storage.Store(retry=HASTY)
    with storage.atomic_write("short://a/b", options=store) as file:
        file.write(b"0123456789")
    assert storage.read_bytes("short://a/b") == b"0123456789"
    assert Short.left == -1
