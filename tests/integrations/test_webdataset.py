"""pcr_scan in WebDataset: every way in which people build pipelines."""

import os
import pathlib
import shutil
import warnings

import numpy as np
import pytest
import servers
import webdataset as wds
from support import CountingFS, damage, pieces, run_python, without_place

import pcrshard
from pcrshard import ImageDecoder, JpegHandler, ScanLevel, Shard, View, pcr_scan
from pcrshard.errors import CorruptJpeg, NotAShard, PCRError, ScanUnavailable
from pcrshard.native.pool import draw_key
from pcrshard.testing import make_jpeg

warnings.filterwarnings("ignore", message="WebDataset.shardshuffle=", category=UserWarning)


def dataset_of(urls, **kwargs):
    return wds.WebDataset(urls, **({"shardshuffle": False} | kwargs))


def keys(samples):
    return sorted(sample["__key__"] for sample in samples)


def test_samples_are_those_of_the_plain_tar(shard_urls, plain_tars):
    """Shards at scan 5 give what stock WebDataset gives from tars of the same images, in order."""
    got, stock = list(dataset_of(shard_urls).pcr_scan(5)), list(dataset_of(plain_tars))
    assert without_place(got) == without_place(stock)
    assert [set(sample) for sample in got] == [set(sample) for sample in stock]
    assert {sample["__url__"] for sample in got} == set(shard_urls)
    assert all(
        type(sample["jpg"]) is bytes and sample["jpg"].endswith(b"\xff\xd9") for sample in got
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds.pcr_scan(2).shuffle(10).decode("rgb8").to_tuple("jpg", "cls"),
        lambda ds: ds.shuffle(10).pcr_scan(2).decode("rgb8").to_tuple("jpg", "cls"),
        lambda ds: ds.shuffle(10).decode("rgb8").to_tuple("jpg", "cls").pcr_scan(2),
        lambda ds: ds.decode(JpegHandler("rgb8")).pcr_scan(2).to_tuple("jpg", "cls"),
    ],
)
def test_order_of_fluent_calls_does_not_matter(build, shard_urls):
    """pcr_scan may stand before or after shuffle, decode and to_tuple."""
    samples = list(build(dataset_of(shard_urls)))
    assert len(samples) == 24
    assert all(image.dtype == np.uint8 and label in (0, 1) for image, label in samples)


def test_leaves_the_original_pipeline_alone(shard_urls):
    """The dataset that pcr_scan was called on still reads whole records, as stock WebDataset."""
    ds = dataset_of(shard_urls)
    ds.pcr_scan(2)
    assert "scan01" in next(iter(ds))


def test_a_level_changes_at_the_next_shard(shard_urls):
    """Raising the level while reading takes effect at the next shard."""
    level = ScanLevel(1)
    sizes = []
    for i, sample in enumerate(dataset_of(shard_urls).pcr_scan(level)):
        sizes.append(len(sample["jpg"]))
        if i == 5:
            level.value = 10
    low = [len(sample["jpg"]) for sample in dataset_of(shard_urls).pcr_scan(1)]
    high = [len(sample["jpg"]) for sample in dataset_of(shard_urls).pcr_scan(10)]
    assert sizes == low[:6] + high[6:]


def test_in_a_plain_pipeline(shard_urls):
    """The stage stands in for tarfile_to_samples in a DataPipeline; files may have a scheme."""
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(shard_urls), wds.split_by_worker, pcr_scan(5), wds.shuffle(5)
    )
    assert keys(pipeline) == keys(dataset_of(shard_urls).pcr_scan(5))
    for scheme in ("file:", "file://"):
        urls = [f"{scheme}{url}" for url in shard_urls]
        assert keys(dataset_of(urls).pcr_scan(5)) == keys(pipeline)


def test_resampled_and_mixed(shard_urls, dataset):
    """Resampled shards and RandomMix work as ever."""
    resampled = dataset_of(shard_urls, resampled=True, shardshuffle=None).pcr_scan(
        1, index=str(dataset)
    )
    assert len([None for _, _ in zip(range(60), resampled, strict=False)]) == 60
    mixed = wds.RandomMix(
        [dataset_of(shard_urls[:2]).pcr_scan(1), dataset_of(shard_urls[2:]).pcr_scan(5)],
        longest=True,
    )
    assert len(list(mixed)) == 24


def test_select_and_rename_files_are_honoured(shard_urls, plain_tars):
    """select_files and rename_files do what they do for plain tars."""
    options = {
        "select_files": lambda name: not name.endswith(".cls"),
        "rename_files": lambda name: name.replace("jpg", "image.jpeg"),
    }
    got = without_place(dataset_of(shard_urls, **options).pcr_scan(5))
    assert got == without_place(dataset_of(plain_tars, **options))
    assert set(got[0]) == {"__key__", "image.jpeg"}


