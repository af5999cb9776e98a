"""Measurements of the Delta-DNN tables on trained runs: a row for each run."""

import dataclasses
import os
import tempfile

import numpy as np
import torch

from pcrshard.checkpoint import DeltaStore, Precision
from pcrshard.checkpoint.bound_choice import CANDIDATES, choose
from pcrshard.errorbound import RelativeStd

from ..lab import stamp
from . import codecs, training

MAX_LOSS = 0.002
SZ_PERCENTS = (1, 5, 10)
FIXED = RelativeStd(0.01)
# The formula as printed, and other coders of the codes.
KEPT = ("once",)
# Relative: what chaos makes of next to nothing.
NUDGE = 1e-6


class Judge:
    """``evaluate`` for Algorithm 1: accuracy on the test set; which pictures were right is kept, of
    the network as it is first.
    """

    def __init__(self, recipe, data):
        self.data = data
        self.model = training.make_network(recipe, data.classes)
        self.seen = []

    def __call__(self, state):
        self.model.load_state_dict(state["model"])
        self.seen.append(training.recognized(self.model, self.data))
        return float(self.seen[-1].mean())


def pairs_of(run):
    """Epochs whose delta to the epoch before is judged, the last one first."""
    last = run.recipe.epochs - 1
    middle = run.recipe.epochs // 2
    early = run.recipe.epochs // 4
    if run.seed > 0 or run.recipe.test_every > 1:
        return [last]
    is_long = run.recipe.network == "vgg" and run.recipe.optimizer == "sgd"
    return [last, middle, early] if is_long else [last, middle]


def measure(lab, _parts=()):
    """The runs that are missing, trained and measured; there are no parts."""
    torch.set_num_threads(1)
    for recipe in training.QUICK_RECIPES if lab.quick else training.RECIPES:
        for key in lab.missing({"name": recipe.name, "seed": seed} for seed in recipe.seeds):
            data = training.load(lab, recipe)
            run = training.trained(lab, recipe, key["seed"], data)
            lab.append(_measure_run(run, data) | stamp())


def _measure_run(run, data):
    """Everything of one run."""
    pairs = pairs_of(run)
    last = pairs[0]
    found = {str(epoch): _pair(run, data, epoch) for epoch in pairs}
    results = {
        "name": run.recipe.name,
        "recipe": dataclasses.asdict(run.recipe),
        "seed": run.seed,
        "rows": run.rows,
        "raw_bytes": codecs.raw_bytes(run.weights(last)),
        "parameters": sum(tensor.numel() for tensor in run.weights(last).values()),
        "test_pictures": len(data.test),
        "train_pictures": len(data.train),
        "pairs": found,
        "deltas": _all_pairs(run),
        "resume": _resume(run, data),
        "chains": {"fixed": _chain(run, data, FIXED)},
    }
    if len(pairs) > 1:
        bound = RelativeStd(found[str(pairs[1])]["ours"]["bound"])
        results["chains"]["chosen"] = _chain(run, data, bound)
    if run.seed == 0 and run.recipe.optimizer == "sgd":
        results["rivals"] = _rivals(run, data, last)
    return results


def _pair(run, data, epoch):
    """Algorithm 1 on one epoch's delta."""
    weights = run.weights(epoch)
    reference = run.weights(epoch - 1)

    def compress(bound):
        return codecs.ours(weights, reference, bound)

    return {
        "epoch": epoch,
        "similarity": codecs.similarity(weights, reference),
        "ours": _choose(run, data, weights, compress, CANDIDATES),
    }


def _max_loss(data):
    """A tiny test set of a quick run cannot tell 0.2 points."""
    return max(MAX_LOSS, 1 / len(data.test))


def _choose(run, data, weights, compress, candidates):
    """Algorithm 1's choice as plain values, with what the same rule finds on one half of the test
    set.
    """
    judge = Judge(run.recipe, data)
    choice = choose({"model": weights}, compress, judge, candidates, _max_loss(data))
    exact, *restored = judge.seen
    rows = [
        {
            "bound": row.bound.fraction,
            "ratio": row.ratio,
            "accuracy": row.accuracy,
            "loss": row.loss,
            "accepted": row.accepted,
            "loss_interval": _bootstrap(exact, right),
        }
        for row, right in zip(choice.table, restored, strict=True)
    ]
    bound = choice.bound.fraction
    row = next((row for row in rows if row["bound"] == bound), None)
    return {
        "table": rows,
        "bound": bound,
        "is_default": choice.is_default,
        "accuracy_exact": float(exact.mean()),
        "chosen": row,
        "held_out": _held_out(rows, exact, restored),
    }


