"""Disk deltas are exchanged with slime, miles and SGLang, as their documents describe them."""

import contextlib
import json
import struct
import zlib

import numpy as np
import pytest
import torch
import zstandard
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from support import damage

from pcrshard.errors import ConcurrentWriter, CorruptCheckpoint, PCRError, VersionUnavailable
from pcrshard.weightsync import WeightMirror, WeightPublisher

INDEX = "model.safetensors.index.json"


def weights(step):
    """Weights of several types; few words differ between steps, and one tensor never changes."""
    generator = torch.Generator().manual_seed(0)
    wide = (torch.randn(300, 200, generator=generator) * 0.02).bfloat16()
    wide.view(torch.int16)[:, step] += 1
    packed = torch.randint(0, 255, (16, 8), dtype=torch.uint8, generator=generator)
    packed[step % 16] ^= 7
    return {
        "wide": wide,
        "packed": packed.view(torch.float4_e2m1fn_x2),
        "bias": torch.full((7,), float(step)),
        "same": torch.ones(5),
    }


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(raw(found[name]), raw(expected[name])) for name in expected)


def pull(local, source, target):
    """Bring tensors (bytes by name) up to a version as an engine does, by the documents alone."""
    versions = []
    for number in range(target, 0, -1):
        folder = source / f"weight_v{number:06d}"
        index = json.loads((folder / INDEX).read_text())
        versions.insert(0, (number, folder, index["metadata"]))
        if "delta_encoding" not in index["metadata"] or local.get("") == number - 1:
            break
    for number, folder, about in versions:
        if "delta_encoding" not in about:
            local.clear()
            local |= {n: raw(t).copy() for n, t in load_file(folder / "model.safetensors").items()}
        else:
            assert (int(about["version"]), int(about["base_version"])) == (number, number - 1)
            assert (about["delta_encoding"], about["compression_format"]) == ("xor", "zstd")
            for path in folder.glob("*.safetensors"):
                blob = path.read_bytes()
                (size,) = struct.unpack("<Q", blob[:8])
                header = json.loads(blob[8 : 8 + size])
                checksums = header.pop("__metadata__")
                for name, entry in header.items():
                    start, stop = entry["data_offsets"]
                    part = blob[8 + size + start : 8 + size + stop]
                    change = zstandard.ZstdDecompressor().decompress(part)
                    local[name] ^= np.frombuffer(change, np.uint8)
                    assert f"{zlib.adler32(local[name]):08x}" == checksums[name]
        local[""] = number
    return {name: value for name, value in local.items() if name}


def write_delta(source, number, now, before, encoding, checksum):
    """Publish differences in two shards as a trainer does, by the documents alone."""
    folder = source / f"weight_v{number:06d}"
    folder.mkdir(parents=True)
    weight_map, shards = {}, ({}, {})
    sums = ({}, {})
    for place, name in enumerate(now):
        new, old = raw(now[name]), raw(before[name])
        where = np.flatnonzero(new != old).astype("<u4")
        if not len(where):
            continue
        if encoding == "xor":
            change = (new ^ old).tobytes()
        else:
            change = np.uint32(len(where)).tobytes() + where.tobytes() + new[where].tobytes()
        packed = zstandard.ZstdCompressor(level=1).compress(change)
        shards[place % 2][name] = np.frombuffer(packed, np.uint8)
        sums[place % 2][name] = checksum(new.tobytes())
        weight_map[name] = f"model-{place % 2:05d}-of-00002.safetensors"
    for shard in range(2):
        data = save(shards[shard], metadata=sums[shard])
        (folder / f"model-{shard:05d}-of-00002.safetensors").write_bytes(data)
    about = {
        "version": f"{number:06d}", "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding, "compression_format": "zstd",
        "checksum_format": "adler32" if checksum is adler32 else "xxh3-128",
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps({"metadata": about, "weight_map": weight_map}))


def adler32(data):
    return f"{zlib.adler32(data):08x}"


def xxh3(data):
    return pytest.importorskip("xxhash").xxh3_128_hexdigest(data)


def test_an_engine_follows_a_publisher(tmp_path):
    """An engine that follows, and one that comes late, have each step bit for bit."""
    model, source = tmp_path / "model", tmp_path / "stream"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "old.safetensors", INDEX):
        (model / name).write_text("{}")
    publisher = WeightPublisher(source, layout="disk-delta", model=model, keyframe_every=4, keep=4)
    early = {}
    for step in range(1, 11):
        assert publisher.publish(weights(step)) == step
        expected = {name: raw(tensor) for name, tensor in weights(step).items()}
        for local in (early, {}):
            found = pull(local, source, step)
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
    names = {path.name for path in (source / "weight_v000008").iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", INDEX}
    assert min(path.name for path in source.glob("weight_v*")) == "weight_v000004"


@pytest.mark.parametrize("replace", [False, True])
def test_a_mirror_follows_a_publisher_of_disk_deltas(tmp_path, replace):
    """A mirror reads this layout like its own: steps, keyframes, steps at which nothing changed."""
    publisher = WeightPublisher(tmp_path / "s", layout="disk-delta", keyframe_every=4, workers=2)
    mirror = WeightMirror(tmp_path / "s", tmp_path / "m", replace=replace)
    for step in (1, 2, 2, 3, 4, 5, 6, 7, 8):
        number = publisher.publish(weights(step))
        if step not in (5, 7):
            assert mirror.wait(newer_than=number - 1, timeout=5) == number
            same(mirror.tensors(), weights(step))
    assert mirror.update() == number
    late = WeightMirror(tmp_path / "s", tmp_path / "late")
    assert late.update() == number
    same(late.tensors(), weights(8))
    assert WeightMirror(tmp_path / "s", tmp_path / "m", replace=replace).step == number


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", [adler32, xxh3])
def test_a_mirror_follows_a_trainer(tmp_path, encoding, checksum):
    """A mirror starts from the model that a trainer's first delta refers to, and follows."""
    source, base = tmp_path / "stream", tmp_path / "base"
    base.mkdir()
    whole = weights(0)
    shards = [{"wide": whole["wide"]}, {n: t for n, t in whole.items() if n != "wide"}]
    for number, shard in enumerate(shards):
        save_file(shard, base / f"{number}.safetensors")
    weight_map = {name: f"{n}.safetensors" for n, shard in enumerate(shards) for name in shard}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (base / INDEX).write_text(json.dumps(index))
    mirror = WeightMirror(source, tmp_path / "mirror", base=base)
    with pytest.raises(VersionUnavailable, match="no weights"):
        mirror.update()
    for number in range(1, 6):
        write_delta(source, number, weights(number), weights(number - 1), encoding, checksum)
        if number != 3:
            assert mirror.update() == number
            same(mirror.tensors(), weights(number))
    with pytest.raises(VersionUnavailable, match="keyframe"):
        WeightMirror(source, tmp_path / "new").update()
    full = source / "weight_v000006"  # an ordinary checkpoint
    full.mkdir()
    save_file(weights(6), full / "model.safetensors")
    (full / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(weights(6), "model.safetensors")})
    )
    write_delta(source, 7, weights(7), weights(6), encoding, checksum)
    new = WeightMirror(source, tmp_path / "new")
    for each in (mirror, new):
        assert each.update() == 7
        same(each.tensors(), weights(7))


