"""Planning an epoch: time and memory at ImageNet's size for 1,024 ranks, what is read twice, and
how well samples are mixed, compared with WebDataset.

Asserts that every order compared is a permutation. The picture goes next to the figures (needs
matplotlib).
"""

import json
import random
import subprocess
import sys

import numpy as np
from common import judge, parse_args, print_table, save, show, summary
from webdataset.filters import _shuffle

from pcrshard.training.epoch_order import Geometry, Rules, epoch_order, mixture, worker_batches
from pcrshard.training.shard_schedule import account, schedule

IMAGENET = [1024] * 1250 + [1167]  # 1,281,167 samples
SHARDS, ROWS, BATCH = 100, 1000, 256
SAMPLES = SHARDS * ROWS
WINDOWS = (1, 2, 4, 8, 16, 32)
BUFFERS = (500, 1000, 2000, 5000, 10000, 20000)
IN_TABLE = {"window 2", "window 4", "window 16", "buffer 1000", "buffer 5000", "full shuffle"}
FRESH = """
import json, re, time
import numpy as np
from pcrshard.training.epoch_order import Geometry, Rules, epoch_order, worker_batches
sizes = [1024] * 1250 + [1167]
epoch_order([10], Geometry(1))  # what NumPy loads at first use
# Not ru_maxrss: a child's begins at its parent's when it forked, and this parent has loaded torch.
status = lambda: open("/proc/self/status").read()
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", status())[1]) * 1024 / 1e6
before, begin = peak(), time.perf_counter()
order = epoch_order(sizes, Geometry(1024 * 32, max_world_size=1024), Rules(1), epoch=5)
batches = worker_batches(order, 1024, 1023, 4, 3)
seconds, after = time.perf_counter() - begin, peak()
assert len(np.unique(order.ids)) == order.steps * 1024 * 32 and len(batches[0]) == 32
print(json.dumps([seconds, after - before]))
"""


def speed(rounds):
    """Seconds and MB that one rank of 1,024 needs for an epoch, each round in a fresh process."""
    runs = [
        json.loads(
            subprocess.run([sys.executable, "-c", FRESH], capture_output=True, check=True).stdout
        )
        for _ in range(rounds)
    ]
    seconds, megabytes = zip(*runs, strict=True)
    return {"seconds": summary(seconds), "megabytes": summary(megabytes)}


def reading():
    """Bytes read, as multiples of the dataset, and shards held, for several jobs over ImageNet."""
    rows = []
    for world, workers, phases in (
        (1, 4, 4),
        (8, 1, 4),
        (8, 4, 4),
        (8, 3, 4),
        (64, 4, 4),
        (1024, 4, 4),
        (1024, 1, 1),
    ):
        order = epoch_order(IMAGENET, Geometry(32 * world, world, phases), Rules(1))
        report = account(order, IMAGENET, [1000] * len(IMAGENET), world, workers)
        row = {
            "world": world,
            "workers": workers,
            "phases": phases,
            "read": report.read_bytes.sum() / report.once_bytes,
        }
        row |= {
            "read_if_shared": report.rank_bytes.sum() / report.once_bytes,
            "held_by_worker": int(report.open_shards.max()),
        }
        rows.append({**row, "held_by_rank": int(report.open_shards.sum(1).max())})
    return rows


