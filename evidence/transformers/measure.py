"""Transformers trained with compressed activations, in pairs of seeds, and what their tensors take.

A vision transformer learns hand signs from photographs, a small GPT the manual that Python ships
(``pydoc_data.topics``). Runs of one seed share weights, order, crops and dropout. Each run is a
line of runs.jsonl and is made once; ratios.json is measured after the trainings.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import time

import torch
from torch.nn import functional

from pcrshard import compress_activations

from .. import pages
from ..learning import classify, drawn, files_of, fit, floats, pictures
from .models import GPT, ViT

ARMS = {"plain": None, "0.05 std": 0.05, "0.1 std": 0.1}
SEEDS = range(5)
# The width and heads of ViT-Tiny at a size that a CPU trains in a minute.
SMALL = {"size": 40, "patch": 8, "width": 192, "heads": 3, "depth": 4, "dropout": 0.1}
LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Spec:
    """What decides a run."""

    network: str
    arm: str
    seed: int
    steps: int
    batch: int


class Signs:
    """Hand signs at 44x44: random crops to train on, the middle to test on."""

    loss = staticmethod(classify)

    def __init__(self, lab):
        root = pathlib.Path(lab.classify(lab.tasks[0].name if lab.quick else "signs"))
        self.images, self.tests = (
            pictures(files_of(root / split), 44) for split in ("train", "val")
        )

    @staticmethod
    def crop(images, top, left):
        return floats(images[:, top : top + 40, left : left + 40])

    def batch(self, size, generator):
        ((images, labels),) = drawn(self.images, size, 1, generator)
        top, left = torch.randint(0, 5, (2,), generator=generator).tolist()
        return self.crop(images, top, left), labels

    def model(self):
        return ViT(10, **SMALL)

    @torch.no_grad()
    def test(self, model):
        images, labels = self.tests
        logits = model(self.crop(images, 2, 2))
        right = float((logits.argmax(1) == labels).float().mean())
        return {"accuracy": right, "loss": float(functional.cross_entropy(logits, labels))}


class Manual:
    """The reference topics of Python's manual as characters; the last tenth is the test."""

    def __init__(self, quick):
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        letters = sorted(set(text))
        codes = {letter: code for code, letter in enumerate(letters)}
        self.letters = len(letters)
        self.codes = torch.tensor([codes[letter] for letter in text])
        self.edge = len(text) * 9 // 10
        self.windows = 8 if quick else 256

    def at(self, starts):
        return torch.stack([self.codes[start : start + LENGTH + 1] for start in starts.tolist()])

    def batch(self, size, generator):
        return self.at(torch.randint(self.edge - LENGTH - 1, (size,), generator=generator))

    def model(self):
        return GPT(self.letters, LENGTH)

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def test(self, model):
        starts = torch.linspace(self.edge, len(self.codes) - LENGTH - 1, self.windows).long()
        return {"loss": float(self.loss(model, self.at(starts)))}


def train(spec, data):
    """A training with AdamW at a rate that rises and falls, and its test figures."""
    torch.manual_seed(spec.seed)
    model = data.model()
    bound = ARMS[spec.arm]
    saver = compress_activations(model, bound or 0.05, "none" if bound is None else "zstd")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, spec.steps)
    generator = torch.Generator().manual_seed(spec.seed)
    torch.manual_seed(spec.seed)  # dropout
    begun = time.process_time()
    batches = (data.batch(spec.batch, generator) for _ in range(spec.steps))
    losses = fit(
        model, optimizer, batches, loss=data.loss, schedule=schedule, saver=saver, clip=1.0
    )
    seconds = time.process_time() - begun
    model.eval()
    return model, {
        "spec": dataclasses.asdict(spec),
        "train_loss": statistics.fmean(losses[-max(spec.steps // 10, 1) :]),
        **data.test(model),
        "ratio": saver.report().ratio,
        "cpu_seconds": seconds,
    }


def kinds(model, report):
    """Raw and stored bytes by the kind of module that saved a tensor."""
    modules = dict(model.named_modules())
    found = {}
    for row in report.rows:
        module = modules.get(row.name)
        kind = type(module).__name__ if module is not None else row.name or "outside"
        kind = f"{kind}, {row.kind}"
        raw, stored = found.get(kind, (0, 0))
        found[kind] = (raw + row.raw_bytes, stored + row.stored_bytes)
    return found


def ratios_of(model, loss):
    """What one pass saves, by bound, codec and type."""
    rows = {}
    for dtype in ("float32", "bfloat16"):
        for bound in (0.05, 0.1):
            for codec in ("zstd", "bits", "int8"):
                saver = compress_activations(model, bound, codec)
                torch.manual_seed(0)
                with (
                    saver,
                    torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
                ):
                    value = loss()
                value.backward()
                model.zero_grad()
                report = saver.report()
                assert saver.ledger.live_bytes == 0
                rows[f"{dtype}, {bound}, {codec}"] = {
                    "raw_bytes": report.raw_bytes,
                    "ratio": report.ratio,
                    "kinds": kinds(model, report),
                }
    return rows


def full_size(lab):
    """ViT-Tiny at 224x224 on photographs of flowers, after a few steps."""
    size, steps = (2, 1) if lab.quick else (8, 20)
    root = pathlib.Path(lab.classify(lab.tasks[0].name), "train")
    images, labels = pictures(files_of(root)[::16], 224)
    torch.manual_seed(0)
    model = ViT(int(labels.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    generator = torch.Generator().manual_seed(0)
    batches = drawn((floats(images), labels), size, steps + 1, generator)
    fit(model, optimizer, itertools.islice(batches, steps))
    last = next(batches)
    return ratios_of(model, lambda: classify(model, last))


def measure(lab, _parts=()):
    """The runs that are missing, and the ratios; there are no parts."""
    torch.set_num_threads(1)
    tasks = {"vit": Signs(lab), "gpt": Manual(lab.quick)}
    steps = {"vit": 3 if lab.quick else 220, "gpt": 3 if lab.quick else 260}
    batch = {"vit": 32, "gpt": 16}
    specs = [
        Spec(network, arm, seed, steps[network], batch[network])
        for seed in (range(1) if lab.quick else SEEDS)
        for network in tasks
        for arm in ARMS
    ]
    models = {}
    for key in lab.missing({"spec": dataclasses.asdict(spec)} for spec in specs):
        spec = Spec(**key["spec"])
        models[spec.network], run = train(spec, tasks[spec.network])
        lab.append(run)
    if os.path.exists(lab.path("ratios.json")):
        return
    found = {"vit_tiny": full_size(lab)}
    for network, data in tasks.items():
        model = models.get(network) or data.model()
        model.train()
        fixed = data.batch(batch[network], torch.Generator().manual_seed(0))
        found[network] = ratios_of(model, lambda data=data, m=model, b=fixed: data.loss(m, b))
    pages.write_text(lab.path("ratios.json"), json.dumps(found, indent=1) + "\n")
