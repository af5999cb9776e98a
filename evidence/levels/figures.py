"""Bytes that levels need for what a scan of a script has, and what is left at fewer bytes."""

import collections

import numpy as np
from scipy.stats import spearmanr

from ..pages import NotMeasured

# Of copies at the size of the source, and with the shorter side of 256 pixels.
QUALITIES = {"recompressed": (10, 20, 30, 40, 50, 60, 70, 80, 90), "resized": (40, 60, 75, 85, 92)}
SLOPES = np.geomspace(10, 1e-13, 600)
# Of q95, the last of the single scans of each of its groups 2 to 9; of standard, its scans.
ENDS = {"q95": (2, 5, 7, 10, 11, 15, 16, 19), "standard": tuple(range(1, 9))}
DRAWS = 200
MEASURES = ("msssim", "lite0", "lite2")


class Images:
    """The images of a set by one script: arrays (images, scans)."""

    def __init__(self, rows, script, loss="loss"):
        self.rows = [row[script] for row in rows]
        self.bytes = np.array([row["bytes"] for row in self.rows], float)
        self.loss = np.array([row[loss] for row in self.rows]) if loss in self.rows[0] else None

    def values(self, name):
        """A measure of each image at each scan."""
        return np.array([row[name] for row in self.rows])

    def cuts(self):
        """The scan at which each image stops, for each slope, (slopes, images)."""
        return np.stack([(self.loss + slope * self.bytes).argmin(1) for slope in SLOPES])


def curve(images, values, cuts, chosen):
    """Mean bytes and a measure of some images at each slope; more bytes are never worse."""
    sizes = images.bytes[chosen, cuts[:, chosen]].mean(1)
    means = values[chosen, cuts[:, chosen]].mean(1)
    order = sizes.argsort()
    return sizes[order], np.maximum.accumulate(means[order])


def shares(levels, script, name, ends):
    """Bytes for the measure that a script has after some scans, over the script's, with the 95 %
    interval of the mean over scans 3 to 8, by bootstrap over images.
    """
    cuts = levels.cuts()
    own, others = levels.values(name), script.values(name)

    def at(chosen):
        sizes, means = curve(levels, own, cuts, chosen)
        return [
            float(np.interp(others[chosen, end].mean(), means, sizes))
            / script.bytes[chosen, end].mean()
            for end in ends
        ]

    rng = np.random.default_rng(0)
    count = len(own)
    draws = [np.mean(at(rng.integers(0, count, count))[1:7]) for _ in range(DRAWS)]
    found = at(np.arange(count))
    low, high = np.quantile(draws, (0.025, 0.975))
    return {"share": found, "mean": float(np.mean(found[1:7])), "low": low, "high": high}


def by_set(rows):
    """The rows of each set, those with the most common number of scans."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row["set"]].append(row)
    return found


def similarity(lab):
    """For each set, the bytes for the same MS-SSIM as q95's scans."""
    found = []
    for name, rows in by_set(lab.rows()).items():
        images = Images(rows, "q95")
        rank = spearmanr(-images.loss.ravel(), images.values("msssim").ravel()).statistic
        key = {"set": name, "images": len(rows), "rank": rank}
        found.append(key | shares(images, images, "msssim", ENDS["q95"]))
    return found


def imagenet(lab):
    """The bytes for the same as scans of q95 and of standard, by each measure; and by levels for a
    train size of 224.
    """
    rows = by_set(lab.rows())["imagenet"]
    levels = Images(rows, "q95")
    found = [
        {"script": script, "measure": name}
        | shares(levels, Images(rows, script), name, ENDS[script])
        for script in ("q95", "standard")
        for name in MEASURES
    ]
    losses = {row["image"]: row["q95"]["loss224"] for row in lab.rows("sizes")}
    sized = Images(rows, "q95")
    sized.loss = np.array([losses[row["image"]] for row in rows])
    for name in MEASURES[1:]:
        row = {"script": "q95", "measure": f"{name}, `--train-size 224`"}
        found.append(row | shares(sized, levels, name, ENDS["q95"]))
    return found


