"""The page docs/evidence/checkpoints.md: Delta-DNN's tables next to ours, from the results."""

import numpy as np

from .deltafigures import at, by_network, last_pair, with_rivals
from .deltatables import (
    coder_table,
    error_by_move,
    keyframe_share,
    literal_table,
    network_table,
    points,
    ratio_of,
    resume_table,
    shift,
    table1,
    table2,
    table3,
    transfer_table,
    version_ratio,
)
from .report import markdown

ONE_EPOCH = 12
WHOLE_RUN = 9
RESUMABLE = {"sgd": (8, 0.005), "adamw": (9, 0.002)}


def _seeds(values, form="{:.1f}x"):
    return ", ".join(form.format(value) for value in values)


def targets(runs):
    """(what, measured, met) of each bar."""
    found = []
    one = f"one epoch's delta, Algorithm 1, loss <= 0.2 points ({ONE_EPOCH}x)"
    for name, group in by_network(runs).items():
        chosen = [last_pair(run)["ours"]["chosen"] for run in group]
        ratios = [row["ratio"] for row in chosen]
        met = min(ratios) >= ONE_EPOCH and max(row["loss"] for row in chosen) <= 0.002
        found.append((f"{name}: {one}", _seeds(ratios), met))
        for key, text in (("fixed", "at 1 %"), ("chosen", "at the bound of a middle epoch")):
            ratios = [ratio_of(run["chains"][key]) for run in group if key in run["chains"]]
            what = f"{name}: the whole run with keyframes {text} ({WHOLE_RUN}x)"
            if ratios:
                found.append((what, _seeds(ratios), min(ratios) >= WHOLE_RUN))
        found += _resumable_targets(name, group)
    return found


def _resumable_targets(name, group):
    ratio, tolerance = RESUMABLE[group[0]["recipe"]["optimizer"]]
    ratios = [version_ratio(run["resume"]) for run in group]
    shifts = [shift(row) for run in group for row in run["resume"]["rows"]]
    mean = float(np.mean(shifts))
    worst = max(map(abs, shifts))
    what = f"{name}: the next epoch's mean loss against exact resume, mean of {len(shifts)}"
    measured = f"{mean:+.2%}, the farthest {worst:.2%}"
    return [
        (f"{name}: a resumable version ({ratio}x)", _seeds(ratios), min(ratios) >= ratio),
        (f"{what} ({tolerance:.1%})", measured, abs(mean) <= tolerance),
    ]


def _again(runs):
    """Whether what is called exact is so."""
    rows = [row for run in runs for row in run["resume"]["rows"] if "again_loss" in row]
    same = sum(row["again_loss"] == row["exact_loss"] for row in rows)
    return (
        "As a check of the method, one epoch was trained again from its exact state: "
        f"{same} of {len(rows)} mean losses were the same to the last bit."
    )


def not_shown(runs):
    """What the results do not show, from the results."""
    parts = [
        _missed(runs),
        _by_chance(runs),
        _coarse(runs),
        _literal_words(runs),
        _scale(runs),
        SPEED_TEXT,
    ]
    return "\n\n".join(parts)


def _missed(runs):
    missed = [f"{what}: {value}" for what, value, met in targets(runs) if not met]
    if not missed:
        return "No bar was missed at this scale."
    shares = [keyframe_share(run["chains"]["fixed"]) for run in runs]
    return (
        f"Missed: {'; '.join(missed)}. A keyframe begins a new chain every 10 versions, and in so "
        f"short runs keyframes are {min(shares):.0%} to {max(shares):.0%} of the bytes at 1 %; "
        "deltas and keyframes are coded close to their entropy (Fig. 5 below), so that only a "
        "coarser bound, a longer chain or a slower training makes them smaller."
    )


def _coarse(runs):
    pairs = [pair for run in runs for pair in run["pairs"].values()]
    larger = sum(error_by_move(pair) > 1 for pair in pairs)
    fixed = [at(pair["ours"]["table"], 0.01)["ratio"] for pair in pairs]
    return (
        f"In {larger} of {len(pairs)} choices the error that the chosen bound allows is larger "
        "than what the epoch changed: the accuracy stays because networks forgive noise, and the "
        "epoch's own change is not kept. The error does not grow from epoch to epoch, but who "
        "compares neighbouring epochs, or trains on, needs a bound below the change: at 1 % the "
        f"same deltas are {min(fixed):.1f} to {max(fixed):.1f} times smaller."
    )


