"""Weights arrive on servers bit for bit, also after interrupted updates."""

import functools
import hashlib
import os
import pathlib
import subprocess
import sys

import msgpack
import numpy as np
import pytest
import servers
import torch
from forge import frame, unframe
from safetensors.torch import load_file, save_file
from states import same
from support import ROOT

from pcrshard.checkpoint.sync import WeightMirror, WeightPublisher, publish_weights
from pcrshard.errors import (
    BrokenChain,
    ConcurrentWriter,
    CorruptCheckpoint,
    PCRError,
    UnsupportedState,
    VersionUnavailable,
)
from pcrshard.native import sparse_words


@functools.lru_cache
def weights(step, size=600):
    """Return a policy after some steps that each change a few words; depends only on the number."""
    generator = torch.Generator().manual_seed(step)
    if step == 0:
        embed = (torch.randn(size, 300, generator=generator) * 0.02).bfloat16()
        found = {
            "embed.weight": embed,
            "norm.bias": torch.zeros(7),
            "head.weight": torch.randn(10, 300, generator=generator).half(),
            "mask": torch.ones(5, dtype=torch.bool),
            "empty": torch.empty(0, 4),
        }
        embed[0, :4] = torch.tensor([0.0, -0.0, torch.nan, -torch.inf])
    else:
        found = {name: tensor.clone() for name, tensor in weights(step - 1, size).items()}
        for tensor in (found["embed.weight"][2:], found["head.weight"]):
            changed = torch.rand(tensor.shape, generator=generator) < 0.013
            tensor.view(torch.int16)[changed] += 1 - 2 * (step % 2)
        found["norm.bias"] += 0.5
        found["embed.weight"][1, step % 300] *= -1
    found["count"] = torch.tensor(step)
    return found


def sorted_same(tensors, expected):
    return same(dict(sorted(tensors.items())), dict(sorted(expected.items())))


def check(mirror, step):
    assert sorted_same(load_file(mirror.path), weights(step))
    assert sorted_same(mirror.tensors(), weights(step))


def test_a_mirror_follows_a_publisher(tmp_path):
    """Each step arrives bit for bit, in tensors that a server holds and in the safetensors file."""
    url = str(tmp_path / "stream")
    publisher = WeightPublisher(url)
    assert publisher.publish(weights(0)) == 1
    mirror = WeightMirror(url, str(tmp_path / "mirror"))
    assert mirror.wait() == 1
    held = mirror.tensors()["embed.weight"]
    for step in range(1, 5):
        assert publisher.publish(weights(step)) == step + 1
        assert mirror.wait(newer_than=step, timeout=5) == step + 1
        check(mirror, step)
        assert torch.equal(held.view(torch.int16), weights(step)["embed.weight"].view(torch.int16))
    sizes = [os.path.getsize(path) for path in sorted((tmp_path / "stream").glob("step-*"))]
    changed = 0.013 * (600 * 300 + 3000)
    assert max(sizes[1:]) < 1.3 * changed + 2000
    with pytest.raises(TimeoutError):
        mirror.wait(timeout=0.1)
    assert mirror.wait(newer_than=3) == 5


def test_the_file_is_what_safetensors_writes(tmp_path):
    """The mirror's file equals the safetensors library's, byte for byte."""
    publish_weights(weights(2), str(tmp_path / "stream"))
    mirror = WeightMirror(str(tmp_path / "stream"), str(tmp_path / "mirror"))
    mirror.update()
    save_file(weights(2), tmp_path / "expected.safetensors", {"format": "pt"})
    written = pathlib.Path(mirror.path).read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()
    assert publish_weights(str(tmp_path / "expected.safetensors"), str(tmp_path / "stream")) == 2
    assert mirror.update() == 2
    assert pathlib.Path(mirror.path).read_bytes() == written


def test_several_steps_are_folded_into_one_pass(tmp_path):
    """A mirror that missed steps catches up, even from before the last keyframe."""
    url = str(tmp_path / "stream")
    publisher = WeightPublisher(url, keyframe_every=4)
    publisher.publish(weights(0))
    early, late = (WeightMirror(url, str(tmp_path / name)) for name in ("early", "late"))
    early.update()
    for step in range(1, 14):
        publisher.publish(weights(step))
        if step == 10:
            late.update()
    for mirror in (early, late, WeightMirror(url, str(tmp_path / "new"))):
        assert mirror.update() == 14
        check(mirror, 13)
    numbers = [int(path.name[5:14]) for path in (tmp_path / "stream").glob("step-*")]
    assert min(numbers) == 9


