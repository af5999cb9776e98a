"""docs/evidence/activations.md, from what was measured."""

from .activation_ratios import PREDICTED
from .activation_training import ARMS, LAST
from .report import difference, interval, markdown

HEAD = """# Evidence: activations

What Jin et al. (PPoPP 2021) report, next to what `compress_activations` does here. Everything below
is written by `python scripts/reproduce.py activations` (`--quick` is a smoke run; trainings that
are kept are not made again). **No GPU was at hand**: all figures are of one thread of a CPU, memory
is the resident set of a process, time is CPU time, and nothing here says how fast it is on a GPU.
Most runs shared two cores with other work; seconds of a clock are not given for that reason.
"""
# The paper's Table 1: conv. activations, times smaller.
PAPER = {"AlexNet": 13.5, "VGG-16": 11.1, "ResNet-18": 10.7, "ResNet-50": 11.0}
ALL = {"AlexNet": 9, "VGG-16": 9, "ResNet-18": 8, "ResNet-50": 8}
MOST_GAP = 0.003
JUDGED = ("0.05 std", "0.08 std, images too", "0.1 std, images too")
SHOWN = "0.1 std, images too"


def text(reports, runs):
    """The page."""
    targets = _targets(reports, runs)
    parts = [HEAD]
    if targets:
        parts.append("## The targets\n\n" + markdown(["target", "measured", ""], targets) + "\n")
    if runs:
        parts.append(_training(runs))
    if "ratios" in reports:
        parts += [_ratios(reports["ratios"]), _unet(reports["ratios"]["unet"])]
    if "noise" in reports:
        parts.append(_noise(reports["noise"]))
    if "memory" in reports:
        parts.append(_memory(reports["memory"]))
    return "\n\n".join(map(_filled, "\n".join(parts).split("\n\n")))


def _filled(block):
    """A paragraph as one line, which is wrapped at the end; tables and headings as they are."""
    return block if block.startswith(("|", "#", "!")) else " ".join(block.split("\n"))


def paired(runs, network, arm, column="accuracy"):
    """Figures of the runs of an arm, and of the plain runs with the same seeds."""
    found = {}
    for run in runs:
        spec = run["spec"]
        if spec["network"] == network:
            found[spec["arm"], spec["seed"]] = run[column]
    seeds = [seed for name, seed in found if name == arm and ("plain", seed) in found]
    return [found[arm, seed] for seed in seeds], [found["plain", seed] for seed in seeds]


def gap_of(runs, network, arm, column="accuracy"):
    """``(mean, low, high)`` of an arm less plain, paired by seed; ``None`` below two seeds."""
    first, second = paired(runs, network, arm, column)
    return difference(first, second) if len(first) > 1 else None


def _networks(runs):
    return sorted({run["spec"]["network"] for run in runs}, reverse=True)


def _training_rows(runs):
    for network in _networks(runs):
        for arm in ARMS:
            chosen = [
                run
                for run in runs
                if run["spec"]["network"] == network and run["spec"]["arm"] == arm
            ]
            if not chosen:
                continue
            gap = gap_of(runs, network, arm) if arm != "plain" else None
            loss = gap_of(runs, network, arm, "test_loss") if arm != "plain" else None
            ratio = sum(run["ratio"] for run in chosen) / len(chosen)
            yield [
                network,
                arm,
                len(chosen),
                "" if arm == "plain" else f"{ratio:.1f}x",
                interval([run["accuracy"] for run in chosen], 2),
                _signed(gap, 100, 2),
                _signed(loss, 1, 4),
            ]


def _signed(gap, scale, digits):
    if gap is None:
        return ""
    mean, low, high = (scale * value for value in gap)
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _lite(runs):
    if any(run["spec"]["network"].startswith("lite0") for run in runs):
        return """`lite0` is EfficientNet-Lite0 with its pretrained weights, fine-tuned at 224x224
on 255 flowers, tested on 600."""
    return """Fine-tuning EfficientNet-Lite0 at 224x224 is part of the command, and was not run:
there was no processor time for it."""