def test_one_request_a_shard_with_an_index(shard_urls, dataset):
    """With the dataset index, given as a folder or an object, each shard is one request."""
    urls = [f"counting://{url}" for url in shard_urls]
    for index in (str(dataset), pcrshard.open_dataset(dataset)[0]):
        CountingFS.requests.clear()
        found = keys(dataset_of(urls).pcr_scan(2, index=index))
        assert len(CountingFS.requests) == len(urls)
        assert found == keys(dataset_of(shard_urls).pcr_scan(2))


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_share_the_shards(method, workers, shard_urls):
    """DataLoader workers read each sample once, under fork and spawn."""
    ds = (
        dataset_of(shard_urls)
        .pcr_scan(ScanLevel(2))
        .decode(JpegHandler("torchrgb8"))
        .to_tuple("__key__", "jpg")
    )
    loader = wds.WebLoader(ds, batch_size=None, num_workers=workers, multiprocessing_context=method)
    seen = [key for key, _ in loader]
    assert len(seen) == len(set(seen)) == 24


def break_shard(url, folder, *, piece):
    """Copy a shard with a damaged sample, or with a damaged index."""
    path = shutil.copy(url, folder)
    damage(pathlib.Path(path), int(pieces(pcrshard.Shard(url)).starts[1, 2, 0]) if piece else 1100)
    return path


@pytest.mark.parametrize(("piece", "left"), [(True, 23), (False, 18)])
def test_handlers_are_honoured(piece, left, shard_urls, tmp_path):
    """warn_and_continue loses the damaged sample or shard and no other.

    By default the damage raises.
    """
    urls = [*shard_urls[:1], break_shard(shard_urls[1], tmp_path, piece=piece), *shard_urls[2:]]
    with pytest.raises(PCRError, match=os.path.basename(urls[1])):
        list(dataset_of(urls).pcr_scan(5))
    seen = []
    handler = lambda error: not seen.append(error)
    assert len(list(dataset_of(urls, handler=handler).pcr_scan(5))) == left
    assert len(seen) == 1
    assert seen[0].args[-1] == urls[1]
    stopped = list(dataset_of(urls, handler=wds.ignore_and_stop).pcr_scan(5))
    assert len(stopped) == (8 if piece else 6)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_that_is_cut_off_yields_what_came_whole(dataset, shard_urls, tmp_path, indexed):
    """Under ignore_and_stop its samples come at its last complete scan, with a warning, and then
    the stream ends; a shard without a whole scan ends it at once, and other handlers skip it.
    """
    shard = Shard(shard_urls[1])
    data = pathlib.Path(shard_urls[1]).read_bytes()
    path = tmp_path / os.path.basename(shard_urls[1])
    options = {"index": str(dataset)} if indexed else {}
    for cut, scan in ((shard.prefix_stop(4) + 700, 4), (shard.prefix_stop(1), 1)):
        path.write_bytes(data[:cut])
        urls = [shard_urls[0], str(path), *shard_urls[2:]]
        whole = list(Shard(shard_urls[0]).samples(6)) + list(shard.samples(scan))
        with pytest.warns(UserWarning, match=rf"{path.name}.*those of scan {scan}"):
            found = list(dataset_of(urls, handler=wds.ignore_and_stop).pcr_scan(6, **options))
        assert [sample["jpg"] for sample in found] == [sample["jpg"] for sample in whole]
        skipped = list(dataset_of(urls, handler=wds.ignore_and_continue).pcr_scan(6, **options))
        assert len(skipped) == 18
    path.write_bytes(data[:1500])
    assert len(list(dataset_of(urls, handler=wds.ignore_and_stop).pcr_scan(6, **options))) == 6