def test_web_servers_and_object_stores(tmp_path):
    """A stream can be served from S3 or by any web server."""
    with servers.s3() as s3:
        options = s3.storage_options
        publisher = WeightPublisher(s3.url("stream"), options=options)
        mirror = WeightMirror(s3.url("stream"), str(tmp_path / "mirror"), options=options)
        with pytest.raises(VersionUnavailable):
            mirror.update()
        for step in range(2):
            publisher.publish(weights(step))
            mirror.update()
        check(mirror, 1)
    publish_weights(weights(0), str(tmp_path / "web"))
    with servers.nginx(tmp_path / "web") as server:
        mirror = WeightMirror(server.url(), str(tmp_path / "other"))
        mirror.update()
        publish_weights(weights(1), str(tmp_path / "web"))
        server.reset()
        mirror.update()
        assert sum(request.body_bytes for request in server.requests()) < 12_000
    check(mirror, 1)


@pytest.mark.parametrize(("call", "kept"), [(1, 0.0), (2, 0.3), (3, 1.0), (4, 0.3)])
def test_no_change_is_applied_twice(tmp_path, monkeypatch, call, kept):
    """If an update stops in the middle of a block, the next update corrects the block."""
    url = str(tmp_path / "stream")
    publisher = WeightPublisher(url)
    publisher.publish(weights(0))
    mirror = WeightMirror(url, str(tmp_path / "mirror"))
    mirror.update()
    for step in (1, 2):
        publisher.publish(weights(step))
    whole, calls = sparse_words.apply, []

    def stop(words, gaps, steps):
        before = words.copy()
        changes = whole(words, gaps, steps)
        calls.append(changes)
        if len(calls) == call:
            places = np.flatnonzero(words != before)[int(kept * changes) :]
            words[places] = before[places]
            raise KeyboardInterrupt
        return changes

    monkeypatch.setattr(sparse_words, "apply", stop)
    with pytest.raises(KeyboardInterrupt):
        mirror.update()
    monkeypatch.undo()
    again = mirror if call % 2 else WeightMirror(url, str(tmp_path / "mirror"))
    assert again.update() == 3
    check(again, 2)


def test_a_patch_of_other_weights_is_refused(tmp_path):
    """A mirror refuses a patch to other weights, even if the step numbers match."""
    for name in ("a", "b"):
        publisher = WeightPublisher(str(tmp_path / name))
        publisher.publish(weights(0 if name == "a" else 3))
        publisher.publish(weights(1 if name == "a" else 4))
    mirror = WeightMirror(str(tmp_path / "a"), str(tmp_path / "mirror"))
    mirror.update()
    publisher.publish(weights(5))
    mirror.url = str(tmp_path / "b")
    with pytest.raises(BrokenChain, match="step 3 is a patch of"):
        mirror.update()
    check(mirror, 1)


def test_other_weights_are_loaded_whole(tmp_path):
    """After a change of shapes or of the publisher, the mirror loads all weights."""
    url = str(tmp_path / "stream")
    first, second = WeightPublisher(url), WeightPublisher(url)
    first.publish(weights(0))
    mirror = WeightMirror(url, str(tmp_path / "mirror"))
    mirror.update()
    first.publish({"w": torch.ones(3)})
    assert mirror.update() == 2
    assert torch.equal(load_file(mirror.path)["w"], torch.ones(3))
    assert second.publish(weights(1)) == 3
    assert mirror.update() == 3
    check(mirror, 1)
    with pytest.raises(ConcurrentWriter):
        first.publish({"w": torch.zeros(3)})
    assert first.publish(weights(2)) == 4
    assert mirror.update() == 4
    check(mirror, 2)


def forged(data, **changes):
    """Return a step with changed header fields and a matching digest."""
    header, payload = unframe(data)
    header |= changes
    content = msgpack.packb(header | {"digest": bytes(32)}) + payload
    return (
        frame(b"\x89PCW\r\n\x1a\n", header | {"digest": hashlib.sha256(content).digest()}) + payload
    )