def _training(runs):
    header = [
        "network",
        "bound",
        "seeds",
        "ratio",
        "accuracy, %",
        "gap, points",
        "gap of test loss",
    ]
    scratch = next(run for run in runs if len(run["rows"]) > 1)
    return f"""## Accuracy with and without (Figs. 9 and 10)

Trainings from scratch on the hand signs, split by hundreds of file numbers ({scratch["train"]} to
train on, {scratch["test"]} to test on), SGD with momentum, one rise and fall of the rate, batches
of 32; the mean of the last {LAST} epochs counts, because at higher rates accuracy swings by points
from one epoch to the next (it was five, until the curves of the first seed were there). Runs of
one seed have the same weights at the start, the same order and the same crops. {_lite(runs)}
Gaps are means over paired seeds with 95 % intervals by Student's t; the
ratio is that of the last step, all saved bytes counted.

{markdown(header, _training_rows(runs))}

![Test errors by epoch](activations-accuracy.png)

Runs: [activations-runs.jsonl](activations-runs.jsonl)
"""


def _ratios(ratios):
    rows = []
    for network, found in ratios["networks"].items():
        rows.append([network, "paper", "", "", "", f"{PAPER[network]}x"])
        for case, row in found["cases"].items():
            saved = f"{row['raw_bytes'] / 1e6:.0f} MB"
            columns = ("ratio", "ratio_images_kept", "ratio_of_conv_inputs")
            rows.append([network, case, saved, *(f"{row[column]:.2f}x" for column in columns)])
    kinds = []
    for network, found in ratios["networks"].items():
        case = found["cases"][SHOWN]
        stored = sum(part for _, part in case["kinds"].values())
        for kind, (raw, part) in sorted(case["kinds"].items(), key=lambda item: -item[1][1]):
            if part > 0.01 * stored:
                kinds.append(
                    [network, kind, f"{raw / case['raw_bytes']:.1%}", f"{part / stored:.1%}",
                     f"{raw / part:.1f}x"]
                )  # fmt: skip
    each = ", ".join(f"{name} {row['steps']}" for name, row in ratios["networks"].items())
    steps = f"a few steps ({each})"
    first = [
        "network",
        "bound",
        "saved",
        "all saved bytes",
        "images kept",
        "inputs of convolutions",
    ]
    second = ["network", f"what, at {SHOWN}", "share of raw", "share of stored", "ratio"]
    return f"""## Table 1: times less at 224x224

One forward and backward pass over ImageNet photographs at full shapes and widths, `zstd`;
*predicted* is the codec of that name, which has bit for bit the gradients of `zstd`. No
trained weights of these networks were at hand: they are those after {steps} of Adam on
photographs of flowers at a reduced size (64x64, AlexNet at 224x224; VGG-16 with a small
classifier), or the initial ones. The paper counts inputs of convolutions only, images among them,
which `inputs=True` makes lossy as the paper does. By default they are kept by reference, for the
caller holds them anyway: the column *images kept* counts them in full.

{markdown(first, rows)}

Where the bytes are:

{markdown(second, kinds)}
"""


def _unet(unet):
    rows = [
        [case, f"{row['raw_bytes'] / 1e6:.0f} MB", f"{row['stored_bytes'] / 1e6:.1f} MB",
         f"{row['ratio']:.2f}x", f"{row['ratio_of_conv_inputs']:.2f}x"]
        for case, row in unet["cases"].items()
    ]  # fmt: skip
    header = ["bound", "saved", "kept", "all saved bytes", "inputs of convolutions"]
    return f"""## 3-D U-Net

Three levels, width 16, a volume of {unet["size"]}^3 (smooth noise; no real volumes were at hand),
after ten steps.

{markdown(header, rows)}
"""