def by_hand(samples, decoder, seed):
    """What pcr_decode gives of samples, each alone."""
    for number, sample in enumerate(samples):
        jpegs = {name: value for name, value in sample.items() if name.endswith("jpg")}
        key = draw_key(seed, 0, 0, 0, number)
        yield sample | {name: decoder(value, key) for name, value in jpegs.items()}


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"size": 16, "crop": "random", "flip": 0.5},
        {"size": 16, "crop": "center", "return_geometry": True},
        {"views": [View(12, 2), View((8, 9), 1)]},
        {"crop": "random", "layout": "hwc"},
    ],
    ids=str,
)
def test_pcr_decode_gives_what_each_image_gives(threads, options, tmp_path):
    """Samples come in their order with the pixels of each image alone, for any number of threads;
    an image and its mask have the same crop, and CMYK, damaged and missing images are no matter.
    """
    with pcrshard.ShardWriter(tmp_path, samples_per_shard=9) as writer:
        for i in range(21):
            sample = {"__key__": f"k{i:02d}", "cls": i}
            mode = {3: "L", 7: "CMYK"}.get(i, "RGB")
            if i != 5:
                sample |= {
                    "jpg": make_jpeg(i, 40 + i, 50, mode),
                    "mask.jpg": make_jpeg(i, 40 + i, 50),
                }
            writer.write(sample)
    source = dataset_of(pcrshard.open_dataset(tmp_path)[1]).pcr_scan(10)
    found = list(source.pcr_decode(seed=3, threads=threads, **options))
    assert [sample["cls"] for sample in found] == [str(i).encode() for i in range(21)]
    for got, expected in zip(found, by_hand(source, ImageDecoder(**options), 3), strict=True):
        assert got.keys() == expected.keys()
        for name in got:
            assert str(got[name]) == str(expected[name])
            if isinstance(got[name], np.ndarray):
                assert np.array_equal(got[name], expected[name])


def test_pcr_decode_takes_a_decoder():
    """``.pcr_decode()`` takes the ImageDecoder of a PCRDataset, with no options beside it."""
    samples = [{"__key__": "a", "jpg": make_jpeg(1, 40, 50)}]
    decoder = ImageDecoder(16, "center", layout="hwc")
    (found,) = pcrshard.pcr_decode(decoder)(samples)
    assert np.array_equal(found["jpg"], decoder(samples[0]["jpg"]))
    for beside in ({"crop": "random"}, {"layout": "hwc"}):
        with pytest.raises(TypeError, match="in the ImageDecoder"):
            pcrshard.pcr_decode(ImageDecoder(16), **beside)
    with pytest.raises(ValueError, match="threads to be a whole number of at least 0, got -1"):
        pcrshard.pcr_decode(8, threads=-1)


def test_pcr_scan_after_a_reader_says_what_to_leave_out():
    """In a DataPipeline that reads tars already, the error says that pcr_scan does this."""
    with pytest.raises(TypeError, match=r"in a DataPipeline .* tarfile_to_samples"):
        list(pcr_scan(2)([{"__key__": "a", "jpg": b""}]))


@pytest.mark.parametrize("threads", [0, 2])
def test_what_cannot_be_decoded_goes_to_the_handler(threads):
    """The handler gets each error in order, and says whether later samples follow."""
    jpegs = [b"\xff\xd8 garbage" if i == 12 else make_jpeg(i, 20, 20) for i in range(20)]
    samples = [{"__key__": str(i), "__url__": "a.tar", "jpg": jpeg} for i, jpeg in enumerate(jpegs)]
    seen = []
    stage = pcrshard.pcr_decode(8, threads=threads)
    with pytest.raises(CorruptJpeg, match=r"\(shard=a\.tar, key=12\)") as raised:
        seen.extend(sample["__key__"] for sample in stage(samples))
    assert seen == [str(i) for i in range(12)]
    assert raised.value.args[1:] == ("12", "a.tar")
    for go_on, stop in ((True, 20), (False, 12)):
        stage = pcrshard.pcr_decode(8, threads=threads, handler=lambda error, go_on=go_on: go_on)
        got = [sample["__key__"] for sample in stage(samples)]
        assert got == [str(i) for i in range(stop) if i != 12]


def test_any_error_of_a_decoder_goes_to_the_handler():
    """As in WebDataset's own stages, an error of the user's decoder is handled, and names the
    sample.
    """

    class Own(pcrshard.ImageDecoder):
        def __call__(self, *given):
            raise ValueError("mine")

    seen = []
    stage = pcrshard.pcr_decode(Own(8), handler=lambda error: seen.append(error) or True)
    assert list(stage([{"__key__": "x", "__url__": "a.tar", "jpg": make_jpeg()}])) == []
    assert "(shard=a.tar, key=x)" in seen[0].__notes__[0]


def with_a_stage_between(urls):
    found = dataset_of(urls)
    found.pipeline.insert(-2, lambda source: source)
    return found