def orders():
    """Yields of each order: its name, the most samples held, those of them not yet used, the ids
    (SAMPLES,) in the order of training, and the ids in the order of the stream.
    """
    sizes = [ROWS] * SHARDS
    rng = np.random.default_rng(1)
    yield "full shuffle", SAMPLES, SAMPLES, rng.permutation(SAMPLES), np.arange(SAMPLES)
    for window in WINDOWS:
        rules = Rules(1, shuffle_shards=window, last="short")
        order = epoch_order(sizes, Geometry(BATCH, lanes_per_rank=1), rules)
        plan = schedule(worker_batches(order), sizes)
        unused = np.bincount(plan.first).cumsum() * ROWS - np.arange(plan.first.max() + 1) * BATCH
        yield (
            f"window {window}",
            plan.peak() * ROWS,
            int(unused.max()),
            order.ids,
            mixture([sizes], [1], SAMPLES, rules),
        )
    for buffer in BUFFERS:
        shards = rng.permutation(SHARDS)  # WebDataset's shuffled list of shards
        stream = (shards[:, None] * ROWS + np.arange(ROWS)).ravel()
        ids = np.fromiter(_shuffle(iter(stream.tolist()), buffer, rng=random.Random(1)), np.int64)
        yield f"buffer {buffer}", buffer, buffer, ids, stream


