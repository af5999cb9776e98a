"""The tables of docs/evidence/checkpoints.md, from the results."""

import numpy as np

from .deltafigures import BANDWIDTHS, accuracies, at, by_network, last_pair, ratios_of, with_rivals
from .report import markdown

# Table 1 of the paper: LZMA, Zstd, SZ and its bound, Delta-DNN and its bound, accuracy, change.
PAPER_TABLE1 = {
    "VGG-16": (1.096, 1.088, "4.415 (7 %)", "7.394 (8 %)", "92.45 %", "-0.15"),
    "ResNet101": (1.098, 1.078, "4.192 (5 %)", "9.341 (10 %)", "93.05 %", "+0.42"),
    "EfficientNet": (1.099, 1.078, "3.204 (1 %)", "10.266 (10 %)", "84.82 %", "+0.07"),
}
PAPER_TABLE3 = {"VGG-16": (95, 7.702), "ResNet101": (89, 6.488), "EfficientNet": (110, 5.946)}


def ratio_of(sizes):
    """Ratio of a store, keyframes and manifest included."""
    return sizes["raw_bytes"] / sizes["stored_bytes"]


def version_ratio(sizes):
    """Mean ratio of the versions that are deltas."""
    raw = sizes["raw_bytes"] / len(sizes["files"])
    stored = [file["bytes"] for file in sizes["files"] if not file["keyframe"]]
    return raw / np.mean(stored)


def keyframe_share(sizes):
    """The share of a store's bytes that is in keyframes."""
    keyframes = [file["bytes"] for file in sizes["files"] if file["keyframe"]]
    return sum(keyframes) / sizes["stored_bytes"]


def points(loss):
    """A loss of accuracy as the paper prints it: a change in points."""
    return f"{-100 * loss + 0.0:+.2f}"  # never -0.00


def chain_loss(run, key):
    """Mean loss of accuracy over the versions of a store that were judged."""
    exact = accuracies(run)
    restored = run["chains"][key]["accuracy"]
    return float(np.mean([exact[int(epoch)] - value for epoch, value in restored.items()]))


def shift(row):
    """Relative difference of the next epoch's mean loss to that of the exact resume."""
    return row["restored_loss"] / row["exact_loss"] - 1


def error_by_move(pair):
    """Deviation of a uniform error within the chosen bound, by that of the epoch's own change."""
    return pair["ours"]["bound"] / np.sqrt(3) / pair["similarity"]["moved"]


def nudged(row):
    """The same of a run that chaos alone has moved, where there is one."""
    if "nudged_loss" not in row:
        return ""
    return f"{row['nudged_loss'] / row['exact_loss'] - 1:+.2%}"


def table1(runs):
    header = [
        "network", "", "bytes", "LZMA", "Zstd", "SZ3", "ours at 1 %", "ours, Algorithm 1",
        "accuracy", "SZ3", "ours",
    ]  # fmt: skip
    rows = []
    for name, row in PAPER_TABLE1.items():
        lzma, zstd, sz3, delta, accuracy, change = row
        rows.append([name, "paper", "", lzma, zstd, sz3, "", delta, accuracy, "", change])
    for run in runs:
        ours = last_pair(run)["ours"]
        rows.append(
            [
                run["name"],
                f"seed {run['seed']}",
                f"{run['raw_bytes'] / 1e6:.1f} MB",
                *_rival_cells(run),
                f"{at(ours['table'], 0.01)['ratio']:.2f}",
                f"**{ours['chosen']['ratio']:.2f}** ({ours['bound']:.1%})",
                f"{ours['accuracy_exact']:.2%}",
                points(run["rivals"]["sz3"]["chosen"]["loss"]) if "rivals" in run else "",
                points(ours["chosen"]["loss"]),
            ]
        )
    return markdown(header, rows)


def _rival_cells(run):
    if "rivals" not in run:
        return ["", "", ""]
    lossless = run["rivals"]["lossless"]
    sz3 = run["rivals"]["sz3"]["chosen"]
    ratio = f"{sz3['ratio']:.2f} ({sz3['bound']:.1%})"
    return [f"{lossless['LZMA']:.3f}", f"{lossless['Zstd']:.3f}", ratio]


def table2(runs):
    header = [
        "network", "epoch", "moved by", "at 1 %", "Algorithm 1", "bound", "error / move",
        "accuracy", "change", "95 % over pictures", "on the other half",
    ]  # fmt: skip
    rows = []
    for run in runs:
        for pair in sorted(run["pairs"].values(), key=lambda pair: pair["epoch"]):
            ours = pair["ours"]
            low, high = ours["chosen"]["loss_interval"]
            held_out = ours["held_out"]
            rows.append(
                [
                    f"{run['name']}, seed {run['seed']}",
                    pair["epoch"],
                    f"{pair['similarity']['moved']:.2%}",
                    f"{at(ours['table'], 0.01)['ratio']:.1f}x",
                    f"{ours['chosen']['ratio']:.1f}x",
                    f"{ours['bound']:.1%}",
                    f"{error_by_move(pair):.1f}",
                    f"{ours['accuracy_exact']:.2%}",
                    points(ours["chosen"]["loss"]),
                    f"{-100 * high:+.2f} to {-100 * low:+.2f}",
                    "none"
                    if held_out is None
                    else f"{held_out['bound']:.1%}: {points(held_out['loss'])}",
                ]
            )
    return markdown(header, rows)


