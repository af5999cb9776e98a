"""ScanTuner: the lowest scan whose gradient agrees, and nothing else of the training changed."""

import json
import os

import numpy as np
import pytest
import torch
from support import run_ranks
from torch import nn

from pcrshard import Buckets, ImageDecoder, PCRDataset, PCRLoader, ScanLevel, ScanTuner, stage
from pcrshard.errors import ScanUnavailable
from pcrshard.fidelity.intervals import confidence
from pcrshard.fidelity.tuner import Similarity, choose

# On a loaded machine, threads spend most of their time waiting for each other.
torch.set_num_threads(1)


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images / 128 - 1), labels)


def make_loader(folder, batch_size=4, *, decoder=None, level=None, seed=1, **options):
    dataset = PCRDataset(
        folder,
        scan=level or ScanLevel(),
        decoder=decoder or ImageDecoder(32, "random"),
        fields=("jpg", "cls"),
    )
    return PCRLoader(dataset, batch_size, seed=seed, **options)


def make_model(seed=0, *, norm=True):
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(3, 4, 3, 2),
        nn.BatchNorm2d(4) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(0.5 if norm else 0),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 15 * 15, 3))


def test_the_full_scan_agrees_with_itself(dataset):
    """At the last scan the gradient is that of full fidelity, dropout included."""
    tuner = ScanTuner(
        make_loader(dataset), loss, ScanLevel(), candidates=[1, 10], images=16, trials=2
    )
    low, high = tuner.measure(make_model())
    assert high.mean == pytest.approx(1, abs=1e-5)
    assert low.mean < 0.999
    assert low.lower <= low.mean <= low.upper


def test_a_tuning_of_more_than_an_epoch_is_named(dataset, caplog):
    """A tuner whose probing costs more than the epoch that it is for says what it reads."""
    loader = make_loader(dataset)
    ScanTuner(loader, loss, ScanLevel(), candidates=[1], images=4, trials=3)
    assert caplog.text == ""
    ScanTuner(loader, loss, ScanLevel(), candidates=[1, 2])
    assert "each tuning reads 216 images, more than the epoch of 24" in caplog.text