def _scale(runs):
    epochs = " or ".join(map(str, sorted({run["recipe"]["epochs"] for run in runs})))
    pictures = max(run["train_pictures"] for run in runs)
    return (
        f"The networks are small, they were trained for {epochs} epochs of "
        f"at most {pictures} pictures, and the learning rate falls: all of this decides how far "
        "an epoch moves the weights, and so the ratio. The paper's networks were trained for "
        "hundreds of epochs, and its versions lie several epochs apart. Our ratios are not those "
        "that the paper's networks would have."
    )


def _by_chance(runs):
    pairs = [pair["ours"] for run in runs for pair in run["pairs"].values()]
    uncertain = sum(pair["chosen"]["loss_interval"][1] > 0.002 for pair in pairs)
    held = [pair["held_out"] for pair in pairs if pair["held_out"] is not None]
    worse = sum(row["loss"] > 0.002 for row in held)
    mean = float(np.mean([row["loss"] for row in held])) if held else 0.0
    sizes = sorted({run["test_pictures"] for run in runs})
    budgets = " or ".join(f"{0.002 * size:.1f} of {size}" for size in sizes)
    return (
        f"A budget of 0.2 points is {budgets} pictures, and Algorithm 1 takes the coarsest bound "
        f"that happens to stay within it: in {uncertain} of {len(pairs)} choices the interval over "
        "pictures reaches beyond the budget. Chosen on every second picture, the bound lost more "
        f"than 0.2 points on the others in {worse} of {len(held)} choices (mean change "
        f"{points(mean)} points). The paper chooses and reports on the same pictures."
    )


def _literal_words(runs):
    rivals = [run["rivals"] for run in with_rivals(runs)]
    rows = [found["literal"]["table"][-1] for found in rivals]
    ratios = [row["ratio"] for row in rows]
    losses = [row["loss"] for row in rows]
    zeros = min(found["literal_zeros"] for found in rivals)
    kept = sum(found["literal"]["bound"] == rows[0]["bound"] for found in rivals)
    return (
        "The paper's own formula, as printed, does not give the paper's ratios: at "
        f"{rows[0]['bound']:.0%} at least {zeros:.2%} of its factors are 0, what is stored is "
        f"{min(ratios):.0f} to {max(ratios):.0f} times smaller than the network, and what comes "
        "back is nearly the epoch before: the accuracy changes by "
        f"{points(max(losses))} to {points(min(losses))} points. Where the epoch before happened "
        f"to be no worse, Algorithm 1 takes it ({kept} of {len(rivals)} networks)."
    )


def _planned(results):
    seconds = sum(row["cpu_seconds"] for run in results["runs"] for row in run["rows"])
    text = (
        f"Training took {seconds / 60:.0f} minutes of one core, beside other work on the machine."
    )
    if len(results["runs"]) < results["planned"]:
        text += (
            f" {len(results['runs'])} of {results['planned']} planned runs had been made and "
            "measured when this page was written; the command makes the others."
        )
    return text + "\n"


def page(results, command, date, pictures):
    """The whole page as Markdown."""
    runs = results["runs"]
    judged = [[what, value, "met" if met else "missed"] for what, value, met in targets(runs)]
    return "\n".join(
        [
            HEAD.format(command=command, date=date),
            _planned(results),
            network_table(runs),
            "\n## The targets\n\n" + TARGETS_TEXT + "\n",
            markdown(["target", "measured, by seed", ""], judged),
            "\n## What did not show\n\n" + not_shown(runs),
            "\n## How alike neighbours are (Fig. 1)\n\n" + SIMILARITY_TEXT,
            pictures["similarity"],
            "\n## One epoch's delta (Table 1)\n\n" + TABLE1_TEXT + "\n",
            table1(runs),
            "\n## Epochs, and how sure the choice is (Table 2)\n\n" + TABLE2_TEXT + "\n",
            table2(runs),
            "\n" + pictures["epochs"],
            "\n## Bounds (Figs. 3 and 4)\n\n" + BOUNDS_TEXT,
            pictures["bounds"],
            "\n## The formula as printed\n\n" + LITERAL_TEXT + "\n",
            literal_table(runs),
            "\n## Coders (Fig. 5)\n\n" + CODERS_TEXT + "\n",
            coder_table(runs),
            "\n" + pictures["coders"],
            "\n## Releases over a network (Fig. 8)\n\n" + TRANSFER_TEXT + "\n",
            transfer_table(runs),
            "\n" + pictures["transfer"],
            "\n## A whole run (Table 3, Fig. 9)\n\n" + CHAIN_TEXT + "\n",
            table3(runs),
            "\n" + pictures["accuracy"],
            "\n## Training goes on from a restored version\n\n" + RESUME_TEXT + "\n",
            resume_table(runs),
            "\n" + _again(runs) + "\n",
        ]
    )


