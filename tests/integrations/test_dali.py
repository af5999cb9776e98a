"""Batches for NVIDIA DALI: its external-source protocol, and DALI itself where it is installed."""

import json
import re

import numpy as np
import pytest
from support import ROOT

import pcrshard
from pcrshard import PCRDataset, PCRLoader
from pcrshard.integrations.dali import DaliSource


def loader_of(dataset, **options):
    options = {"scan": 2, "fields": ("jpg", "cls")} | options
    return PCRLoader(PCRDataset(dataset, **options), 4, seed=1)


def test_batches_follow_the_protocol(dataset):
    """Each field is a list of one array a sample; each iteration is the next epoch."""
    reference = loader_of(dataset, fields=("jpg", "cls"))
    source = DaliSource(loader_of(dataset))
    orders = []
    for _ in range(2):
        epoch = list(source)
        for (jpegs, labels), (bytes_, numbers) in zip(epoch, reference, strict=True):
            assert [jpeg.tobytes() for jpeg in jpegs] == list(bytes_)
            assert {jpeg.dtype for jpeg in jpegs} == {np.dtype(np.uint8)}
            assert [label.tolist() for label in labels] == [[n] for n in numbers.tolist()]
        orders.append([jpeg.tobytes() for jpegs, _ in epoch for jpeg in jpegs])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_a_job_resumes_and_decoded_images_pass(dataset):
    """The loader's state is the job's; decoded images and text are arrays, too."""
    loader = loader_of(dataset, decoder=16, fields=("jpg", "__key__"))
    batches = iter(DaliSource(loader))
    next(batches)
    state = json.dumps(loader.state_dict())
    rest = [[image.tobytes() for image in images] for images, _ in batches]
    other = loader_of(dataset, decoder=16, fields=("jpg", "__key__"))
    other.load_state_dict(json.loads(state))
    resumed = list(DaliSource(other))
    assert [[image.tobytes() for image in images] for images, _ in resumed] == rest
    assert resumed[0][0][0].shape == (3, 16, 16)


def test_what_dali_cannot_take_is_named(dataset):
    """Dicts and parsed JSON are refused with the way out."""
    with pytest.raises(TypeError, match="fields="):
        next(iter(DaliSource(loader_of(dataset, fields=None))))
    with pytest.raises(TypeError, match="dict"):
        next(iter(DaliSource([([{}],)])))


def test_dali_itself_decodes_a_prefix(dataset, tmp_path, monkeypatch):
    """The program of the page, on the CPU: every label of two epochs, and pixels like ours."""
    pytest.importorskip(
        "nvidia.dali", reason="DALI IS NOT INSTALLED: pip install nvidia-dali-cuda120"
    )
    page = (ROOT / "docs" / "frameworks.md").read_text()
    block = re.search(r"^```python dali\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "shards").symlink_to(dataset)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    exec(block, names)
    running = names["pipeline"]()  # the next epochs of the same loader
    running.build()
    for _ in range(2):
        labels = []
        for _ in range(6):
            images, numbers = running.run()
            labels += [int(number) for number in np.array(numbers.as_array()).ravel()]
            assert np.array(images[0]).dtype == np.uint8
        assert sorted(labels) == [0] * 12 + [1] * 12
        with pytest.raises(StopIteration):
            running.run()
        running.reset()
    jpeg = pcrshard.Shard(next(dataset.glob("*.tar"))).sample(0, 2)["jpg"]
    theirs = decode_by_dali(jpeg).astype(int)
    ours = pcrshard.decode_image(jpeg, smoothing=True)
    assert np.abs(theirs - ours).mean() < 3  # another transform, and other upsampling


def decode_by_dali(jpeg):
    """One image, decoded by DALI's decoder for CPUs."""
    import nvidia.dali as dali

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def decoder():
        source = dali.fn.external_source(DaliSource([([jpeg],)]), num_outputs=1, batch=True)
        return dali.fn.decoders.image(source[0], device="cpu")

    running = decoder()
    running.build()
    return np.array(running.run()[0][0])
