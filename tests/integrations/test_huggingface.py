"""HuggingFace datasets: one line to load, shards that split, and exact resume.

Also what stock `datasets` shows of a preview.
"""

import contextlib
import glob
import importlib.metadata
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile

import pytest
import servers
from hugging_face import datasets, huggingface, keys, load_dataset, write
from PIL import Image
from support import ROOT, read_samples, run_python, saved
from torch.utils.data import DataLoader

import pcrshard
from pcrshard.cli.main import main
from pcrshard.errors import CorruptPiece, FormatError
from pcrshard.testing import make_jpeg

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
    ),
    # datasets leaves tars and Arrow files to the garbage collector
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata
]


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def encoded(dataset):
    """The images as bytes, undecoded."""
    return dataset.cast_column("jpg", datasets.Image(decode=False))


def expected(url, scan="full"):
    return list(read_samples(url, scan).values())


# ---------------------------------------------------------------- what comes


@pytest.mark.parametrize("scan", [1, 5, "full"])
@pytest.mark.parametrize("streaming", [True, False])
def test_one_line_gives_the_shards_samples(streaming, scan, dataset):
    """Streamed or map-style, rows are the samples of the shards at that scan, byte for byte."""
    rows = load_dataset(dataset, scan=scan, streaming=streaming)
    assert rows.features == datasets.Features(
        {
            "__key__": datasets.Value("string"),
            "jpg": datasets.Image(),
            "cls": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    assert [(row["__key__"], row["jpg"]["bytes"], b"%d" % row["cls"]) for row in encoded(rows)] == [
        (sample["__key__"], sample["jpg"], sample["cls"]) for sample in expected(dataset, scan)
    ]


def test_a_local_file_of_the_same_name_is_not_read(dataset, synthetic_folder, monkeypatch):
    """In the folder of the source photographs one still gets the scan, not the photograph."""
    monkeypatch.chdir(synthetic_folder)
    assert all(os.path.exists(f"{row['__key__']}.jpg") for row in load_dataset(dataset))
    for streaming in (True, False):
        rows = encoded(load_dataset(dataset, scan=1, streaming=streaming))
        assert [row["jpg"]["bytes"] for row in rows] == [
            sample["jpg"] for sample in expected(dataset, 1)
        ]


def test_other_fields_follow_webdatasets_extensions(tmp_path):
    """Text and numbers are exact, and JSON is the text that was stored, unless a type is given.

    What is not known stays bytes, also pickles.
    """
    text = '{"box": [0.1, 1e-300], "n": 123456789012345678901234567890}'
    fields = {"txt": "gr\u00fcn", "id": 7, "json": text, "npy": b"\x93NUMPY", "pyd": b"\x80\x04."}
    url = write(tmp_path, [fields, {"json": '["other"]'}], samples_per_shard=1)
    for streaming in (True, False):
        first, second = load_dataset(url, streaming=streaming, columns=[*fields])
        assert first == fields
        assert second == dict.fromkeys(fields) | {"json": '["other"]'}
    url = write(tmp_path / "typed", [{"json": {"a": i}} for i in range(2)])
    features = datasets.Features({"json": {"a": datasets.Value("int32")}})
    assert [row["json"] for row in load_dataset(url, features=features)] == [{"a": 0}, {"a": 1}]


def test_columns_are_those_of_the_schema(tmp_path):
    """A field that no sample of the first shard has is a column all the same."""
    samples = [{"cls": 1}, {"cls": 2, "txt": "found"}]
    url = write(tmp_path, samples, samples_per_shard=1, kinds={"txt": "text"})
    assert [row["txt"] for row in load_dataset(url)] == [None, "found"]
    assert [row["cls"] for row in load_dataset(url, columns=["cls"])] == [1, 2]


def test_classes_that_are_called_by_numbers(tmp_path):
    """A label is the number that was stored, also where a class is called by another number."""
    url = write(tmp_path, [{"cls": 1}, {"cls": 2}], classes=["1", "10", "2"])
    rows = load_dataset(url, columns=["cls"])
    assert [rows.features["cls"].int2str(row["cls"]) for row in rows] == ["10", "2"]


def test_features_say_the_types(dataset):
    """Given features replace the inferred ones, and choose the columns."""
    features = datasets.Features(
        {"cls": datasets.Value("string"), "jpg": datasets.Image(decode=False)}
    )
    row = next(iter(load_dataset(dataset, features=features)))
    assert list(row) == ["cls", "jpg"]
    assert row["cls"].encode() == expected(dataset)[0]["cls"]
    assert row["jpg"]["bytes"] == expected(dataset)[0]["jpg"]


@pytest.mark.parametrize("streaming", [True, False])
def test_what_does_not_fit_is_named(streaming, tmp_path):
    """A label that is no number is an error with shard and key.

    A column that is not there is refused at once.
    """
    url = write(tmp_path, [{"cls": "cat"}])
    with pytest.raises((FormatError, datasets.exceptions.DatasetGenerationError)) as caught:
        list(load_dataset(url, streaming=streaming))
    assert "invalid literal" in str(caught.value if streaming else caught.value.__cause__)
    assert "key=k0" in str(caught.value if streaming else caught.value.__cause__)
    with pytest.raises(
        ValueError, match=r"expected columns of \['__key__', 'jpg', 'cls'\], got \['png'\]"
    ):
        load_dataset(url, columns=["jpg", "png"], streaming=streaming)


def test_damage_is_named(dataset, tmp_path):
    """A damaged shard ends with an error that names shard, key and scan, not with fewer rows."""
    folder = shutil.copytree(dataset, tmp_path / "damaged")
    index, urls = pcrshard.open_dataset(folder)
    with open(urls[1], "r+b") as file:
        file.seek(index.shards[1].prefix_stops[0] - 600)
        file.write(b"\xff" * 8)
    with pytest.raises(CorruptPiece, match=r"data-000001.tar, key=.*scan=1"):
        list(load_dataset(folder))
    with pytest.raises(datasets.exceptions.DatasetGenerationError) as caught:
        load_dataset(folder, streaming=False, cache_dir=str(tmp_path))
    assert isinstance(caught.value.__cause__, CorruptPiece)


# ---------------------------------------------------------------- shards, order and state


def test_nodes_split_the_shards(dataset):
    """Each node reads its own shards, and together they read every sample once."""
    rows = load_dataset(dataset, scan=1)
    assert rows.num_shards == 4
    from datasets.distributed import split_dataset_by_node

    parts = [keys(split_dataset_by_node(rows, rank, 2)) for rank in range(2)]
    _, urls = pcrshard.open_dataset(dataset)
    by_shard = [keys(pcrshard.Shard(url).samples(1)) for url in urls]
    assert parts == [by_shard[0] + by_shard[2], by_shard[1] + by_shard[3]]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("stop", [0, 8, 24])
def test_resume_is_exact(stop, shuffled, dataset):
    """A saved state goes on at the very next sample, in the middle of a shard and at its end.

    Also of shuffled shards, and it survives JSON.
    """

    def load(scan):
        rows = load_dataset(dataset, scan=scan)
        return rows.shuffle(seed=1, buffer_size=1) if shuffled else rows

    rows = load(1)
    source = iter(rows)
    done = [next(source)["__key__"] for _ in range(stop)]
    state = json.loads(json.dumps(rows.state_dict()))
    resumed = load(5)
    resumed.load_state_dict(state)
    assert done + keys(resumed) == keys(load(1))


def test_resume_with_workers_is_exact(dataset):
    """Each DataLoader worker goes on in the middle of its shard."""
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="NO TORCHDATA: pip install torchdata"
    )

    def loader():
        rows = load_dataset(dataset, scan=1, columns=["__key__"])
        return stateful.StatefulDataLoader(rows, batch_size=None, num_workers=2)

    whole = keys(loader())
    assert sorted(whole) == sorted(keys(expected(dataset, 1)))
    first = loader()
    source = iter(first)
    done = [next(source)["__key__"] for _ in range(9)]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert done + keys(second) == whole


def test_a_dataset_travels_to_spawned_workers(dataset, tmp_path):
    """Streams can be pickled, with storage options and a cache."""
    cache = pcrshard.PrefixCache(str(tmp_path / "cache"))
    rows = load_dataset(dataset, scan=1, prefix_cache=cache, storage_options={"auto_mkdir": False})
    assert keys(pickle.loads(pickle.dumps(rows))) == keys(expected(dataset, 1))


def test_a_level_changes_while_one_reads(dataset):
    """Running workers read the new scan from their next shard on.

    A map-style dataset has one scan.
    """
    level = pcrshard.ScanLevel(1)
    rows = encoded(load_dataset(dataset, scan=level))
    source = iter(DataLoader(rows, batch_size=None, num_workers=1, prefetch_factor=1))
    got = [next(source)]
    level.value = "full"
    got += source
    images = [row["jpg"]["bytes"] for row in got]
    low, full = ([sample["jpg"] for sample in expected(dataset, scan)] for scan in (1, "full"))
    changes = [image == high for image, high in zip(images, full, strict=True)]
    assert all(image in pair for image, *pair in zip(images, low, full, strict=True))
    assert not changes[0]
    assert changes[-1]
    with pytest.raises(TypeError, match="needs streaming=True"):
        load_dataset(dataset, scan=level, streaming=False)


# ---------------------------------------------------------------- what is read


def test_a_remote_stream_reads_prefixes_only(dataset):
    """Over HTTP each shard is one request of its prefix.

    A resumed stream asks for no shard that is done.
    """
    index, _ = pcrshard.open_dataset(dataset)
    stop = {f"/{entry.name}": entry.prefix_stop(2) for entry in index.shards}
    with servers.nginx(dataset) as server:
        rows = load_dataset(server.url(), scan=2)
        assert [request.path for request in server.requests()] == ["/pcr.json"]
        server.reset()
        for row in rows:
            if row["__key__"] == expected(dataset)[13]["__key__"]:
                break
        state = rows.state_dict()
        assert [(r.path, r.range) for r in server.requests()] == [
            (path, (0, end)) for path, end in [*stop.items()][:3]
        ]
        server.reset()
        rows.load_state_dict(state)
        assert keys(rows) == keys(expected(dataset)[14:])
        assert [(r.path, r.range, r.body_bytes) for r in server.requests()] == [
            (p, (0, end), end) for p, end in [*stop.items()][2:]
        ]


def test_the_arrow_cache_is_made_once_per_scan_and_content(dataset, tmp_path):
    """A second map-style load reads nothing but pcr.json, from whatever copy.

    Another scan or dataset is another cache.
    """
    folder, cache = shutil.copytree(dataset, tmp_path / "shards"), str(tmp_path / "arrow")

    def files(**options):
        rows = load_dataset(
            **{"url": str(folder), "scan": 1, "streaming": False, "cache_dir": cache} | options
        )
        return len(rows), [file["filename"] for file in rows.cache_files]

    first = files()
    assert first[0] == 24
    assert first == files(url=f"{folder}/") == files(url=str(dataset))
    made = os.stat(first[1][0]).st_mtime_ns
    assert files(scan=2)[1] != first[1] != files(columns=["cls"])[1]
    assert files(split="train[:25%]") == (6, first[1])
    for path in folder.glob("*.tar"):
        path.unlink()
    assert files() == first
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        files(scan=3)
    pcrshard.stage(dataset, tmp_path / "staged", scan=1)
    assert files(url=str(tmp_path / "staged"))[1] != first[1]
    assert os.stat(first[1][0]).st_mtime_ns == made


def test_the_builder_is_public(dataset, tmp_path):
    """The builder supports the steps of `datasets` itself: multiprocess, and Parquet."""
    with pytest.raises(ValueError, match="expected data_dir"):
        huggingface.PcrBuilder(scan=1)
    builder = huggingface.PcrBuilder(data_dir=str(dataset), scan=2, cache_dir=str(tmp_path))
    builder.download_and_prepare(str(tmp_path / "parquet"), file_format="parquet", num_proc=2)
    rows = datasets.load_dataset(
        "parquet", data_files=glob.glob(f"{tmp_path}/parquet/*.parquet"), split="train"
    )
    assert {(row["__key__"], row["jpg"]["bytes"]) for row in encoded(rows)} == {
        (sample["__key__"], sample["jpg"]) for sample in expected(dataset, 2)
    }


def hub(folder):
    """An origin with the four kinds of request of the Hub that reading takes, and its redirect."""
    files = servers.folder_origin(folder)
    about = {"id": "me/pets", "sha": "0" * 40, "private": False, "size": 1, "totalFiles": 5}
    about["createdAt"] = "2026-01-01T00:00:00.000Z"
    listed = [{"type": "file", "path": f.name, "size": f.stat().st_size} for f in folder.iterdir()]
    listed = [{"oid": "0" * 40, "xetHash": "0" * 64} | file for file in listed]

    def answer(method, target, headers, body):
        path = target.partition("?")[0]
        if path.startswith("/files/"):
            return files(method, path.removeprefix("/files"), headers, body)
        if "/resolve/" in path:
            return servers.Answer(302, {"Location": f"/files/{path.rpartition('/')[2]}"})
        shown = listed if "/tree" in path else about
        status = 404 if path.startswith("/api/buckets/me/pets/paths") else 200
        kind = {"Content-Type": "application/json"}
        return servers.Answer(status, kind, json.dumps(shown).encode())

    return answer


def test_the_hub_is_asked_for_prefixes_only(dataset, tmp_path):
    """hf:// takes one request of the prefix a shard, as any store; so do its buckets.

    The Hub is played by a server on loopback: the client is real, its answers are ours.
    """
    program = (
        "import sys, pcrshard.hf;"
        "urls = ['hf://datasets/me/pets', 'hf://buckets/me/pets'];"
        "rows = [pcrshard.hf.load_dataset(url, scan=2, streaming=True) for url in urls];"
        "print([sum(1 for _ in each) for each in rows])"
    )
    with contextlib.closing(servers.FaultServer(hub(dataset), ())) as server:
        online = {"HF_ENDPOINT": server.url()[:-1], "HF_HOME": str(tmp_path)}
        online |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        said = run_python("-c", program, env=online)
        log = [(r.path, r.range) for r in server.requests() if r.path.startswith("/files/")]
    assert said.strip() == "[24, 24]"
    index, _ = pcrshard.open_dataset(dataset)
    assert [path for path, _ in log[:2]] == ["/files/pcr.json"] * 2
    prefixes = [(f"/files/{entry.name}", (0, entry.prefix_stop(2))) for entry in index.shards]
    assert log[2:] == prefixes * 2


# ---------------------------------------------------------------- stock datasets, the Hub's viewer


@pytest.fixture(scope="module")
def carded(preview_folder, tmp_path_factory):
    """A copy with the files that `pcrshard card` writes."""
    folder = shutil.copytree(preview_folder, tmp_path_factory.mktemp("carded") / "pets")
    assert main(["card", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("streaming", [True, False])
def test_the_stock_loader_shows_a_preview(streaming, preview_folder, tmp_path):
    """Stock `webdataset` shows the images at scan 2 with labels, a row each, no hidden member."""
    files = sorted(glob.glob(f"{preview_folder}/*.tar"))
    rows = datasets.load_dataset(
        "webdataset",
        data_files={"train": files},
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    assert list(rows.features) == ["cls", "jpg", "__key__", "__url__"]
    assert rows.features["jpg"] == datasets.Image()
    shown = [(row["__key__"], row["cls"], row["jpg"]["bytes"]) for row in encoded(rows)]
    assert shown == [
        (sample["__key__"], int(sample["cls"]), sample["jpg"])
        for sample in expected(preview_folder, 2)
    ]
    with tarfile.open(files[0]) as tar:
        assert len([name for name in tar.getnames() if name.startswith("__pcr_")]) == 11


@pytest.mark.parametrize("streaming", [True, False])
def test_a_card_names_the_labels_and_finds_the_shards(streaming, carded, tmp_path):
    """With the card, `load_dataset(FOLDER)` takes the tars for the data, and labels have names.

    So does the Hub's viewer.
    """
    rows = datasets.load_dataset(
        str(carded), split="train", streaming=streaming, cache_dir=str(tmp_path)
    )
    assert rows.features["cls"] == datasets.ClassLabel(names=["cat", "dog"])
    names = rows.features["cls"].names
    assert all(
        row["__key__"].startswith(f"{names[row['cls']]}/") and row["jpg"].size for row in rows
    )
    assert len(list(rows)) == 24


_ON_DATASETS_3 = """
import json, sys, datasets, pcrshard.hf
script, url, carded = sys.argv[1:]
def shown(rows):
    rows = rows.cast_column("jpg", datasets.Image(decode=False))
    return [[row["__key__"], row["cls"], row["jpg"]["bytes"].hex()] for row in rows]
def load(streaming):
    how = {"split": "train", "streaming": streaming, "trust_remote_code": True}
    return datasets.load_dataset(script, data_dir=url, scan=5, **how)
def ours(streaming):
    return pcrshard.hf.load_dataset(url, scan=5, streaming=streaming)
rows = pcrshard.hf.load_dataset(url, scan=5, streaming=True)
source = iter(rows)
done = [next(source)["__key__"] for _ in range(8)]
rows.load_state_dict(rows.state_dict())
card = datasets.load_dataset(carded, split="train", streaming=True)
print(json.dumps({
    "version": datasets.__version__,
    "script": [shown(load(True)), shown(load(False))],
    "hf": [shown(ours(True)), shown(ours(False))],
    "resumed": done + [row["__key__"] for row in rows],
    "names": load(True).features["cls"].names,
    "card": [len(list(card)), card.features["cls"].names],
}))
"""


@pytest.fixture(scope="module")
def datasets_3(tmp_path_factory):
    """A Python that has datasets 3 and what pcrshard needs; this package comes by PYTHONPATH."""
    folder = tmp_path_factory.mktemp("hf3") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    needed = [line for line in importlib.metadata.requires("pcrshard") if "extra ==" not in line]
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*pip, "datasets>=3,<4", "Pillow", *needed], check=True
    )  # without our constraints, which name a newer datasets
    return folder / "bin" / "python"


@pytest.mark.long
def test_datasets_3_and_its_loading_script(datasets_3, dataset, carded, tmp_path):
    """With datasets 3 the script, pcrshard.hf and the card give the rows of the current version."""
    environment = os.environ | {
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    script = ROOT / "scripts" / "hf" / "pcr_dataset.py"
    command = [datasets_3, "-c", _ON_DATASETS_3, script, dataset, carded]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    got = json.loads(result.stdout.splitlines()[-1])
    assert got["version"].startswith("3.")
    samples = expected(dataset, 5)
    rows = [[sample["__key__"], int(sample["cls"]), sample["jpg"].hex()] for sample in samples]
    assert got["script"] == got["hf"] == [rows, rows]
    assert got["resumed"] == keys(samples)
    assert got["names"] == ["cat", "dog"]
    assert got["card"] == [24, ["cat", "dog"]]


def test_lists_late_fields_and_kept_files(tmp_path):
    """Rows have lists of images, late fields from their scan on, and kept files as images."""
    png = saved(Image.new("RGB", (9, 9)), "PNG")
    fmt = pcrshard.ShardFormat("standard", deferred={"txt": 5})
    with pcrshard.ShardWriter(tmp_path, fmt=fmt) as writer:
        for i in range(3):
            views = [make_jpeg(j, 9, 9) for j in range(i)]
            sample = {"__key__": f"k{i}", "cls": i, "txt": "late", "views.jpg": views}
            writer.write(sample | {"jpg": make_jpeg(i, 20, 30), "png": png})
    assert set(load_dataset(tmp_path, scan=0).features) == {"__key__", "cls"}
    rows = list(load_dataset(tmp_path, scan=2))
    assert [len(row["views.jpg"]) for row in rows] == [0, 1, 2]
    assert rows[2]["views.jpg"][1].size == (9, 9)
    assert rows[0]["png"].size == (9, 9)
    assert "txt" not in rows[0]
    assert [row["txt"] for row in load_dataset(tmp_path, scan=5)] == ["late"] * 3
    level = pcrshard.ScanLevel(2)
    rows = load_dataset(tmp_path, scan=level)
    for level.value, text in ((2, None), (5, "late")):  # rising, it has the columns that it reaches
        assert [row["txt"] for row in rows] == [text] * 3


def test_a_full_cache_starts_a_stream_while_the_server_is_down(dataset, tmp_path, monkeypatch):
    """``prefix_cache`` keeps the dataset index with the prefixes."""
    monkeypatch.setattr(pcrshard.Retry, "delay", lambda *_: 0)

    def read(url):
        cache = pcrshard.PrefixCache(tmp_path / "cache")
        return keys(load_dataset(url, scan=2, streaming=True, prefix_cache=cache))

    with servers.nginx(dataset) as server:
        url = server.url()
        expected = read(url)
    assert read(url) == expected