def _noise(noise):
    rows = []
    for network, found in noise["networks"].items():
        for case, layers in found["layers"].items():
            ratios = [row["predicted"] / row["measured"] for row in layers.values()]
            inside = [row["within_one_sigma"] for row in layers.values()]
            rows.append(
                [network, case, len(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}",
                 f"{min(inside):.1%} to {max(inside):.1%}"]
            )  # fmt: skip
    errors = noise["errors"]
    elements = f"{errors['elements']:,} elements, {errors['zeros']:.0%} of them zeros"
    largest = f"{errors['largest']:.4f} of the bound, the standard deviation "
    largest += f"{errors['deviation']:.3f} of it (uniform: {errors['uniform']:.3f})"
    drawn = ", ".join(f"{found['drawn']} of {name}" for name, found in noise["networks"].items())
    header = ["network", "", "convolutions", "predicted / measured sigma", "within one sigma"]
    return f"""## Errors (Figs. 3, 6 and 8)

At {noise["share"]} of the standard deviation. Left: the input of a convolution of ResNet-18,
{elements}, which are kept exactly (largest error there: {errors["largest_at_zeros"]:g}).
The largest error elsewhere is {largest}. Right: errors of weight gradients over the
standard deviation of their output channel ({drawn}; settled, stochastic). A normal deviate is
within one sigma in 68.3 % of all cases, and the paper reports 68.2 %. Those of the ResNets are
normal. In AlexNet and VGG-16 some input channels are nearly always zero and others not, so that a
layer is a mixture of narrow and wide normals; the table takes whole layers, where output channels
differ, too.

![Errors of activations and gradients](activations-errors.png)

{markdown(header, rows)}

![Predicted against measured sigma](activations-sigma.png)

*Settled* weights are those of Table 1. The formula takes the errors of neighbours as independent.
Rounding to the nearest code gives equal neighbours equal errors: where a network without batch
normalisation has wide regions of one value, its gradients get more noise than predicted.
Stochastic rounding draws each error anew.
"""


def _compositions(found):
    plain = found["plain"]["peak_bytes"]
    rows = [
        [name, f"{row['peak_bytes'] / 1e6:.0f} MB", f"{plain / row['peak_bytes']:.2f}x",
         f"{row['stored_bytes'] / 1e6:.0f} MB" if row["stored_bytes"] else "",
         f"{row['seconds']:.2f} s"]
        for name, row in found.items()
    ]  # fmt: skip
    return markdown(["", "peak", "below plain", "compressed bytes", "CPU time"], rows)


def _memory(memory):
    batches = []
    for batch, row in memory["overhead"].items():
        seconds = row["seconds"]["plain"]["median"]
        over = row["overhead"]
        batches.append(
            [batch, f"{int(batch) / seconds:.1f}",
             *(f"{over[codec]['median']:+.1%}" for codec in ("int8", "zstd", "bits")),
             *(f"{memory['peaks'][batch][name]['peak_bytes'] / 1e6:.0f} MB"
               for name in ("plain", "zstd"))]
        )  # fmt: skip
    # Its images a second are by the clock, which other work has slowed down by chance.
    fits = [[name, row["batch_size"]] for name, row in memory["largest_batches"].items()]
    second = ["batch", "images/CPU s", "int8", "zstd", "bits", "peak, plain", "peak, zstd"]
    parts = [f"""## Memory and time

ResNet-18 of width 64 at 32x32, batch {memory["batch"]}: the peak of a step above what there was,
each row in a process of its own. *checkpoint* recomputes each block; *inputs* compresses what a
region reads, *all* also what it computes again. Offload (`offload=True`) moves compressed bytes to
the host's memory; on a CPU there is nowhere to move them to, so that it has no row.

{_compositions(memory["compositions"])}

The same of ResNet-110, which has 54 blocks of 16 to 64 channels:

{_compositions(memory["deep"])}

What one block computes again is there all at a time. Of eight wide blocks that is more than
compression leaves of all of them; of 54 narrow ones it is little, and the two together need half of
the better one.

![The resident set over a step](activations-timeline.png)

By batch (Fig. 11), CPU time over plain, rounds interleaved:

{markdown(second, batches)}

![Overhead and peak by batch](activations-batches.png)
"""]  # fmt: skip
    if fits:
        budget = memory["budget_bytes"] / 1e6
        parts.append(f"""The largest batch that `find_batch_size` finds within {budget:.0f} MB:

{markdown(["", "images"], fits)}
""")
    return "\n".join(parts)


