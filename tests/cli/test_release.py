"""Moving versions between stores, as a user types it."""

import json
import os
import pty
import subprocess
import termios

import pytest
import torch
from command_line import RUN, check_one_line, run
from servers import nginx

from pcrshard.checkpoint import DeltaStore


def state(number):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(100, 100, generator=generator)
    for _ in range(number):
        weight = weight + torch.randn(100, 100, generator=generator) * 0.01
    return {"w": weight, "b": torch.arange(5)}


@pytest.fixture
def store(tmp_path):
    with DeltaStore(str(tmp_path / "run"), keyframe_every=3) as made:
        for number in range(1, 5):
            made.save(state(number))
    return made


def result_of(done):
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_publish_and_pull(store, tmp_path):
    """A web server between them: a keyframe moves once, later only a delta."""
    web = tmp_path / "web"
    client = tmp_path / "client"
    first = result_of(run("checkpoint", "publish", store.url, web, "--versions", 1, 3, "--json"))
    assert first["releases"] == [1, 3]
    with nginx(web) as server:
        got = result_of(run("checkpoint", "pull", server.url(), client, "--json"))
        assert (got["release"], got["version"], got["files"]) == (3, 2, 2)
        second = result_of(run("checkpoint", "publish", store.url, web, "--versions", 4, "--json"))
        again = result_of(run("checkpoint", "pull", server.url(), client, "--json"))
    assert (again["release"], again["version"]) == (4, 3)
    assert again["moved_bytes"] == second["delta_bytes"] < again["raw_bytes"] / 5
    assert torch.equal(DeltaStore(str(client)).load()["w"], store.load(4)["w"])


def test_what_goes_wrong_is_one_line(store, tmp_path):
    """A folder without releases, a release that is not there, one that is too large."""
    web = tmp_path / "web"
    client = tmp_path / "client"
    web.mkdir()
    failed = run("checkpoint", "pull", web, client)
    check_one_line(failed.returncode, failed.stderr, "there is no releases.json")
    run("checkpoint", "publish", store.url, web)
    failed = run("checkpoint", "pull", web, client, "--release", 9)
    check_one_line(failed.returncode, failed.stderr, "one of the releases 1, 2, 3, 4, got 9")
    failed = run("checkpoint", "pull", web, client, "--max-bytes", 1000)
    check_one_line(failed.returncode, failed.stderr, "at most 1000 bytes", "max_bytes")


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "{store}"),
        pytest.param(("export", "{store}", "1", "{tmp}/x.safetensors"), marks=pytest.mark.long),
        pytest.param(("rebase", "{store}", "--order", "forward"), marks=pytest.mark.long),
        pytest.param(("compact", "{store}", "--keep-last", "2"), marks=pytest.mark.long),
        pytest.param(("diff", "{store}", "1", "4", "{tmp}/x.pcp"), marks=pytest.mark.long),
        ("publish", "{store}", "{tmp}/web"),
    ],
    ids=lambda words: words[0],
)
def test_a_bar_on_a_terminal(store, tmp_path, words):
    """Each long command shows how far it is, and says nothing on standard error elsewhere."""
    command = [word.format(store=store.url, tmp=tmp_path) for word in words]
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    with subprocess.Popen(
        [*RUN, "checkpoint", *command], stdout=subprocess.DEVNULL, stderr=child
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                shown += os.read(parent, 4096)
            except OSError:
                break
    os.close(parent)
    assert process.returncode == 0, shown
    assert words[0].encode() + b":" in shown
    assert b"100%" in shown