def test_nothing_of_the_training_changes(dataset):
    """Parameters, gradients, BatchNorm's statistics, modes, levels and random numbers stay."""
    model = make_model()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    level = ScanLevel(7)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    ScanTuner(make_loader(dataset), loss, level, candidates=[1], images=8, trials=1).measure(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert [module.training for module in model] == [True, False, True, True, True, True]
    assert level.value == 7
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()


def test_buckets_give_the_images_that_are_compared_a_shape(dataset):
    """A loader whose batches get their shape from buckets can be tuned, too."""
    decoder = ImageDecoder(crop="random")
    loader = make_loader(dataset, decoder=decoder, buckets=Buckets(area=32 * 32, multiple=32))
    tuner = ScanTuner(loader, loss, ScanLevel(), candidates=[1, 10], images=8, trials=1)
    assert len(tuner.measure(make_model())) == 2


def test_tuning_takes_no_more_pixels_at_a_time_than_training(dataset):
    """Images that fit in memory in batches of bounded pixels do so while the tuner compares them,
    and a report counts the images that there are.
    """
    level = ScanLevel()
    limit = 2 * int(PCRDataset(dataset).sizes.prod(axis=1).max())
    decoder = ImageDecoder()
    loader = make_loader(dataset, 16, decoder=decoder, level=level, buckets=Buckets(pixels=limit))
    taken = []

    def pixels_loss(model, batch):
        images, _ = batch
        taken.append(sum(image[0].numel() for image in images))
        return model(torch.ones(1, 3, 32, 32)).sum()

    tuner = ScanTuner(loader, pixels_loss, level, candidates=[1], first=0, trials=2)
    report = tuner.step(make_model(norm=False), 0)
    assert 0 < max(taken) <= limit
    assert report.images == len(loader.dataset) * 2 * 2


def test_it_tunes_when_it_is_due_and_remembers(dataset):
    """Tuning starts after the first epochs, repeats at an interval, and survives a checkpoint."""
    level = ScanLevel("full")
    tuner = ScanTuner(
        make_loader(dataset),
        loss,
        level,
        candidates=[1, 10],
        threshold=-1,
        images=8,
        trials=2,
        first=2,
        every=3,
    )
    nothing = ScanTuner(
        tuner.loader, loss, level, candidates=[1], threshold=1.01, images=4, first=0
    )
    assert nothing.step(make_model(), 0).scan == level.value == "full"
    due = [epoch for epoch in range(9) if tuner.step(make_model(), epoch)]
    assert due == [2, 5, 8]
    assert level.value == 1
    assert tuner.reports[0].images == 8 * 2 * 3
    other = ScanTuner(make_loader(dataset), loss, ScanLevel(), candidates=[1, 10])
    other.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert other.level.value == 1
    assert other.reports == tuner.reports


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [([0.5, 0.79, 0.81, 0.99], 3), ([0.9, 0.1, 0.9, 0.9], 1), ([0.1] * 4, "full")],
)
def test_the_lowest_scan_whose_lower_bound_passes(bounds, expected):
    """A mean above the threshold is not enough: the confidence interval must be."""
    assert (
        choose([Similarity(i, 0.95, bound, 1.0) for i, bound in enumerate(bounds, 1)], 0.8)
        == expected
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_reads_everything(wrong):
    """Gradients that are no numbers say nothing of any scan: the job goes on at full fidelity."""
    row = Similarity(1, *confidence([0.9, wrong, 0.9]))
    assert row[1:] == (0, -1, 1)
    assert choose([row], 0.8) == choose([row], -0.5) == "full"


def test_confidence_intervals_are_students():
    """Three trials, two degrees of freedom: 4.303 standard errors, as in any table."""
    mean, lower, upper = confidence([0.7, 0.8, 0.9])
    assert mean == pytest.approx(0.8)
    assert upper - mean == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert mean - lower == pytest.approx(upper - mean)


def mean_cosines(folder, world=1, wrap=lambda model: model):
    """The mean cosine of two scans on 16 images, over all ranks."""
    tuner = ScanTuner(
        make_loader(folder, 8 // world), loss, ScanLevel(), candidates=[1, 5], images=16, trials=2
    )
    return [row.mean for row in tuner.measure(wrap(make_model(norm=False)))]


RANKS = """
import json, sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from test_tuner import mean_cosines
torch.set_num_threads(1)
dist.init_process_group("gloo")
found = mean_cosines({folder!r}, 2, torch.nn.parallel.DistributedDataParallel)
with open({out!r} + str(dist.get_rank()), "w") as file:
    json.dump(found, file)
dist.barrier()  # a rank that ends while another is in gloo's last call makes that one abort
dist.destroy_process_group()
"""


def test_ranks_average_their_gradients(dataset, tmp_path):
    """Two ranks under DDP find the cosines of one process on the same images, and choose alike."""
    out, script = str(tmp_path / "rank"), tmp_path / "ranks.py"
    script.write_text(RANKS.format(tests=os.path.dirname(__file__), folder=str(dataset), out=out))
    run_ranks(script)
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert first == second == pytest.approx(mean_cosines(dataset), abs=1e-4)


@pytest.fixture
def copy(dataset, tmp_path):
    """The dataset staged to scan 5."""
    stage(dataset, tmp_path / "copy", 5)
    return str(tmp_path / "copy")


def test_on_a_staged_copy_its_highest_scan_is_the_reference(copy):
    """No scan above it is asked for, and if none of those below passes, it is taken."""
    level = ScanLevel(2)
    made = make_loader(copy, level=level, decoder=ImageDecoder(32), seed=0)
    ScanTuner(made, loss, level).load_state_dict({"scan": "full", "reports": []})
    assert level.value == 5, "a checkpoint of a job that read the whole dataset"
    tuner = ScanTuner(made, loss, level, images=8, trials=2, first=0, every=1, threshold=1.01)
    assert set(tuner.candidates) <= {1, 2, 3, 4}
    assert tuner.step(make_model(), 0).scan == level.value == 5
    [last] = ScanTuner(made, loss, level, candidates=[5], images=8, trials=2).measure(make_model())
    assert last.mean == pytest.approx(1, abs=1e-5)


def test_a_staged_copy_can_be_tuned_against_its_origin(copy, dataset):
    """With a loader over the original dataset, only scans that the copy holds are tried."""
    options = {"candidates": [1, 5], "images": 8, "trials": 2}
    level = ScanLevel()
    made, whole = make_loader(copy, level=level), make_loader(dataset)
    assert made.dataset.max_scan == 5
    tuner = ScanTuner(whole, loss, level, **options, threshold=1.01, first=0)
    found = tuner.measure(make_model())
    assert found == ScanTuner(whole, loss, ScanLevel(), **options).measure(make_model())
    assert found[-1].mean < 0.9999
    assert tuner.step(make_model(), 0).scan == level.value == 5
    assert set(ScanTuner(whole, loss, level).candidates) <= {1, 2, 3, 4, 5}
    with pytest.raises(ScanUnavailable, match="1 to 5"):
        ScanTuner(whole, loss, level, candidates=[1, 7])


def test_wrong_arguments_say_what_is_expected(dataset):
    """Any other loader, a number out of range, and a loss that is no tensor."""
    plain = torch.utils.data.DataLoader([1])
    with pytest.raises(
        TypeError, match=r"expected loader to be of type PCRLoader, got .*DataLoader"
    ):
        ScanTuner(plain, loss, ScanLevel())
    loader = make_loader(dataset)
    with pytest.raises(ValueError, match="expected trials to be a whole number of at least 1"):
        ScanTuner(loader, loss, ScanLevel(), trials=0)
    tuner = ScanTuner(loader, lambda *_: 0.5, ScanLevel(), images=4, trials=1)
    with pytest.raises(TypeError, match=r"expected loss to return a tensor .* got 0\.5"):
        tuner.measure(make_model())