def _targets(reports, runs):
    rows = _accuracy_targets(runs)
    for network, found in reports.get("ratios", {"networks": {}})["networks"].items():
        for case in ("0.05 std, images too", PREDICTED, *JUDGED[1:]):
            row = found["cases"][case]
            for what, value, least in (
                ("all saved bytes", row["ratio"], ALL[network]),
                ("inputs of convolutions", row["ratio_of_conv_inputs"], PAPER[network]),
            ):
                name = f"{network}, {case}, {what}: at least {least}x"
                rows.append([name, f"{value:.2f}x", _met(value >= least)])
    return rows + _noise_targets(reports) + _memory_targets(reports)


def _accuracy_targets(runs):
    rows = []
    for network in _networks(runs):
        for arm in JUDGED:
            gap = gap_of(runs, network, arm)
            if gap is None:
                continue
            seeds = len(paired(runs, network, arm)[0])
            within = abs(gap[0]) <= MOST_GAP and gap[1] <= 0 <= gap[2] and seeds >= 3
            what = f"{network}, {arm}: gap at most 0.3 points and not significant, {seeds} seeds"
            rows.append([what, _signed(gap, 100, 2), _met(within)])
    return rows


def _noise_targets(reports):
    if "noise" not in reports:
        return []
    rows = []
    for case in ("initial weights", "settled", "settled, stochastic"):
        ratios = [
            row["predicted"] / row["measured"]
            for found in reports["noise"]["networks"].values()
            for row in found["layers"][case].values()
        ]
        within = min(ratios) >= 0.8 and max(ratios) <= 1.25
        what = f"predicted / measured sigma of {len(ratios)} convolutions, {case}: 0.8 to 1.25"
        rows.append([what, f"{min(ratios):.3f} to {max(ratios):.3f}", _met(within)])
    return rows


def _memory_targets(reports):
    if "memory" not in reports:
        return []
    rows = reports["memory"]["compositions"]
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    less = peaks["plain"] / peaks["zstd"]
    over = peaks["zstd"] / peaks["checkpoint"]
    found = [
        ["peak memory: at least 2.5x below plain", f"{less:.2f}x", _met(less >= 2.5)],
        ["peak over per-block checkpointing: below 1", f"{over:.2f}", _met(over < 1)],
    ]
    for network, place in (("ResNet-18", "compositions"), ("ResNet-110", "deep")):
        peaks = {name: row["peak_bytes"] for name, row in reports["memory"][place].items()}
        together = min(size for name, size in peaks.items() if name.startswith("checkpoint + "))
        both = together / min(peaks["zstd"], peaks["checkpoint"])
        what = f"with checkpointing, over the better of both, {network}: below 1"
        found.append([what, f"{both:.2f}", _met(both < 1)])
    measured = reports["memory"]["overhead"]
    # A smoke run does not measure the time of the batch whose memory it looks at.
    row = measured.get(str(reports["memory"]["batch"])) or list(measured.values())[-1]
    largest = row["overhead"]
    for codec, most in (("zstd", 0.15), ("int8", 0.08)):
        value = largest[codec]["median"]
        what = f"CPU time over plain, {codec}: at most {most:.0%}"
        found.append([what, f"{value:+.1%}", _met(value <= most)])
    return found


def _met(within):
    return "met" if within else "missed"
