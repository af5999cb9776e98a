"""Weights arrive on servers bit for bit, also after interrupted updates."""

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import runpy
import shutil
import sys
import tracemalloc

import msgpack
import pytest
import servers
import torch
from children import start
from forge import frame, unframe
from safetensors.torch import save, save_file
from states import same
from support import ROOT, damage

from pcrshard.errors import (
    ConcurrentWriter,
    CorruptCheckpoint,
    PCRError,
    StorageError,
    UnsupportedState,
    VersionUnavailable,
)
from pcrshard.native import sparse_words
from pcrshard.weightsync import WeightMirror, WeightPublisher


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


def check(mirror, expected):
    """Compare the file with the one that the safetensors library writes, and the tensors."""
    assert pathlib.Path(mirror.path).read_bytes() == save(expected, {"format": "pt"})
    assert same(dict(sorted(mirror.tensors().items())), dict(sorted(expected.items())))


@pytest.fixture
def options():
    return {}


@pytest.fixture
def stream(tmp_path, options):
    """Return a publisher of step 1 and a mirror that has it."""
    publisher = WeightPublisher(str(tmp_path / "stream"), **options)
    assert publisher.publish(weights(0)) == 1
    mirror = WeightMirror(str(tmp_path / "stream"), str(tmp_path / "mirror"))
    assert mirror.wait() == 1
    return publisher, mirror


@pytest.mark.parametrize(("options", "size"), [({}, 1.3), ({"slow_link": True, "workers": 3}, 1.2)])
def test_a_mirror_follows_a_publisher(stream, tmp_path, size):
    """Each step arrives bit for bit, in tensors that a server holds and in the safetensors file."""
    publisher, mirror = stream
    held = mirror.tensors()["embed.weight"]
    for step in range(1, 5):
        assert publisher.publish(weights(step)) == step + 1
        assert mirror.wait(newer_than=step, timeout=5) == step + 1
        check(mirror, weights(step))
        assert torch.equal(held.view(torch.int16), weights(step)["embed.weight"].view(torch.int16))
    sizes = [os.path.getsize(path) for path in sorted((tmp_path / "stream").glob("step-*"))]
    changed = 0.013 * (600 * 300 + 3000)
    assert max(sizes[1:]) < size * changed + 2000
    assert WeightMirror(mirror.url, str(tmp_path / "mirror"), workers=2).step == 5
    with pytest.raises(TimeoutError):
        mirror.wait(timeout=0.1)
    assert mirror.wait(newer_than=3) == 5
    save_file(weights(5), tmp_path / "trained.safetensors")
    assert publisher.publish(str(tmp_path / "trained.safetensors")) == 6
    assert mirror.update() == 6
    check(mirror, weights(5))


def test_a_published_file_is_not_held_in_memory(tmp_path):
    """Beside its copy of the weights, a publisher takes memory for some tensors of a file."""
    path = tmp_path / "trained.safetensors"
    publisher = WeightPublisher(tmp_path / "files")
    found = {f"w{i}": torch.randn(400, 500) for i in range(20)}
    save_file(found, path)
    publisher.publish(path)
    found["w3"][::50] += 1
    save_file(found, path)
    tracemalloc.start()
    assert publisher.publish(path) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 3
    for damaged in (tmp_path / "missing", tmp_path):
        with pytest.raises(StorageError, match="cannot read"):
            publisher.publish(damaged)


def test_a_word_that_changed_in_the_file_is_found(stream):
    """If someone writes to the file, the next step fails, and then all weights are reloaded."""
    publisher, mirror = stream
    mirror.tensors()["embed.weight"][5, 5] += 1
    publisher.publish(weights(1))
    with pytest.raises(CorruptCheckpoint, match="do not match their checksums"):
        mirror.update()
    mirror.update()
    check(mirror, weights(1))


def test_several_steps_are_folded_into_one_pass(tmp_path):
    """A mirror that missed steps catches up; one that is reading from a keyframe can finish."""
    url = str(tmp_path / "stream")
    publisher = WeightPublisher(url, keyframe_every=4, keep=4)
    publisher.publish(weights(0))
    early, late = (WeightMirror(url, str(tmp_path / name)) for name in ("early", "late"))
    early.update()
    for step in range(1, 14):
        publisher.publish(weights(step))
        if step == 10:
            late.update()
    for mirror in (early, late, WeightMirror(url, str(tmp_path / "new"))):
        assert mirror.update() == 14
        check(mirror, weights(13))
    numbers = [int(path.name[9:18]) for path in (tmp_path / "stream").glob("keyframe-*")]
    assert sorted(numbers) == [8, 12]


def test_any_web_server_can_serve_a_stream(tmp_path):
    """A mirror of a web server's folder transfers a step's changes only."""
    url = str(tmp_path / "web")
    publisher = WeightPublisher(url)
    publisher.publish(weights(0))
    with servers.nginx(url) as server:
        mirror = WeightMirror(server.url(), str(tmp_path / "mirror"))
        mirror.update()
        publisher.publish(weights(1))
        server.reset()
        mirror.update()
        assert sum(request.body_bytes for request in server.requests()) < 12_000
    check(mirror, weights(1))