ONCE = (TypeError, r"opens and expands tars, WebDataset\(urls\), once")
WRONG = {
    "a WebLoader": (lambda urls: wds.WebLoader(dataset_of(urls)).pcr_scan(2), *ONCE),
    "applied twice": (lambda urls: dataset_of(urls).pcr_scan(2).pcr_scan(3), *ONCE),
    "a stage between": (lambda urls: with_a_stage_between(urls).pcr_scan(2), *ONCE),
    "a cache": (lambda urls: dataset_of(urls, cache_dir=".").pcr_scan(2), TypeError, "cache_dir"),
    "scan -1": (lambda urls: dataset_of(urls).pcr_scan(-1), ScanUnavailable, "0 to 32"),
    "a string": (lambda urls: dataset_of(urls).pcr_scan("5"), TypeError, "expected a scan"),
    "a fraction": (lambda urls: pcr_scan(0.5), ValueError, "expected index="),
    "scan 11": (lambda urls: list(dataset_of(urls).pcr_scan(11)), ScanUnavailable, "0 to 10"),
    "an unknown option": (lambda urls: pcr_scan(2, caches="."), TypeError, "caches"),
    "a missing shard": (
        lambda urls: list(dataset_of(["/nowhere/x.tar"]).pcr_scan(2)),
        PCRError,
        "nowhere",
    ),
}


def test_a_pipe_is_read_up_to_the_prefix(shard_urls):
    """``pipe:`` URLs work as in WebDataset.

    A command that would go on for hours is ended after the prefix.
    """
    piped = list(dataset_of([f"pipe:cat {urls}; sleep 600" for urls in shard_urls]).pcr_scan(2))
    plain = list(dataset_of(shard_urls).pcr_scan(2))
    assert [(s["__key__"], s["jpg"]) for s in piped] == [(s["__key__"], s["jpg"]) for s in plain]


@pytest.mark.parametrize("why", WRONG)
def test_wrong_use_is_a_clear_error(why, shard_urls):
    """Wrong use says what to do instead."""
    use, error, text = WRONG[why]
    with pytest.raises(error, match=text):
        use(shard_urls)


def test_a_plain_tar_is_refused(plain_tars):
    """pcr_scan on ordinary tars says that they are not shards."""
    with pytest.raises(NotAShard, match="pcrshard encode"):
        list(dataset_of(plain_tars).pcr_scan(2))


def test_the_import_before_webdataset_adds_the_method():
    """import pcrshard is enough, also before webdataset, and alone it does not import torch."""
    code = """
import sys, pcrshard
assert "torch" not in sys.modules, "slow import"
from pcrshard import pcr_scan
import webdataset
webdataset.WebDataset.pcr_scan
"""
    run_python("-W", "error", "-c", code)


def test_labels_lists_and_late_fields(tmp_path):
    """Scan 0 gives labels without pixels, a list gives numbered fields, and a late field comes with
    its scan: each sample as a stock tar of these members would give it.
    """
    fmt = pcrshard.ShardFormat("standard", deferred={"npy": 5})
    with pcrshard.ShardWriter(tmp_path, fmt=fmt) as writer:
        for i in range(3):
            views = [make_jpeg(j, 9, 9) for j in range(i)]
            sample = {"__key__": f"k{i}", "cls": i, "npy": b"array", "views.jpg": views}
            writer.write(sample | {"jpg": make_jpeg(i, 20, 30)})
    url = str(tmp_path / "data-000000.tar")

    def fields(scan, **options):
        samples = dataset_of([url], **options).pcr_scan(scan, index=str(tmp_path))
        return [{name for name in sample if not name.startswith("__")} for sample in samples]

    assert fields(0) == [{"cls"}] * 3
    assert fields(2) == [
        {"cls", "jpg"},
        {"cls", "jpg", "views.0.jpg"},
        {"cls", "jpg", "views.0.jpg", "views.1.jpg"},
    ]
    assert fields(5)[0] == {"cls", "jpg", "npy"}
    second = fields(2, select_files=lambda name: name.endswith((".cls", "views.1.jpg")))
    assert second[2] == {"cls", "views.1.jpg"}


def test_a_full_cache_starts_a_pipeline_while_the_server_is_down(dataset, tmp_path):
    """``index=`` by its URL, or opened with the cache, is taken from the cache."""
    cache = pcrshard.PrefixCache(tmp_path / "cache")
    retry = pcrshard.Retry(attempts=2)

    def keys(index, urls):
        read = wds.WebDataset(urls, shardshuffle=False)
        read = read.pcr_scan(2, index=index, cache_dir=tmp_path / "cache", retry=retry)
        return [sample["__key__"] for sample in read]

    with servers.nginx(dataset) as server:
        url = server.url()
        _, urls = pcrshard.open_dataset(url, cache=cache)
        expected = keys(url, urls)
    assert keys(url, urls) == expected
    assert keys(*pcrshard.open_dataset(url, retry=retry, cache=cache)) == expected
