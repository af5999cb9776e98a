"""Figures and text of docs/evidence/imagenet.md."""

import math
import statistics
from collections import defaultdict

from .photographs import Point, points
from .report import COMMAND, figure, finish, flow, markdown

SHADES = {"standard": "#2b6cb0", "q95": "#dd6b20", "source": "#1a202c", "resized": "#2f855a"}
MAIN = 224
# Of normal deviations.
Z = 1.96
# A point that is so little below the best is called alike.
TOLERANCE = 0.01


def gathered(rows):
    """{(network, crop, smoothing): {point: marks}}, blocks in their order."""
    found = defaultdict(lambda: defaultdict(str))
    for row in sorted(rows, key=lambda row: row["block"]):
        case = found[row["network"], row["crop"], row["smoothing"]]
        for point, marks in row["marks"].items():
            case[point] += marks
    return {case: dict(marks) for case, marks in found.items()}


def share(marks, kinds="1"):
    """(share, low, high) of photographs with these marks: the 95 % interval of Wilson."""
    count = len(marks)
    hits = sum(mark in kinds for mark in marks) / count
    middle = (hits + Z * Z / (2 * count)) / (1 + Z * Z / count)
    spread = hits * (1 - hits) / count + Z * Z / (4 * count * count)
    half = Z * math.sqrt(spread) / (1 + Z * Z / count)
    return hits, middle - half, middle + half


def gap(marks, other):
    """(mean, low, high) of one point's accuracy minus another's, over the same photographs."""
    pairs = [(a == "1") - (b == "1") for a, b in zip(marks, other, strict=False)]
    mean = statistics.fmean(pairs)
    half = Z * statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    return mean, mean - half, mean + half


def draw(lab, rows, parts, sizes):
    """Accuracy against bytes and against decode time."""
    cases = gathered(rows)
    crops = sorted({crop for _, crop, _ in cases})
    main = MAIN if MAIN in crops else crops[0]
    networks = [name for name in ("lite0", "lite2") if (name, main, False) in cases]
    _draw_bytes(cases, networks, main, sizes["bytes"], lab.figure("imagenet-bytes"))
    if parts.get("cpu"):
        costs = parts["cpu"]["milliseconds"]
        _draw_cpu(cases, networks[0], main, costs, lab.figure("imagenet-decode"))


def _draw_bytes(cases, networks, crop, sizes, path):
    fig, axes = figure(len(networks), height=5)
    for ax, network in zip(axes[0], networks, strict=True):
        for store, shade in SHADES.items():
            names = [point.name for point in points() if point.store == store]
            _curve(ax, cases[network, crop, False], names, sizes, shade, store, "o-")
            smoothed = cases.get((network, crop, True))
            if smoothed and store in ("standard", "q95"):
                _curve(ax, smoothed, names[:-1], sizes, shade, f"{store}, smoothed", "x:")
        count = len(next(iter(cases[network, crop, False].values())))
        ax.set_title(f"EfficientNet-{network.title()}, {count} photographs")
        ax.set_xscale("log")
        ax.set_xlabel("kB a photograph, read")
        ax.set_ylim(0, 100)
    axes[0][0].set_ylabel("top-1 (%), 95 % interval")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    finish(fig, path)


def _curve(ax, marks, names, across, shade, name, style):
    shares = [[100 * each for each in share(marks[point])] for point in names]
    x = [across[point] / 1e3 for point in names]
    errors = [
        [mean - low for mean, low, _ in shares],
        [high - mean for mean, _, high in shares],
    ]
    y = [mean for mean, _, _ in shares]
    ax.errorbar(x, y, errors, fmt=style, color=shade, label=name, capsize=2, ms=4, lw=1.2)