def test_the_folder_of_a_mirror_is_any_local_one(tmp_path, monkeypatch):
    """A home folder and a ``file://`` URL are folders; an object store is refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    url = str(tmp_path / "stream")
    WeightPublisher(url).publish(weights(0))
    for folder in ("~/mirror", f"file://{tmp_path}/other", tmp_path / "third"):
        mirror = WeightMirror(url, folder)
        mirror.update()
        check(mirror, weights(0))
    with pytest.raises(ValueError, match="expected a local folder"):
        WeightMirror(url, "memory://mirror")
    with pytest.raises(StorageError, match="make the folder"):
        WeightMirror(url, tmp_path / "mirror" / "model.safetensors.live" / "folder")


def test_an_object_store_can_hold_a_stream(tmp_path, s3):
    """A stream on S3 can be mirrored once something is published."""
    url, options = s3.url("stream"), s3.storage_options
    mirror = WeightMirror(url, str(tmp_path), options=options)
    with pytest.raises(VersionUnavailable):
        mirror.update()
    WeightPublisher(url, options=options).publish(weights(0))
    mirror.update()
    check(mirror, weights(0))


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_no_change_is_applied_twice(stream, tmp_path, monkeypatch, call):
    """If an update stops between two changes, the next update, or the next mirror, corrects it."""
    publisher, mirror = stream
    for step in (1, 2):
        publisher.publish(weights(step))
    whole, calls = sparse_words.apply, []

    def stop(*args):
        calls.append(args)
        if len(calls) > call:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(sparse_words, "apply", stop)
    with pytest.raises(KeyboardInterrupt):
        mirror.update()
    monkeypatch.undo()
    again = mirror if call % 2 else WeightMirror(mirror.url, str(tmp_path / "mirror"))
    assert again.update() == 3
    check(again, weights(2))


def test_a_stream_that_began_again_is_loaded_whole(stream, tmp_path):
    """A mirror never applies a patch to other weights, even if the step numbers match."""
    publisher, mirror = stream
    for step in (1, 2):
        publisher.publish(weights(step))
    assert mirror.update() == 3
    (tmp_path / "stream" / "latest").write_text("2")  # from a cache
    assert mirror.update() == 3
    with pytest.raises(TimeoutError):
        mirror.wait(timeout=0.1)
    check(mirror, weights(2))
    shutil.rmtree(tmp_path / "stream")
    other = WeightPublisher(mirror.url)
    other.publish(weights(4))
    assert mirror.wait(timeout=1) == 1
    check(mirror, weights(4))
    shutil.rmtree(tmp_path / "stream")
    other = WeightPublisher(mirror.url)
    assert other.publish(weights(5)) == 1  # the number that the mirror has
    assert mirror.wait(newer_than=0) == 1
    check(mirror, weights(5))
    shutil.rmtree(tmp_path / "stream")
    other = WeightPublisher(mirror.url)
    other.publish(weights(4))
    assert mirror.update() == 1
    check(mirror, weights(4))
    for step in (5, 6):
        other.publish(weights(step))
    shutil.rmtree(tmp_path / "stream")
    other = WeightPublisher(mirror.url)
    for step in (7, 8):
        other.publish(weights(step))
    first = tmp_path / "stream" / "step-000000001.pcw"
    first.rename(tmp_path / "first")
    with pytest.raises(VersionUnavailable, match="no keyframe"):
        mirror.update()
    check(mirror, weights(4))
    (tmp_path / "first").rename(first)
    assert mirror.update() == 2
    check(mirror, weights(8))


def test_after_a_damaged_step_the_next_keyframe_is_loaded(tmp_path):
    """One damaged step does not keep a mirror from the keyframes after it."""
    publisher = WeightPublisher(tmp_path / "stream", keyframe_every=3)
    publisher.publish(weights(0))
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "served")
    mirror.update()
    publisher.publish(weights(1))
    damage(tmp_path / "stream" / "step-000000002.pcw")
    publisher.publish(weights(2))
    assert mirror.update() == 3
    check(mirror, weights(2))


def test_weights_that_no_mirror_accepts_are_not_published(tmp_path):
    """Names and values that a safetensors file cannot hold are errors of the publisher."""
    publisher = WeightPublisher(tmp_path / "stream")
    for name, value in ((0, torch.ones(1)), ("x" * 5000, torch.ones(1)), ("w", 3.0)):
        with pytest.raises(UnsupportedState, match="expected"):
            publisher.publish({name: value})
    with pytest.raises(UnsupportedState, match="reserves"):
        publisher.publish({"__metadata__": torch.ones(1)})
    for name in ("keyframe_every", "keep"):
        with pytest.raises(ValueError, match=name):
            WeightPublisher(tmp_path, **{name: 0})
    with pytest.raises(ValueError, match="layout"):
        WeightPublisher(tmp_path, layout="tar")
    conjugate = torch.tensor([1 + 2j]).conj()
    publisher.publish({"w": conjugate})
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "served")
    mirror.update()
    assert torch.equal(mirror.tensors()["w"], conjugate.resolve_conj())


def test_other_weights_are_loaded_whole(stream):
    """After a change of shapes or of the publisher, the mirror loads all weights."""
    first, mirror = stream
    second = WeightPublisher(mirror.url)
    for number, (publisher, expected) in enumerate(
        [(first, {"w": torch.ones(3)}), (second, weights(1)), (first, weights(2))], 2
    ):
        if number == 4:
            with pytest.raises(ConcurrentWriter):
                publisher.publish({"w": torch.zeros(3)})
        assert publisher.publish(expected) == mirror.update() == number
        check(mirror, expected)


def forged(data, **changes):
    """Return a step with changed header fields and a matching digest."""
    header, payload = unframe(data)
    header |= changes
    content = msgpack.packb(header | {"digest": bytes(32)}) + payload
    return (
        frame(b"\x89PCW\r\n\x1a\n", header | {"digest": hashlib.sha256(content).digest()}) + payload
    )


def test_damaged_and_forged_steps_change_nothing(stream, tmp_path):
    """A flipped bit anywhere, a cut, or a lie about blocks, types, names, or coders is refused."""
    publisher, mirror = stream
    publisher.publish(weights(1))
    path = tmp_path / "stream" / "step-000000002.pcw"
    whole = path.read_bytes()
    header, _ = unframe(whole)
    lies = [{name: header[name] + bytes(4)} for name in ("coders", "sizes", "crcs")]
    lies += [{"tensors": [["w", [dtype, [3]]]]} for dtype in ("complex128", "float32")]
    lies += [{"tensors": order} for order in (header["tensors"][::-1], header["tensors"] * 2)]
    steps = [whole[:-1], whole + b"x", *(forged(whole, **lie) for lie in lies)]
    for place in range(0, len(whole), 499):
        path.write_bytes(whole)
        damage(path, place)
        steps.append(path.read_bytes())
    first = path.with_name("step-000000001.pcw")
    honest = first.read_bytes()
    first.write_bytes(forged(honest, tensors=[["w", ["complex128", [3]]]]))
    with pytest.raises(PCRError):
        WeightMirror(mirror.url, str(tmp_path / "new")).update()
    first.write_bytes(honest)
    for data in steps:
        path.write_bytes(data)
        with pytest.raises(PCRError):
            mirror.update()
        assert mirror.step == 1
    check(mirror, weights(0))
    for coder in (2, 9):  # refused when it is applied; the next update reloads all weights
        path.write_bytes(forged(whole, coders=bytes([coder]) * len(header["coders"])))
        with pytest.raises(CorruptCheckpoint):
            mirror.update()
    path.write_bytes(forged(whole[:-20] + bytes(20)))
    with pytest.raises(CorruptCheckpoint, match="Zstandard"):
        mirror.update()
    path.write_bytes(whole)
    mirror.update()
    check(mirror, weights(1))
    path.unlink()
    with pytest.raises(VersionUnavailable, match="there is no keyframe"):
        WeightMirror(mirror.url, str(tmp_path / "new")).update()


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    """A mirror removes what a killed one left; a publisher waits an hour, for another may write."""
    names = ("m/.pcrshard-1.tmp", "s/.pcrshard-1.tmp", "s/.pcrshard-2.tmp")
    mirrored, old, young = (tmp_path / name for name in names)
    for path in (mirrored, old, young):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"partial")
    os.utime(old, (0, 0))
    WeightPublisher(tmp_path / "s").publish(weights(0))
    WeightMirror(str(tmp_path / "s"), str(tmp_path / "m")).update()
    assert [path.exists() for path in (mirrored, old, young)] == [False, False, True]


def test_limits_are_enforced(stream, tmp_path):
    """A mirror refuses more than ``max_bytes``, and a publisher what safetensors cannot hold."""
    publisher, mirror = stream
    with pytest.raises(PCRError, match="at most"):
        WeightMirror(mirror.url, str(tmp_path / "small"), max_bytes=10_000).update()
    for tensor in (torch.empty(3, device="meta"), torch.ones(3).to(torch.complex128)):
        with pytest.raises(UnsupportedState, match="key=w"):
            publisher.publish({"w": tensor})


def run_script(connection, *words):
    """Run the example script in this process, and send what it prints."""
    torch.set_num_threads(1)
    sys.argv = ["weight_sync.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "scripts" / "weight_sync.py"), run_name="__main__")
    connection.send(printed.getvalue().splitlines()[-1])


@pytest.mark.changed("scripts/weight_sync.py", "pcrshard/weightsync")
def test_a_policy_is_trained_here_and_served_there(tmp_path):
    """The example script serves the trained policy from another process."""
    url = str(tmp_path / "stream")
    server, served = start(run_script, "serve", url, str(tmp_path / "served"))
    trainer, trained = start(run_script, "train", url)
    assert trained.recv().startswith("published step 60, mean reward ")
    assert served.recv() == "serving step 60, 100% of answers right"
    for process in (server, trainer):
        process.join()
        assert process.exitcode == 0