def entropy(counts):
    """Bits of a histogram."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum()) + 0.0


def mixing(ids, stream):
    """Measures of one order; with one class per shard (sorted data, the worst case), the entropy is
    that of classes.
    """
    assert np.array_equal(np.sort(ids), np.arange(SAMPLES))
    place = np.empty(SAMPLES, np.int64)
    place[stream] = np.arange(SAMPLES)
    moved = np.abs(place[ids] - np.arange(SAMPLES))
    batches = ids[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH) // ROWS
    distinct = [len(set(batch)) for batch in batches.tolist()]
    bits = [entropy(np.bincount(batch)) for batch in batches]
    return {
        "rank_correlation": float(
            np.corrcoef(place[ids], np.arange(SAMPLES))[0, 1]
        ),  # both are ranks
        "moved": summary(moved.tolist()) | {"p99": float(np.percentile(moved, 99))},
        "shards_per_batch": summary(distinct)
        | {"mean": float(np.mean(distinct)), "min": min(distinct)},
        "entropy_bits": {"mean": float(np.mean(bits)), "min": min(bits)},
    }


def shares(rounds):
    """How much a rare dataset's share of a batch varies, as a multiple of what drawing at random
    would give.
    """
    sizes, share = [[ROWS] * 80, [ROWS] * 20], 0.2
    result = []
    for slots in (1, 8):
        spread = []
        for seed in range(rounds):
            sequence = mixture(sizes, [1 - share, share], SAMPLES, Rules(seed))
            order = epoch_order(
                sizes[0] + sizes[1], Geometry(BATCH, slots), Rules(seed), sequence=sequence
            )
            spread.append((order.ids.reshape(-1, BATCH) >= 80 * ROWS).mean(1).std())
        result.append(
            {
                "slots": slots,
                "spread": float(np.mean(spread)) / (share * (1 - share) / BATCH) ** 0.5,
            }
        )
    return result


def draw(rows, scatter, path):
    """Left: where the first samples of an epoch come from. Right: shards in a batch, by samples
    held in memory.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(8, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.05, 1))
    panels = left.subplots(2, 2, sharex=True, sharey=True)
    for axes, (name, place) in zip(panels.flat, scatter.items(), strict=True):
        colour = "#2b6cb0" if "window" in name else "#c05621"
        axes.plot(
            np.arange(0, len(place), 8) / 1000,
            place[::8] / 1000,
            ".",
            markersize=1.2,
            alpha=0.5,
            color=colour,
        )
        source = "pcrshard, " if "window" in name else "WebDataset, "
        axes.set_title(source + name, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    left.supxlabel("place in the epoch (thousand samples)", fontsize=9)
    left.supylabel("place in the stream of shards (thousand)", fontsize=9)
    axes = right.subplots()
    styles = {
        ("buffer", "held"): ("o-", "#c05621", "WebDataset, buffer 500 to 20k"),
        ("window", "held"): ("s-", "#2b6cb0", "pcrshard, window 1 to 32"),
        ("window", "unused"): ("s--", "#90cdf4", "the same, unused samples only"),
    }
    for (kind, held), (style, colour, label) in styles.items():
        found = [
            (row[held], row["shards_per_batch"]["mean"])
            for row in rows
            if row["name"].startswith(kind)
        ]
        axes.plot(
            *zip(*found, strict=True), style, color=colour, label=label, markersize=5, linewidth=1.3
        )
    full = next(row for row in rows if row["name"] == "full shuffle")["shards_per_batch"]["mean"]
    axes.axhline(full, color="#4a5568", linestyle="--", linewidth=1)
    axes.text(450, full * 1.04, "full shuffle", fontsize=9, color="#4a5568")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="samples held in memory, at most",
        ylabel="different shards in a batch of 256, mean",
    )
    axes.set_xticks([500, 1000, 2000, 5000, 10000, 30000], ["500", "1k", "2k", "5k", "10k", "30k"])
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.set_ylim(1, 450)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    figure.suptitle("Mixing one stream of 100 shards of 1000 samples", fontsize=11)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def main():
    args = parse_args(__doc__, rounds=5)
    plan = speed(args.rounds)
    print_table(
        "one epoch, 1,281,167 samples, 1,251 shards, 1,024 ranks; a fresh process",
        ["seconds", "MB above the interpreter"],
        [[show(plan["seconds"]), show(plan["megabytes"], 0)]],
    )
    read = reading()
    header = [
        "ranks",
        "workers",
        "phases",
        "read, x dataset",
        "if a rank shares",
        "held by a worker",
        "by a rank",
    ]
    cells = [
        [
            *(str(row[key]) for key in ("world", "workers", "phases")),
            *(f"{row[key]:.2f}" for key in ("read", "read_if_shared")),
            *(str(row[key]) for key in ("held_by_worker", "held_by_rank")),
        ]
        for row in read
    ]
    print_table("shards of ImageNet, window 4", header, cells)
    mixed, scatter = [], {}
    for name, held, unused, ids, stream in orders():
        mixed.append({"name": name, "held": held, "unused": unused, **mixing(ids, stream)})
        if name in ("buffer 1000", "buffer 5000", "window 4", "window 16"):
            place = np.empty(SAMPLES, np.int64)
            place[stream] = np.arange(SAMPLES)
            scatter[name] = place[ids][:20000]
    full = mixed[0]["entropy_bits"]["mean"]
    rows = []
    for row in (row for row in mixed if row["name"] in IN_TABLE):
        bits, distinct, moved = row["entropy_bits"], row["shards_per_batch"], row["moved"]
        figures = [
            f"{row['rank_correlation']:.4f}",
            f"{moved['median']:.0f}",
            f"{moved['p99']:.0f}",
            f"{distinct['mean']:.1f}",
            str(distinct["min"]),
        ]
        rows.append(
            [
                row["name"],
                str(row["held"]),
                str(row["unused"]),
                *figures,
                f"{bits['mean'] / full:.2f}",
                f"{bits['min'] / full:.2f}",
            ]
        )
    header = [
        "order",
        "held",
        "unused",
        "rank corr.",
        "|moved| median",
        "99 %",
        "shards/batch",
        "worst",
        "class entropy",
        "worst",
    ]
    print_table("one stream of 100 x 1000 samples, batches of 256, one class a shard", header, rows)
    spread = shares(args.rounds)
    title = "a dataset with 20 % of a mixture: spread of its share of a batch"
    rows = [[str(row["slots"]), f"{row['spread']:.2f}"] for row in spread]
    print_table(title, ["slots", "x random"], rows)
    targets = [
        judge(
            "seconds to plan one epoch for 1,024 ranks",
            plan["seconds"]["median"],
            1.0,
            at_most=True,
        ),
        judge("MB to plan it", plan["megabytes"]["median"], 100, at_most=True),
    ]
    save(args, {"speed": plan, "reading": read, "mixing": mixed, "mixture": spread}, targets)
    draw(
        mixed,
        {name: scatter[name] for name in ("buffer 1000", "buffer 5000", "window 4", "window 16")},
        args.json.removesuffix(".json") + ".png",
    )


if __name__ == "__main__":
    main()