def table3(runs):
    header = [
        "network", "", "versions", "original", "stored", "in keyframes", "ratio", "mean change",
    ]  # fmt: skip
    rows = [
        [name, "paper", versions, "", "", "", f"{ratio:.2f}", ""]
        for name, (versions, ratio) in PAPER_TABLE3.items()
    ]
    for run in runs:
        for key, chain in run["chains"].items():
            rows.append(
                [
                    f"{run['name']}, seed {run['seed']}",
                    f"{chain['bound']:.1%} ({'fixed' if key == 'fixed' else 'Algorithm 1'})",
                    f"{len(chain['files'])}, {chain['keyframes']} keyframes",
                    f"{chain['raw_bytes'] / 1e6:.0f} MB",
                    f"{chain['stored_bytes'] / 1e6:.1f} MB",
                    f"{keyframe_share(chain):.0%}",
                    f"{ratio_of(chain):.2f}",
                    points(chain_loss(run, key)) if "accuracy" in chain else "",
                ]
            )
    return markdown(header, rows)


def resume_table(runs):
    header = [
        "network", "a version", "whole run", "after epoch", "exact", "restored", "difference",
        "nudged by a millionth", "accuracy exact", "restored",
    ]  # fmt: skip
    rows = [
        [
            f"{run['name']}, seed {run['seed']}",
            f"{version_ratio(run['resume']):.1f}x",
            f"{ratio_of(run['resume']):.1f}x",
            row["after_epoch"],
            f"{row['exact_loss']:.4f}",
            f"{row['restored_loss']:.4f}",
            f"{shift(row):+.2%}",
            nudged(row),
            f"{row['exact_accuracy']:.2%}",
            f"{row['restored_accuracy']:.2%}",
        ]
        for run in runs
        for row in run["resume"]["rows"]
    ]
    return markdown(header, rows)


def literal_table(runs):
    header = ["network", *(f"{epsilon:.1%}" for epsilon in _epsilons(runs)), "kept by Algorithm 1"]
    rows = []
    for run in with_rivals(runs):
        found = run["rivals"]["literal"]
        cells = [f"{row['ratio']:.0f}x, {points(row['loss'])}" for row in found["table"]]
        kept = "none: the default" if found["is_default"] else f"{found['bound']:.1%}"
        rows.append([f"{run['name']}, seed {run['seed']}", *cells, kept])
    return markdown(header, rows)


def _epsilons(runs):
    return [row["bound"] for row in with_rivals(runs)[0]["rivals"]["literal"]["table"]]


def coder_table(runs):
    header = [
        "network", "codes at", "Zstd", "LZMA", "RLE+Zstd", "RLE+LZMA", "pcodec", "entropy",
        "keyframe: pcodec", "entropy",
    ]  # fmt: skip
    rows = []
    coders = ("zstd", "lzma", "rle+zstd", "rle+lzma", "pcodec", "entropy")
    for run in with_rivals(runs):
        for key, text in (("coders", "1 %"), ("coders_5", "5 %")):
            found = run["rivals"][key]["delta"]
            cells = [f"{found[coder]:.1f}" for coder in coders]
            whole = run["rivals"][key]["keyframe"]
            cells += [f"{whole['pcodec']:.2f}", f"{whole['entropy']:.2f}"]
            rows.append([run["name"], text, *cells])
    return markdown(header, rows)


def transfer_table(runs):
    header = ["network", "", *(f"{name}, s" for name in BANDWIDTHS)]
    rows = []
    for run in with_rivals(runs):
        for coder, ratio in ratios_of(run).items():
            megabits = run["raw_bytes"] * 8e-6 / ratio
            cells = [f"{megabits / speed:.3f}" for speed in BANDWIDTHS.values()]
            rows.append([run["name"], coder, *cells])
    return markdown(header, rows)


def network_table(runs):
    header = [
        "network",
        "parameters",
        "optimizer",
        "epochs",
        "pictures",
        "tested on",
        "seeds",
        "accuracy",
    ]
    rows = []
    for name, group in by_network(runs).items():
        recipe = group[0]["recipe"]
        optimizer = {"sgd": "SGD, momentum 0.9", "adamw": "AdamW"}[recipe["optimizer"]]
        rows.append(
            [
                name,
                f"{group[0]['parameters'] / 1e6:.2f} million",
                f"{optimizer}, {recipe['lr']:g} falling to a tenth",
                recipe["epochs"],
                f"{group[0]['train_pictures']} of {recipe['size']} px",
                group[0]["test_pictures"],
                len(group),
                ", ".join(f"{run['rows'][-1]['accuracy']:.1%}" for run in group),
            ]
        )
    return markdown(header, rows)