def _draw_cpu(cases, network, crop, costs, path):
    fig, axes = figure(height=4.5)
    ax = axes[0][0]
    for store, shade in SHADES.items():
        names = [point.name for point in points() if point.store == store]
        across = {name: 1e3 * costs[name] for name in names}
        _curve(ax, cases[network, crop, False], names, across, shade, store, "o-")
        smoothed = cases.get((network, crop, True))
        if smoothed and store in ("standard", "q95"):
            across = {name: 1e3 * costs[f"{name} smooth"] for name in names[:-1]}
            _curve(ax, smoothed, names[:-1], across, shade, f"{store}, smoothed", "x:")
    ax.set_xlabel("CPU milliseconds to decode a photograph to the crop")
    ax.set_ylabel("top-1 (%), 95 % interval")
    ax.set_ylim(0, 100)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    finish(fig, path)


def _percent(three):
    mean, low, high = (100 * each for each in three)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _points_of_gap(three):
    mean, low, high = (100 * each for each in three)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def text(rows, parts, sizes):
    """The page."""
    cases = gathered(rows)
    crops = sorted({crop for _, crop, _ in cases})
    main = MAIN if MAIN in crops else crops[0]
    networks = [name for name in ("lite0", "lite2") if (name, main, False) in cases]
    sections = [_head(rows, parts, sizes)]
    sections += [_network_text(cases, network, main, parts, sizes["bytes"]) for network in networks]
    sections.append("![Accuracy against bytes](imagenet-bytes.png)\n")
    if parts.get("cpu"):
        sections.append("![Accuracy against decode time](imagenet-decode.png)\n")
    sections.append(_crops_text(cases, sizes["bytes"]))
    return flow("\n".join(sections))


def _head(rows, parts, sizes):
    number = rows[0]["number"].removeprefix("torch.")
    agree = parts.get("agreement")
    same = (
        f" Computed in {number}: on {agree['images']} photographs the best guess is that of "
        f"float32 for {100 * agree['share']:.0f} %."
        if agree
        else ""
    )
    return f"""# An ImageNet network, scan by scan

What a network that was trained on whole photographs makes of parts of them: EfficientNet-Lite0 and
-Lite2 with the weights of their packages, never trained again; the middle square of 0.875 of the
shorter side, resized. Every scan of the scripts `standard` and `q95`, with and without the
smoothing of unfinished blocks, and a JPEG resized once to 256 pixels at quality 90, as
users of FFCV and DALI store it.{same} Written by `{COMMAND} imagenet`; rows are kept in
[imagenet-rows.jsonl](imagenet-rows.jsonl), so that a run that was stopped goes on.

The photographs are files named by their synset, one a class: those of `shared/data` first, then
those of a folder that `PCRSHARD_IMAGENET` names, {sizes["images"]} in all here. Some of them, or
all, may be of ImageNet's training set, so that accuracies are higher than on its validation set;
their differences are what counts. Bytes are parts of whole shards, index included; of files for
the others.
"""


def _network_text(cases, network, crop, parts, sizes):
    marks = cases[network, crop, False]
    smoothed = cases.get((network, crop, True), {})
    costs = (parts.get("cpu") or {}).get("milliseconds", {})
    full = marks["source full"]
    rows = []
    for point in points():
        name = point.name
        smooth = smoothed.get(name)
        rows.append(
            [
                name,
                f"{sizes[name] / 1e3:.1f}",
                f"{costs[name]:.2f}" if name in costs else "",
                _percent(share(marks[name])),
                _percent(share(marks[name], "15")),
                _points_of_gap(gap(marks[name], full)),
                _points_of_gap(gap(smooth, marks[name])) if smooth else "",
            ]
        )
    header = ["", "kB", "decode, ms", "top-1 (%)", "top-5 (%)", "minus source", "smoothing adds"]
    return f"""## EfficientNet-{network.title()} at {crop} pixels

{len(full)} photographs; intervals are 95 %, of Wilson for shares, of pairs for differences.

{markdown(header, rows)}

{_findings(marks, smoothed, sizes, full)}
"""


def _cheapest(marks, sizes, full, store):
    """The first point of a store whose mean is within TOLERANCE of the source's, or ``None``."""
    for point in points():
        known = point.store == store and point.name in marks
        if known and gap(marks[point.name], full)[0] >= -TOLERANCE:
            return point.name, sizes[point.name]
    return None