def _bootstrap(exact, restored, rounds=2000):
    """The 95 % interval of the loss over the pictures of the test set."""
    difference = exact.astype(np.int8) - restored
    counts = np.array([(difference == value).sum() for value in (-1, 0, 1)])
    drawn = np.random.default_rng(0).multinomial(len(exact), counts / len(exact), rounds)
    losses = (drawn[:, 2] - drawn[:, 0]) / len(exact)
    return [float(q) for q in np.quantile(losses, (0.025, 0.975))]


def _held_out(rows, exact, restored):
    """The coarsest bound within the budget on every second picture, and its loss on the others."""
    best = None
    for row, right in zip(rows, restored, strict=True):
        loss = float(exact[::2].mean() - right[::2].mean())
        if loss <= MAX_LOSS and (best is None or row["ratio"] > best["ratio"]):
            other = float(exact[1::2].mean() - right[1::2].mean())
            best = {"bound": row["bound"], "ratio": row["ratio"], "loss": other}
    return best


def _rivals(run, data, epoch):
    """Table 1: the other coders on the last epoch."""
    weights = run.weights(epoch)

    def compress(bound):
        return codecs.sz3(weights, bound)

    bounds = tuple(RelativeStd(percent / 100) for percent in SZ_PERCENTS)
    sz3 = _choose(run, data, weights, compress, bounds)
    return {"lossless": codecs.lossless(weights), "sz3": sz3}


def _all_pairs(run):
    """Each epoch's delta at the fixed bound, and how far the weights moved."""
    rows = []
    before = run.weights(0)
    for epoch in range(1, run.recipe.epochs):
        weights = run.weights(epoch)
        ratio, _ = codecs.ours(weights, before, FIXED)
        moved = codecs.similarity(weights, before, 1)["moved"]
        rows.append({"epoch": epoch, "ratio": ratio, "moved": moved})
        before = weights
    return rows


def _chain(run, data, bound):
    """Table 3 and Figure 9: all versions of a run in one store, weights alone; the first seed's
    are judged, too.
    """
    with tempfile.TemporaryDirectory(prefix="pcrshard-delta-") as folder:
        store = DeltaStore(folder, Precision(weights=bound))
        with store:
            for epoch in range(run.recipe.epochs):
                store.save({"model": run.weights(epoch)})
        found = _sizes(store, folder)
        if run.seed == 0:
            judge = Judge(run.recipe, data)
            epochs = training.judged_epochs(run.recipe, run.seed)
            # Versions count from 1.
            found["accuracy"] = {epoch: judge(store.load(epoch + 1)) for epoch in epochs}
    found["bound"] = bound.fraction
    return found


def _sizes(store, folder):
    """What a store takes on disk, the manifest included."""
    records = store.versions()
    used = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
    return {
        "raw_bytes": sum(record.raw_bytes for record in records),
        "stored_bytes": used,
        "keyframes": sum(record.parent is None for record in records),
        "files": [
            {"bytes": record.file_bytes, "keyframe": record.parent is None} for record in records
        ],
    }


def _resume(run, data):
    """The whole state in one store, and training that goes on from restored versions."""
    recipe = run.recipe
    epochs = [recipe.epochs // 2 - 1, recipe.epochs - 2]
    with tempfile.TemporaryDirectory(prefix="pcrshard-delta-") as folder:
        store = DeltaStore(folder, "balanced")
        with store:
            for epoch in range(recipe.epochs):
                store.save(run.state(epoch))
        found = _sizes(store, folder)
        found["rows"] = [_resumed(run, data, epoch, store.load(epoch + 1)) for epoch in epochs]
    if run.seed == 0 and "vgg" in recipe.network:
        row = found["rows"][0]
        # An optimizer works on the tensors that it was given: each run needs its own.
        for name, state in (
            ("again", run.state(epochs[0])),
            ("nudged", _nudged(run.state(epochs[0]))),
        ):
            loss, _ = training.resume(recipe, run.seed, epochs[0], state, data)
            row[f"{name}_loss"] = loss
    return found


def _resumed(run, data, epoch, restored):
    """The epoch after a restored version, against the one of the run itself."""
    loss, model = training.resume(run.recipe, run.seed, epoch, restored, data)
    exact = run.rows[epoch + 1]
    return {
        "after_epoch": epoch,
        "exact_loss": exact["loss"],
        "restored_loss": loss,
        "exact_accuracy": exact["accuracy"],
        "restored_accuracy": training.accuracy(model, data),
    }


def _nudged(state):
    """The state, its weights moved by a millionth of themselves: what chaos alone does."""
    generator = torch.Generator().manual_seed(0)
    for tensor in state["model"].values():
        if tensor.is_floating_point() and tensor.dim() >= 2:
            tensor.mul_(1 + NUDGE * torch.randn(tensor.shape, generator=generator))
    return state