def test_damaged_and_hostile_versions_are_refused(tmp_path):
    """A flipped bit, a path to elsewhere, a wrong size or base is an error, and no weights."""
    source = tmp_path / "stream"
    publisher = WeightPublisher(source, layout="disk-delta")
    publisher.publish(weights(1))
    mirror = WeightMirror(source, tmp_path / "mirror", replace=True)
    mirror.update()
    publisher.publish(weights(2))
    folder = source / "weight_v000002"
    shard, index = folder / "model-00000-of-00001.safetensors", folder / INDEX
    honest, told = shard.read_bytes(), json.loads(index.read_text())
    lies = [
        {"weight_map": {"wide": "../weight_v000001/model.safetensors"}},
        {"weight_map": {"wide": "missing.safetensors"}},
        {"weight_map": {}, "metadata": "x"},
        *({"metadata": told["metadata"] | change} for change in (
            {"version": "000003"}, {"base_version": "000007"}, {"compression_format": "lz4"},
            {"delta_encoding": "sum"}, {"delta_encoding": "overwrite"},
            {"checksum_format": "md5"},
        )),
    ]  # fmt: skip
    for lie in lies:
        index.write_text(json.dumps(told | lie))
        with pytest.raises(PCRError):
            mirror.update()
    index.write_text(json.dumps(told))
    for place in range(0, len(honest), 97):
        damage(shard, place)
        (source / "latest").write_text("1")
        each = WeightMirror(source, tmp_path / f"at-{place}", replace=True)
        each.update()
        (source / "latest").write_text("2")
        with contextlib.suppress(PCRError):  # the padding of a header may have any blanks
            each.update()
        same(each.tensors(), weights(each.step))
        assert each.step == 1 or place < 500
        shard.write_bytes(honest)
    shard.write_bytes(honest[:-1])
    with pytest.raises(CorruptCheckpoint):
        mirror.update()
    shard.write_bytes(honest)
    same(mirror.tensors(), weights(1))
    with pytest.raises(PCRError, match="at most"):
        WeightMirror(source, tmp_path / "small", max_bytes=10_000).update()
    assert mirror.update() == 2
    same(mirror.tensors(), weights(2))


def test_a_stream_may_change_its_layout(tmp_path):
    """The next publisher of a folder may write the other layout; numbers and mirrors continue."""
    mirror = WeightMirror(tmp_path / "s", tmp_path / "m")
    number = 0
    for layout in ("pcrshard", "disk-delta", "pcrshard"):
        publisher = WeightPublisher(tmp_path / "s", layout=layout)
        for step in range(3):
            number += 1
            assert publisher.publish(weights(step)) == mirror.update() == number
            same(mirror.tensors(), weights(step))


@pytest.mark.parametrize("layouts", [("pcrshard", "disk-delta"), ("disk-delta", "pcrshard")])
def test_two_publishers_of_two_layouts_do_not_mix(tmp_path, layouts):
    """Whoever is overtaken by a publisher of another layout gets an error instead of a fork; the
    next call publishes a full copy.
    """
    first, second = (WeightPublisher(tmp_path / "s", layout=layout) for layout in layouts)
    mirror = WeightMirror(tmp_path / "s", tmp_path / "m")
    assert [first.publish(weights(0)), first.publish(weights(1))] == [1, 2]
    assert second.publish(weights(2)) == 3
    with pytest.raises(ConcurrentWriter, match="another process publishes"):
        first.publish(weights(3))
    assert mirror.update() == 3
    same(mirror.tensors(), weights(2))
    assert first.publish(weights(4)) == mirror.update() == 4
    same(mirror.tensors(), weights(4))


def test_disk_deltas_on_an_object_store(tmp_path, s3):
    """The folders of versions are prefixes of a bucket."""
    url, options = s3.url("deltas"), s3.storage_options
    publisher = WeightPublisher(
        url, layout="disk-delta", keyframe_every=2, keep=1, keep_seconds=0.1, options=options
    )
    mirror = WeightMirror(url, tmp_path, options=options)
    for step in range(1, 6):
        assert publisher.publish(weights(step)) == mirror.update() == step
        same(mirror.tensors(), weights(step))
