"""Bytes that levels need for what a scan of a script has, and what is left at fewer bytes."""

import collections

import numpy as np

SLOPES = np.geomspace(10, 1e-13, 600)
# Of q95, the last of the single scans of each of its groups 2 to 9; of standard, its scans.
ENDS = {"q95": (2, 5, 7, 10, 11, 15, 16, 19), "standard": tuple(range(1, 9))}
DRAWS = 200
MEASURES = ("msssim", "lite0", "lite2")


class Images:
    """The images of a set by one script: arrays (images, scans)."""

    def __init__(self, rows, script):
        self.rows = [row[script] for row in rows]
        self.bytes = np.array([row["bytes"] for row in self.rows], float)
        self.loss = np.array([row["loss"] for row in self.rows])

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
        found.append(
            {"set": name, "images": len(rows)} | shares(images, images, "msssim", ENDS["q95"])
        )
    return found


def imagenet(lab):
    """The bytes for the same as scans of q95 and of standard, by each measure."""
    rows = by_set(lab.rows())["imagenet"]
    levels = Images(rows, "q95")
    return [
        {"script": script, "measure": name}
        | shares(levels, Images(rows, script), name, ENDS[script])
        for script in ("q95", "standard")
        for name in MEASURES
    ]


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
        cut = cuts[np.abs(means - source / fewer).argmin()]
        row = {"fewer": fewer, "bytes": images.bytes[every, cut].mean()}
        for name in ("lite0_top1", "lite2_top1", "msssim"):
            values = images.values(name)
            row[name] = values[every, cut].mean()
            row[f"{name}_full"] = values[:, -1].mean()
            row[f"{name}_q95"] = np.interp(row["bytes"], images.bytes.mean(0), values.mean(0))
            change = values[every, cut] - values[:, -1]
            row[f"{name}_error"] = 1.96 * change.std() / len(rows) ** 0.5
        found.append(row)
    return found


SECTIONS = (similarity, imagenet, budgets)
