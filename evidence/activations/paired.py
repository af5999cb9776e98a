"""Does deriving results cost anything? The same trainings without compression, with each tensor
kept, and with results derived from other tensors, at three bounds. Runs with a seed share weights,
order, crops and dropout; each is a line of paired.jsonl, with the commit that ran it.
"""

import dataclasses
import statistics
import time

import torch
from torch.nn import functional

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions

from ..lab import versions
from ..learning import classify, fit
from . import training
from .models import GPT, ViT

# A bound, and whether results are derived.
ARMS = {
    "plain": None,
    "0.05 std, each kept": (0.05, False),
    "0.03 std, derived": (0.03, True),
    "0.05 std, derived": (0.05, True),
    "0.1 std, derived": (0.1, True),
}
NETWORKS = {"resnet10": 396, "vit": 231, "gpt": 260}  # and the steps of a training
SEEDS = 24  # as many as there is time for; the arms of a seed are next to each other
LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Spec:
    """What decides a run."""

    network: str
    arm: str
    seed: int
    steps: int


class Signs:
    """Hand signs: a small ResNet by SGD at 48 pixels, or a vision transformer by AdamW at 40."""

    loss = staticmethod(classify)

    def __init__(self, lab, network):
        self.is_resnet = network == "resnet10"
        self.size = 48 if self.is_resnet else 40
        self.data = training.load(lab, self.size * 11 // 10)

    def model(self):
        if self.is_resnet:
            return training.resnet10(self.data.classes)
        return ViT(self.data.classes, self.size, 8, depth=4, dropout=0.1)

    def batches(self, steps, generator):
        while steps > 0:
            for batch in training.batches(self.data, self.size, generator):
                yield batch
                steps -= 1
                if steps == 0:
                    return

    def test(self, model):
        accuracy, loss = training.evaluate(model, self.data, self.size)
        return {"accuracy": accuracy, "loss": loss}


class Manual:
    """The reference topics of Python's manual as characters; the last tenth is the test."""

    is_resnet = False

    def __init__(self, lab):
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        codes = {letter: code for code, letter in enumerate(sorted(set(text)))}
        self.letters = len(codes)
        self.codes = torch.tensor([codes[letter] for letter in text])
        self.edge = len(text) * 9 // 10
        self.windows = 8 if lab.quick else 256

    def at(self, starts):
        return torch.stack([self.codes[start : start + LENGTH + 1] for start in starts.tolist()])

    def model(self):
        return GPT(self.letters, LENGTH)

    def batches(self, steps, generator):
        for _ in range(steps):
            yield self.at(torch.randint(self.edge - LENGTH - 1, (16,), generator=generator))

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def test(self, model):
        model.eval()
        starts = torch.linspace(self.edge, len(self.codes) - LENGTH - 1, self.windows).long()
        return {"loss": float(self.loss(model, self.at(starts)))}


def train(spec, task):
    """One training at a rate that rises and falls; its test figures."""
    torch.manual_seed(spec.seed)
    model = task.model()
    arm = ARMS[spec.arm]
    saver = compress_activations(
        model,
        0.05 if arm is None else arm[0],
        "none" if arm is None else "zstd",
        ActivationOptions(derive=arm is not None and arm[1]),
    )
    if task.is_resnet:
        rate, clip = training.RATE, None
        optimizer = training.sgd(model)
    else:
        rate, clip = 1e-3, 1.0
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, spec.steps)
    generator = torch.Generator().manual_seed(spec.seed)
    torch.manual_seed(spec.seed)  # dropout
    begun = time.process_time()
    batches = task.batches(spec.steps, generator)
    losses = fit(
        model, optimizer, batches, loss=task.loss, schedule=schedule, saver=saver, clip=clip
    )
    seconds = time.process_time() - begun
    return {
        "spec": dataclasses.asdict(spec),
        "train_loss": statistics.fmean(losses[-max(spec.steps // 10, 1) :]),
        **task.test(model),
        "ratio": saver.report().ratio,
        "cpu_seconds": seconds,
        **versions(),
    }


def train_all(lab, networks=NETWORKS):
    """The runs that are missing, one after another, until it is stopped."""
    torch.set_num_threads(1)
    specs = [
        Spec(network, arm, seed, 3 if lab.quick else NETWORKS[network])
        for seed in range(2 if lab.quick else SEEDS)
        for network in networks
        for arm in ARMS
    ]
    tasks = {}
    for key in lab.missing(({"spec": dataclasses.asdict(spec)} for spec in specs), "paired"):
        spec = Spec(**key["spec"])
        if spec.network not in tasks:
            is_text = spec.network == "gpt"
            tasks[spec.network] = Manual(lab) if is_text else Signs(lab, spec.network)
        lab.append(train(spec, tasks[spec.network]), "paired")