HEAD = """# Evidence: checkpoints

What the Delta-DNN paper (ICPP 2020) reports, next to what this repository measures on networks
that were trained for it. Everything is written by `{command}` ({date}); the numbers are in
[deltadnn.json](deltadnn.json). It needs `shared/data` and `pip install
"pcrshard[train,checkpoint,evidence]"`. The checkpoints stay in the temporary folder, so that a
second run does not train. How to use the store: [checkpoints.md](../checkpoints.md).

The pictures are the flowers of classify.tar (5 classes). Of each class 300 are trained on; the
other training pictures and the validation pictures together are the test set, because one of the
600 validation pictures alone is 0.17 points. Epochs count from 0; Lite0 is EfficientNet-Lite0,
pretrained on ImageNet and tuned as a whole.
"""
TARGETS_TEXT = """The bar stands in parentheses. One epoch's delta is the last epoch's."""
SIMILARITY_TEXT = """Parameters of the last epoch against the epoch before, all layers, the first
seed. SSIM is computed with one window over all parameters, with the usual constants.
"""
TABLE1_TEXT = """The last epoch's network: LZMA and Zstd (level 19) on its floats, SZ3 on its floats
as in the paper, ours as the delta to the epoch before. SZ3 and ours may use the same bounds on the
same tensors (1, 5 and 10 %, ours also 0.5, 2, 3 and 7 %, of each tensor's deviation), and Algorithm
1 chooses for both; the paper's bounds are of another kind. The last columns are the change of
accuracy in points.
"""
TABLE2_TEXT = """Our delta at several epochs. How far an epoch moved the weights is the median over
the tensors of the change's deviation by the tensor's own; error / move is what the chosen bound
allows (as a uniform error) by that. The interval is a bootstrap over the test pictures of the
change of accuracy at the chosen bound. The last column chooses on every second picture, and gives
the bound and the change on the other half: what a user sees who does not choose on the test set.
"""
BOUNDS_TEXT = """The last epoch, mean of the seeds (dots: seeds). Dashed: the budget, and the bar.
"""
LITERAL_TEXT = """Equations 1 and 2 on all floats, with the paper's coder (RLE and LZMA), last
epoch: ratio and change of accuracy in points at the paper's bounds.
"""
CODERS_TEXT = """Coders of the same integers: the codes of the last epoch's delta, the first seed,
as 32-bit integers; and of the same epoch as a keyframe. Entropy is that of each tensor on its own,
without memory.
"""
SPEED_TEXT = """Speed is not measured here; benchmarks/bench_checkpoint.py does that. The transfer
times are sizes divided by the paper's bandwidths."""
TRANSFER_TEXT = """Seconds, computed from the sizes above and the bandwidths that the paper uses; no
link was measured here.
"""
CHAIN_TEXT = """All versions of a run in one `DeltaStore`, weights alone, with keyframes (every 10
versions) and the manifest. The bound is 1 %, or what Algorithm 1 chose on a delta in the middle of
the run (first seed). The mean change, of accuracy in points, is over every fourth version or more
of them.
"""
RESUME_TEXT = """Weights and optimizer of all epochs in one store with the default bounds (weights
0.5 %, momentum and first moments 30 % of the deviation, second moments 30 % of each value). The
epoch after a restored version is trained with the same pictures in the same order as in the exact
run, and the table has its mean loss. The nudged run starts from the exact state with its weights
changed by a millionth of themselves: a difference of that size is chaos, not the bound's.
"""