def test_damaged_and_forged_steps_change_nothing(tmp_path):
    """A flipped bit anywhere, a cut, or a lie about blocks, types, or coders is refused."""
    url = tmp_path / "stream"
    publisher = WeightPublisher(str(url))
    publisher.publish(weights(0))
    mirror = WeightMirror(str(url), str(tmp_path / "mirror"))
    mirror.update()
    publisher.publish(weights(1))
    path = url / "step-000000002.pcw"
    whole = path.read_bytes()
    steps = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        for place in range(0, len(whole), 499)
    ]
    header, _ = unframe(whole)
    steps += [whole[:-1], whole + b"x"]
    steps += [
        forged(whole, **{name: header[name] + bytes(4)}) for name in ("coders", "sizes", "crcs")
    ]
    steps.append(forged(whole, tensors=[["w", ["complex128", [3]]]]))
    steps.append(forged(whole, tensors=[["w", ["float32", [3]]]]))
    for data in steps:
        path.write_bytes(data)
        with pytest.raises(PCRError):
            mirror.update()
        assert mirror.step == 1
    check(mirror, 0)
    for coder in (2, 9):  # refused when it is applied; the next update reloads all weights
        path.write_bytes(forged(whole, coders=bytes([coder]) * len(header["coders"])))
        with pytest.raises(CorruptCheckpoint):
            mirror.update()
    path.write_bytes(whole)
    mirror.update()
    check(mirror, 1)
    path.unlink()
    with pytest.raises(VersionUnavailable, match="there is no keyframe"):
        WeightMirror(str(url), str(tmp_path / "new")).update()


def test_limits_are_enforced(tmp_path):
    """A mirror refuses more than ``max_bytes``, and a publisher what safetensors cannot hold."""
    publish_weights(weights(0), str(tmp_path / "stream"))
    mirror = WeightMirror(str(tmp_path / "stream"), str(tmp_path / "mirror"), max_bytes=10_000)
    with pytest.raises(PCRError, match="at most"):
        mirror.update()
    for tensor in (torch.empty(3, device="meta"), torch.ones(3).to(torch.complex128)):
        with pytest.raises(UnsupportedState, match="key=w"):
            publish_weights({"w": tensor}, str(tmp_path / "stream"))


def test_a_policy_is_trained_here_and_served_there(tmp_path):
    """The example script serves the trained policy from another process."""
    script = [sys.executable, str(ROOT / "scripts" / "weight_sync.py")]
    stream = str(tmp_path / "stream")
    server = subprocess.Popen(
        [*script, "serve", stream, str(tmp_path / "served")], stdout=subprocess.PIPE, text=True
    )
    trained = subprocess.run([*script, "train", stream], check=True, capture_output=True, text=True)
    served, _ = server.communicate(timeout=60)
    assert server.returncode == 0
    assert trained.stdout.splitlines()[-1].endswith("mean reward 1.00")
    assert served.splitlines()[-1] == "serving step 60, 100% of answers right"


def test_slow_links_threads_and_hashes(tmp_path):
    """Slow links, threads, and full hashes yield the same weights; changes are detected."""
    size, sizes = 2000, {}
    for slow in (False, True):
        url = str(tmp_path / f"stream-{slow}")
        publisher = WeightPublisher(url, slow_link=slow, sha256=True, workers=3)
        mirror = WeightMirror(url, str(tmp_path / f"mirror-{slow}"), workers=2)
        for step in range(3):
            number = publisher.publish(weights(step, size))
            assert mirror.update() == number
        assert sorted_same(mirror.tensors(), weights(2, size))
        sizes[slow] = os.path.getsize(tmp_path / f"stream-{slow}" / f"step-{number:09d}.pcw")
    assert sizes[True] < sizes[False]
    # A word that changes in the file while nobody looks is found by the next step.
    mirror.tensors()["embed.weight"][5, 5] += 1
    publisher.publish(weights(3, size))
    with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
        mirror.update()
    mirror.update()
    assert sorted_same(mirror.tensors(), weights(3, size))