def budgets(lab):
    """What is left with fewer bytes than the sources have, by levels and by q95's scans."""
    rows = by_set(lab.rows())["imagenet"]
    images = Images(rows, "q95")
    cuts = images.cuts()
    every = np.arange(len(rows))
    source = np.mean([row["bytes"] for row in rows])
    means = images.bytes[every, cuts].mean(1)
    found = []
    for fewer in (2.5, 3, 3.5, 4, 5, 8):
        near = np.abs(means - source / fewer).argmin()
        cut = cuts[near]
        row = {"fewer": fewer, "slope": SLOPES[near], "bytes": images.bytes[every, cut].mean()}
        for name in ("lite0_top1", "lite2_top1", "msssim"):
            values = images.values(name)
            row[name] = values[every, cut].mean()
            row[f"{name}_full"] = values[:, -1].mean()
            row[f"{name}_q95"] = np.interp(row["bytes"], images.bytes.mean(0), values.mean(0))
            change = values[every, cut] - values[:, -1]
            row[f"{name}_error"] = 1.96 * change.std() / len(rows) ** 0.5
        found.append(row)
    return found


def rivals(lab):
    """What copies by Pillow take and show, and the bytes that levels need for the same."""
    copies = {row["image"]: row for row in lab.rows("rivals")}
    rows = [row for row in by_set(lab.rows())["imagenet"] if row["image"] in copies]
    if not rows:
        raise NotMeasured
    levels, cuts, every = Images(rows, "q95"), Images(rows, "q95").cuts(), np.arange(len(rows))
    found = []
    for name, qualities in QUALITIES.items():
        images = Images([copies[row["image"]] for row in rows], name)
        for number, quality in enumerate(qualities):
            row = {"copies": name, "quality": quality, "bytes": images.bytes[:, number].mean()}
            for measure in MEASURES:
                row[measure] = row[f"{measure}_share"] = None
                if measure not in images.rows[0]:
                    continue
                row[measure] = images.values(measure)[:, number].mean()
                sizes, means = curve(levels, levels.values(measure), cuts, every)
                if row[measure] <= means[-1]:
                    same = np.interp(row[measure], means, sizes)
                    row[f"{measure}_share"] = float(same) / row["bytes"]
            found.append(row)
    return found


def photographs(lab):
    """MS-SSIM of each photograph at scan 5 of q95, and at the level of as many mean bytes, by what
    the photograph takes as a whole.
    """
    images = Images(by_set(lab.rows())["imagenet"], "q95")
    end, every = ENDS["q95"][3], np.arange(len(images.rows))
    cuts, values = images.cuts(), images.values("msssim")
    means = images.bytes[every, cuts].mean(1)
    cut = cuts[np.abs(means - images.bytes[:, end].mean()).argmin()]
    found = {"whole": (images.bytes[:, -1] / 1000).tolist()}
    for name, stops in {"scan": np.full(len(every), end), "level": cut}.items():
        shown = values[every, stops]
        found[name] = {
            "bytes": images.bytes[every, stops].mean(),
            "msssim": shown.tolist(),
            "mean": shown.mean(),
            "low": np.quantile(shown, 0.05),
        }
    return found


def sizes(lab):
    """The bytes for the same similarity of a crop of 224 pixels as scans of q95 have, by levels for
    any use and by levels for that size.
    """
    groups = collections.defaultdict(list)
    for row in lab.rows("sizes"):
        groups[row["set"], row["megapixels"]].append(row)
    found = []
    for (name, megapixels), rows in groups.items():
        script = Images(rows, "q95")
        for loss in ("loss", "loss224"):
            key = {"set": name, "megapixels": megapixels, "loss": loss, "images": len(rows)}
            found.append(key | shares(Images(rows, "q95", loss), script, "msssim", ENDS["q95"]))
    return found


SECTIONS = (similarity, imagenet, budgets, photographs, rivals, sizes)