def _rival(marks, sizes):
    """The best prefix of no more bytes than the resized file, against it."""
    name = "resized full"
    fewer = [point.name for point in points() if sizes[point.name] <= sizes[name]]
    rival = max((point for point in fewer if point != name), key=lambda point: share(marks[point]))
    change = gap(marks[rival], marks[name])
    kept = "resizing keeps more" if change[2] < 0 else "no difference is shown"
    return f"of the prefixes of no more bytes `{rival}` is best, {_points_of_gap(change)}, {kept}"


def _findings(marks, smoothed, sizes, full):
    lines = []
    found = {store: _cheapest(marks, sizes, full, store) for store in ("standard", "q95")}
    for store, best in found.items():
        if best is None:
            lines.append(f"no prefix of `{store}` is within a point of the source")
        else:
            times = sizes["source full"] / best[1]
            lines.append(
                f"`{best[0]}` is the first of its script within a point of the source's top-1, "
                f"for {times:.2f} times fewer bytes"
            )
    scripts = gap(marks["q95 4"], marks["standard 4"])
    times = sizes["standard 4"] / sizes["q95 4"]
    lines.append(
        f"`q95 4` against `standard 4`, of {times:.2f} times its bytes: {_points_of_gap(scripts)}"
    )
    small = gap(marks["resized full"], full)
    lines.append(
        f"resized once, {sizes['source full'] / sizes['resized full']:.1f} times fewer bytes give "
        f"{_points_of_gap(small)} points, but one resolution for ever: {_rival(marks, sizes)}"
    )
    if smoothed:
        first = Point("standard", 1).name
        change = gap(smoothed[first], marks[first])
        lines.append(f"smoothing changes `standard` scan 1 by {_points_of_gap(change)} points")
    return "Seen: " + "; ".join(lines) + ". " + _not_shown(marks, smoothed)


def _not_shown(marks, smoothed):
    if not smoothed:
        return "What did not show: smoothing was not measured with this network yet."
    later = [name for name in smoothed if not name.endswith(" 1")]
    shown = [name for name in later if gap(smoothed[name], marks[name])[1] > 0]
    worse = [name for name in later if gap(smoothed[name], marks[name])[2] < 0]
    chance = "of so many intervals some miss by chance"
    hurts = f"; it is shown to hurt at {', '.join(worse)} ({chance})" if worse else ""
    if shown:
        return f"Beyond scan 1, smoothing is shown to help at {', '.join(shown)} only{hurts}."
    return f"What did not show: that smoothing helps at any scan but the first{hurts}."


def _crops_text(cases, sizes):
    crops = sorted({crop for _, crop, _ in cases})
    if len(crops) < 2:
        return "## Other crops\n\nNot measured yet.\n"
    rows = []
    kept = next(list(marks) for (_, crop, _), marks in cases.items() if crop != MAIN)
    for (network, crop, smoothing), marks in sorted(cases.items()):
        if not smoothing:
            cells = [f"{100 * share(marks[name])[0]:.1f}" for name in kept]
            rows.append([network, crop, len(next(iter(marks.values()))), *cells])
    return (
        "## Other crops\n\nTop-1 (%) by the side of the crop that the network sees.\n\n"
        + markdown(["network", "side", "photographs", *kept], rows)
        + f"\n\n{_crops_found(cases, sizes)}\n"
    )


def _crops_found(cases, sizes):
    """Of each crop, the first scan that is enough, and what smoothing adds to scan 1."""
    enough = []
    helped = []
    for (network, crop, smoothing), marks in sorted(cases.items()):
        first = Point("standard", 1).name
        if smoothing:
            change = gap(marks[first], cases[network, crop, False][first])
            helped.append(f"{network} at {crop} {_points_of_gap(change)}")
            continue
        name, size = _cheapest(marks, sizes, marks["source full"], "standard")
        times = sizes["source full"] / size
        enough.append(f"{network} at {crop} scan {name.split()[1]} ({times:.1f}x fewer bytes)")
    return (
        f"The first scan of `standard` in this table within a point of the source: "
        f"{', '.join(enough)}. Points that smoothing adds to `standard` scan 1: "
        f"{', '.join(helped)}."
    )
