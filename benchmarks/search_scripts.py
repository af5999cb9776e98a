"""Search for scan scripts, the order of bits, bands and components whose prefixes look best for
their bytes; and measure scripts.

``search_scripts.py search imagenet`` prints a script; ``search_scripts.py measure`` encodes every
photograph that no search has seen with every script of conf/scans, measures each prefix, and writes
the figures for plot_scripts.py.

A state says how many bits have been sent of each band of luma and of chroma. A step sends one scan
more (two for chroma): the first of some neighbouring bands, down to any bit position, or their next
bit. A scan depends on nothing but its own bands, so a photograph is coded once into elementary
scans, and every state is put together from them; what a scan of several bands costs is known by
coding it. Steps are first taken by their gain in MS-SSIM per byte. Then random changes of the order
are kept where they lower the score: the mean bytes at targets from 0.90 to 0.99, after a dynamic
program has cut the order into ten groups, and something for each scan, which costs time to decode.
Sizes are images' own pieces over source bytes, without index and padding of shards
(bench_sizes.py).
"""

import argparse
import ctypes
import functools
import heapq
import itertools
import os
import random
import sys
import time
from typing import NamedTuple

import numpy as np
from common import ROOT, jpeg_files, judge, photos, print_table, read, save
from script_objectives import END, OBJECTIVES

from pcrshard import native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.fidelity.msssim import Reference
from pcrshard.format.scan_script import STANDARD, parse_scan, parse_script
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.pixels import decode_image
from pcrshard.jpeg.split import split_scans

# Sets that scripts are searched on, at each so many-th photograph; those are not measured.
SEARCHED = {"imagenet": 16, "cars": 9, "faces_1024": 4, "animal_faces_512": 4, "ham10000": 9}
LIMITS = {0.95: 0.17, 0.965: 0.23, 0.98: 0.335}
UNSENT = 6
# First and last coefficient of each band.
BANDS = {
    "dc": ((0, 0),),
    "luma": ((1, 2), (3, 5), (6, 9), (10, 20), (21, 35), (36, 63)),
    "chroma": ((1, 5), (6, 20), (21, 63)),
}
COMPONENTS = {"dc": ((0, 1, 2),), "luma": ((0,),), "chroma": ((2,), (1,))}


class Step(NamedTuple):
    """One scan, or the two of chroma: bands first..last of a plane from bit ``ah`` down to bit
    ``al``.
    """

    plane: str
    first: int
    last: int
    ah: int
    al: int

    @property
    def scans(self):
        ss, se = BANDS[self.plane][self.first][0], BANDS[self.plane][self.last][1]
        return [
            (c, ss, se, 0 if self.ah == UNSENT else self.ah, self.al)
            for c in COMPONENTS[self.plane]
        ]


def partitions(bands):
    """Ways to cut bands into neighbours, such that every run of neighbours is in one of them."""
    found = [[(i, i) for i in range(bands)]]
    for i, j in itertools.combinations_with_replacement(range(bands), 2):
        found.append([run for run in ((0, i - 1), (i, j), (j + 1, bands - 1)) if run[0] <= run[1]])
    return found


class Photo:
    """A photograph cut into elementary scans, and what scans of several bands cost."""

    def __init__(self, jpeg):
        self.source_bytes = len(jpeg)
        self.pieces, self.sizes = {}, {}
        luma, chroma = (partitions(len(BANDS[plane])) for plane in ("luma", "chroma"))
        for cuts in itertools.zip_longest(luma, chroma, fillvalue=chroma[0]):
            for al in range(UNSENT):
                self._cut(
                    jpeg,
                    [
                        ("dc", 0, 0),
                        *(("luma", *run) for run in cuts[0]),
                        *(("chroma", *run) for run in cuts[1]),
                    ],
                    al,
                )
        self.standard = encode_jpeg(jpeg, STANDARD).pieces[:-1]

    def _cut(self, jpeg, runs, al):
        steps = [Step(*run, UNSENT, al) for run in runs]
        steps += [Step(*run, a + 1, a) for a in reversed(range(al)) for run in runs]
        self.header, parts, _ = split_scans(
            native.rescan(jpeg, [scan for step in steps for scan in step.scans])
        )
        left = iter(parts)
        for step in steps:
            mine = list(itertools.islice(left, len(step.scans)))
            self.sizes[step] = sum(map(len, mine))
            if step.ah == UNSENT and step.first == step.last:
                self.pieces[step] = mine

    def prefix(self, state):
        """The pieces of a state: bits as first scans send them are bits as refinements send
        them.
        """
        sent = [
            Step(plane, i, i, UNSENT, al)
            for plane, bits in zip(BANDS, state, strict=True)
            for i, al in enumerate(bits)
        ]
        parts = [piece for step in sent if step.al < UNSENT for piece in self.pieces[step]]
        return [self.header, *parts]


START = tuple((UNSENT,) * len(bands) for bands in BANDS.values())


class Search:
    """Photographs of one or several sets; each set weighs the same."""

    def __init__(self, sets, objective, scan_cost, regret, top):
        self.objective = objective
        self.photos = [photo for photos_of_set in sets for photo in photos_of_set]
        self.weights = np.concatenate([np.full(len(s), 1 / len(s) / len(sets)) for s in sets])
        totals = np.concatenate(
            [np.full(len(s), sum(p.source_bytes for p in s) / len(s)) for s in sets]
        )
        self.byte_weights = self.weights / totals
        self.scan_cost, self.regret, self.top = scan_cost, regret, top
        self.share = functools.cache(self._share)
        self.rest = functools.cache(self._rest)
        self.quality = functools.cache(self._quality)
        self.header = float(self.byte_weights @ [len(photo.header) for photo in self.photos])
        self.standard = [self._standard(count) for count in range(1, STANDARD.num_groups + 1)]

    def _standard(self, count):
        """(source bytes, quality) of a prefix of ``standard``."""
        prefixes = [photo.standard[:count] for photo in self.photos]
        sizes = [sum(map(len, pieces)) for pieces in prefixes]
        return float(self.byte_weights @ sizes), self._judge(prefixes)

    def _judge(self, prefixes):
        return float(self.weights @ self.objective.values(prefixes))

    def _quality(self, state):
        return self._judge([photo.prefix(state) for photo in self.photos])

    def _share(self, step):
        """Source bytes that a step costs, as a share."""
        return float(self.byte_weights @ [photo.sizes[step] for photo in self.photos])

    def _rest(self, plane, bits):
        """The least that it costs to send what is left of a plane: what is unsent in one scan, then
        bit by bit, neighbours together.
        """
        choices = range(self.top + 1) if UNSENT in bits else (0,)
        return min(self._finish(plane, bits, al) for al in choices)

    def _finish(self, plane, bits, al):
        total = sum(
            self.share(Step(plane, i, j, UNSENT, al))
            for i, j in runs(bit == UNSENT for bit in bits)
        )
        bits = [al if bit == UNSENT else bit for bit in bits]
        for a in reversed(range(max(bits))):
            total += sum(
                self.share(Step(plane, i, j, a + 1, a)) for i, j in runs(bit > a for bit in bits)
            )
        return total

    def cost(self, state, step):
        """What a step costs: its bytes, those that it makes the whole file longer by, weighted, and
        a sum for each scan.
        """
        rest = [
            self.rest(step.plane, dict(zip(BANDS, s, strict=True))[step.plane])
            for s in (state, after(state, step))
        ]
        share = self.share(step)
        return (
            share
            + self.regret * max(0, share + rest[1] - rest[0])
            + self.scan_cost * len(step.scans)
        )

    def run(self, dc_al):
        """Steps in the order of their gain per byte; a stale gain is trusted until its step is at
        the head of the queue.
        """
        order = [Step("dc", 0, 0, UNSENT, dc_al)]
        state = after(START, order[0])
        now = self.quality(state)
        queue, seen = [], set()
        while any(map(any, state)):
            for step in steps_from(state, self.top):
                if step not in seen:
                    seen.add(step)
                    heapq.heappush(queue, (-np.inf, 0, step))
            while True:
                negative, stamp, step = heapq.heappop(queue)
                if not fits(state, step):
                    continue
                if stamp == len(order):
                    break
                gain = (self.quality(after(state, step)) - now) / self.cost(state, step)
                heapq.heappush(queue, (-gain, len(order), step))
            order.append(step)
            state = after(state, step)
            now = self.quality(state)
            print(f"{len(order):3d} {now:.4f} {-negative:9.4f} {step}", file=sys.stderr, flush=True)
        return order

    def groups(self, order, max_groups):
        """Steps of each group, and source bytes and quality up to its end."""
        states = list(itertools.accumulate(order, after, initial=START))[1:]
        qualities = [self.quality(state) for state in states]
        sizes = np.cumsum([self.share(step) for step in order])
        ends = cut(sizes, qualities, max_groups, self.objective.targets)
        groups, start, size = [], 0, self.header
        for end in ends:
            group = join(order[start : end + 1])
            size += sum(map(self.share, group))
            groups.append((group, size, qualities[end]))
            start = end + 1
        return groups

    def score(self, order, max_groups, limit):
        """Mean source bytes at the targets, with fines for scans and for a longer file."""
        groups = self.groups(order, max_groups)
        sizes = [
            next((size for _, size, quality in groups if quality >= target), groups[-1][1])
            for target in self.objective.targets
        ]
        mean = np.average(sizes, weights=list(self.objective.targets.values()))
        scans = sum(len(step.scans) for group, _, _ in groups for step in group)
        # What is more than 2 % worse where standard is good is no improvement.
        _, sizes, qualities = zip(*groups, strict=True)
        excess = sum(
            max(0, np.interp(q, qualities, sizes) / share - 1.02)
            for share, q in self.standard
            if q >= self.objective.good
        )
        return mean + self.scan_cost * scans + 10 * max(0, groups[-1][1] - limit) + 3 * excess


def steps_of(script):
    """The steps of a script whose scans end where bands do, and which treats Cb as it treats Cr."""
    order, state = [], START
    for scan in (parse_scan(text) for group in script.groups for text in group.split(";")):
        if scan.components == (1,):
            continue
        plane = next(
            plane for plane, components in COMPONENTS.items() if scan.components in components
        )
        first = next(i for i, band in enumerate(BANDS[plane]) if band[0] == scan.ss)
        last = next(i for i, band in enumerate(BANDS[plane]) if band[1] == scan.se)
        order.append(
            Step(plane, first, last, dict(zip(BANDS, state, strict=True))[plane][first], scan.al)
        )
        state = after(state, order[-1])
    return order


def runs(flags):
    """First and last index of each run of true flags."""
    groups = itertools.groupby(enumerate(flags), key=lambda pair: pair[1])
    found = [[i for i, _ in group] for flag, group in groups if flag]
    return [(run[0], run[-1]) for run in found]


def after(state, step):
    """The state that a step leads to."""
    return tuple(
        tuple(
            step.al if plane == step.plane and step.first <= i <= step.last else al
            for i, al in enumerate(bits)
        )
        for plane, bits in zip(BANDS, state, strict=True)
    )


def fits(state, step):
    bits = dict(zip(BANDS, state, strict=True))[step.plane]
    return all(al == step.ah for al in bits[step.first : step.last + 1])


def steps_from(state, top):
    """All steps that are legal in a state (T.81 G.1.1.1): later bits come one by one."""
    for plane, bits in zip(BANDS, state, strict=True):
        for i, j in itertools.combinations_with_replacement(range(len(bits)), 2):
            if bits[i] and len(set(bits[i : j + 1])) == 1:
                for al in range(top + 1) if bits[i] == UNSENT else (bits[i] - 1,):
                    yield Step(plane, i, j, bits[i], al)


def cut(sizes, qualities, max_groups, targets):
    """Which steps end the groups, such that the mean bytes at the targets are least; dynamic
    programming, vectorised.
    """
    wanted, weights = np.array(list(targets)), np.array(list(targets.values()))
    below = np.array(
        [0, *(weights[wanted <= reached].sum() for reached in np.maximum.accumulate(qualities))]
    )
    sizes = np.array([0, *sizes])
    # The targets between two ends cost all bytes up to the second.
    cost = np.where(
        np.tri(len(sizes), k=0, dtype=bool).T & ~np.eye(len(sizes), dtype=bool),
        sizes * (below - below[:, None]),
        np.inf,
    )
    totals, chosen = cost[0], []
    for _ in range(min(max_groups, len(sizes) - 1) - 1):
        options = totals[:, None] + cost
        chosen.append(options.argmin(axis=0))
        totals = options.min(axis=0)
    ends = [len(sizes) - 1]
    for best in reversed(chosen):
        ends.append(int(best[ends[-1]]))
    return [end - 1 for end in reversed(ends)]


def join(steps):
    """The steps of a group from the highest bit on, scans of neighbouring bands joined."""
    joined = []
    for step in sorted(steps, key=lambda s: (s.plane != "dc", -s.al, s.plane == "chroma", s.first)):
        other = joined[-1] if joined else None
        if (
            other
            and other.plane == step.plane != "dc"
            and other[3:] == step[3:]
            and other.last + 1 == step.first
        ):
            joined[-1] = other._replace(last=step.last)
        else:
            joined.append(step)
    return joined


def legal(order):
    """Whether each band's bits are sent in turn to the last."""
    state = START
    for step in order:
        if not fits(state, step):
            return False
        state = after(state, step)
    return not any(map(any, state))


def neighbour(rng, order, top):
    """The order with one random change: a step moved, split, joined with another, or its first bit
    position changed.
    """
    order = list(order)
    i = rng.randrange(1, len(order))
    step = order[i]
    match rng.randrange(4):
        case 0:
            order.insert(max(1, i + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))), order.pop(i))
        case 1 if step.first < step.last:
            middle = rng.randrange(step.first, step.last)
            halves = [step._replace(last=middle), step._replace(first=middle + 1)]
            rng.shuffle(halves)
            order[i] = halves[0]
            order.insert(i + rng.randrange(1, 5), halves[1])
        case 2:
            mates = [
                o
                for o in order
                if o.plane == step.plane
                and o[3:] == step[3:]
                and (o.last + 1 == step.first or step.last + 1 == o.first)
            ]
            if mates:
                mate = rng.choice(mates)
                order[order.index(rng.choice((mate, step)))] = step._replace(
                    first=min(mate.first, step.first), last=max(mate.last, step.last)
                )
                order = [o for o in order if o not in (mate, step)]
        case 3:
            i = 0 if rng.random() < 0.1 else i
            step = order[i]
            if step.ah == UNSENT and rng.random() < 0.5 and step.al < top:
                order[i] = step._replace(al=step.al + 1)
                order.insert(i + rng.randrange(1, 6), step._replace(ah=step.al + 1))
            else:
                mates = [
                    o for o in order if o[:3] == step[:3] and o.al == step.ah and o.ah == UNSENT
                ]
                if mates:
                    order[order.index(rng.choice((mates[0], step)))] = step._replace(ah=UNSENT)
                    order = [o for o in order if o not in (mates[0], step)]
    return order


def climb(search, order, *, groups, limit, seconds, seed):
    """Random changes, of which those are kept that lower the score."""
    rng = random.Random(seed)
    best, until = search.score(order, groups, limit), time.process_time() + seconds
    print(f"at the start: {best:.5f}", file=sys.stderr, flush=True)
    tries = 0
    while time.process_time() < until:
        trial = neighbour(rng, order, search.top)
        for _ in range(rng.choice((0, 0, 1, 2))):
            trial = neighbour(rng, trial, search.top)
        tries += 1
        if trial != order and trial[0].plane == "dc" and legal(trial):
            score = search.score(trial, groups, limit)
            if score <= best:
                if score < best - 1e-6:
                    print(f"{tries} tries: {score:.5f}", file=sys.stderr)
                    print(text_of(search, trial, groups), file=sys.stderr, flush=True)
                order, best = trial, score
    return order


def load_set(folder, name, every, objective):
    """The photographs of a set that a search looks at, cut; those in YCbCr."""
    found = []
    for path in jpeg_files(os.path.join(folder, "photos", name))[::every]:
        jpeg = read(path)
        if map_jpeg(jpeg).color == "ycc":
            found.append(Photo(jpeg))
            objective.add(jpeg, path)
    return found


def search_sets(args):
    """Print the best script found."""
    objective = OBJECTIVES[args.objective]()
    with photos() as folder:
        sets = [
            load_set(folder, name, args.every or SEARCHED[name], objective) for name in args.sets
        ]
    search = Search(sets, objective, args.scan_cost, args.regret, args.top)
    print(f"{len(search.photos)} photographs", file=sys.stderr)
    start = (
        steps_of(parse_script("start", read(args.start).decode()))
        if args.start
        else search.run(args.dc)
    )
    order = climb(
        search,
        start,
        groups=args.groups,
        limit=args.longer * search.standard[-1][0],
        seconds=args.seconds,
        seed=args.seed,
    )
    print(text_of(search, order, args.groups))


def text_of(search, order, groups):
    """A script as a file, with what each group costs and gives."""
    lines = []
    for group, size, quality in search.groups(order, groups):
        scans = "; ".join(
            f"{','.join(map(str, c))}: {ss}-{se}, {ah}, {al}"
            for step in group
            for c, ss, se, ah, al in step.scans
        )
        lines.append(f"{scans};  # {size:.3f} of the source, {search.objective.name} {quality:.4f}")
    return "\n".join(lines)


def test_scripts(args):
    """What a network of ImageNet makes of every prefix of scripts, of photographs that no search
    with ``--every 2`` has seen.
    """
    objective = OBJECTIVES["top1"]()
    scripts = [
        parse_script(os.path.basename(path).removesuffix(".txt"), read(path).decode())
        for path in args.scripts
    ]
    with photos() as folder:
        files = jpeg_files(os.path.join(folder, "photos", "imagenet"))[1::2][: args.photographs]
        sources = [read(path) for path in files]
    for path, jpeg in zip(files, sources, strict=True):
        objective.add(jpeg, path)
    rows = [row for script in scripts for row in test_script(objective, sources, script)]
    header = ["script", "scan", "share", "top-1", "probability"]
    cells = [
        [r["script"], r["scan"], f"{r['share']:.4f}", f"{r['top1']:.3f}", f"{r['probability']:.4f}"]
        for r in rows
    ]
    print_table(f"imagenet: {len(sources)} photographs", header, cells)
    save(args, rows, [])


def test_script(objective, sources, script):
    """A row for each scan of a script."""
    pieces = [encode_jpeg(source, script).pieces[:-1] for source in sources]
    total = sum(map(len, sources))
    rows = []
    for count in range(1, script.num_groups + 1):
        prefixes = [b"".join(parts[:count]) for parts in pieces]
        pictures = [objective.decoder(prefix + END, None) for prefix in prefixes]
        right, probability = objective.see(pictures)
        share = sum(map(len, prefixes)) / total
        marks = "".join("1" if each else "0" for each in right)
        row = {"script": script.name, "scan": count, "share": share, "top1": float(right.mean())}
        rows.append(row | {"probability": float(probability.mean()), "marks": marks})
    return rows


def measure_scripts(args):
    """Bytes, MS-SSIM and decoding time of every prefix of every script, set by set."""
    scripts = [
        parse_script(os.path.basename(path).removesuffix(".txt"), read(path).decode())
        for path in jpeg_files(args.scans)
    ]
    results = []
    with photos() as folder:
        for name in sorted(os.listdir(os.path.join(folder, "photos"))):
            every = SEARCHED.get(name)
            files = [
                f
                for i, f in enumerate(jpeg_files(os.path.join(folder, "photos", name)))
                if not every or i % every
            ]
            sources = [read(file) for file in files]
            results += measure_set(name, sources, scripts, args.rounds)
    targets = check_targets(results)
    save(args, results, targets)


def measure_set(name, sources, scripts, rounds):
    """A row for each script and scan of one set."""
    totals = {script: np.zeros((script.num_groups, 3)) for script in scripts}
    for i, source in enumerate(sources):
        pixels = decode_image(source)
        reference = Reference(pixels)
        for script in scripts:
            pieces = encode_jpeg(source, script).pieces[:-1]
            prefixes = [[piece for piece in pieces[:k] if piece] for k in range(1, len(pieces) + 1)]
            pictures = [decode_image(prefix) for prefix in prefixes]
            assert np.array_equal(pictures[-1], pixels), (
                f"{name} {i}: {script.name} changed the pixels"
            )
            values = [reference.compare(picture) for picture in pictures]
            times = np.array(
                [[cpu_of(decode_image, prefix) for prefix in prefixes] for _ in range(rounds)]
            ).min(axis=0)
            sizes = np.cumsum([len(piece) for piece in pieces])
            totals[script] += np.stack([sizes, values, times], axis=1)
    rows = []
    for script in scripts:
        sizes, values, times = totals[script].T
        for k in range(script.num_groups):
            row = {"set": name, "images": len(sources), "script": script.name, "scan": k + 1}
            row |= {"share": sizes[k] / sum(map(len, sources)), "msssim": values[k] / len(sources)}
            rows.append(row | {"decode_ms": 1000 * times[k] / len(sources)})
    header = ["script", "scan", "share", "MS-SSIM", "decode ms"]
    cells = [
        [r["script"], r["scan"], f"{r['share']:.3f}", f"{r['msssim']:.4f}", f"{r['decode_ms']:.2f}"]
        for r in rows
    ]
    print_table(f"{name}: {len(sources)} photographs", header, cells)
    return rows


def cpu_of(function, *args):
    begin = time.thread_time()
    function(*args)
    return time.thread_time() - begin


def check_targets(results):
    """What the issue asks of q95 on ImageNet photographs."""
    points = {
        s: [
            (r["share"], r["msssim"]) for r in results if (r["set"], r["script"]) == ("imagenet", s)
        ]
        for s in ("standard", "q95")
    }
    targets = []
    if not all(points.values()):
        return targets
    for target, limit in LIMITS.items():
        share = min(share for share, quality in points["q95"] if quality >= target)
        targets.append(
            judge(
                f"imagenet, source bytes of the first prefix of q95 with MS-SSIM {target}",
                share,
                limit,
                at_most=True,
            )
        )
    shares, qualities = zip(*points["q95"], strict=True)
    for share, quality in points["standard"]:
        if quality >= 0.985:
            ratio = float(np.interp(quality, qualities, shares)) / share
            targets.append(
                judge(
                    f"imagenet, bytes of q95 over standard's at MS-SSIM {quality:.4f}",
                    ratio,
                    1.03,
                    at_most=True,
                )
            )
    targets.append(
        judge(
            "imagenet, whole files of q95 over standard's",
            shares[-1] / points["standard"][-1][0],
            1.01,
            at_most=True,
        )
    )
    return targets


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("search", help="print the best script found for some photo sets")
    command.set_defaults(run=search_sets)
    command.add_argument(
        "sets", nargs="+", choices=SEARCHED, metavar="SET", help=f"one of {', '.join(SEARCHED)}"
    )
    command.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="msssim",
        help="how prefixes look, or what a network of ImageNet makes of them (default: msssim)",
    )
    command.add_argument(
        "--every", type=int, help="look at each so many-th photograph (default: by the set)"
    )
    command.add_argument(
        "--groups", type=int, default=10, help="scan groups (default: %(default)s)"
    )
    command.add_argument(
        "--dc",
        type=int,
        default=1,
        help="bits of DC that the first scan leaves at the start (default: %(default)s)",
    )
    command.add_argument(
        "--top",
        type=int,
        default=4,
        choices=range(UNSENT),
        help="highest bit of a first scan (default: %(default)s)",
    )
    command.add_argument(
        "--scan-cost",
        type=float,
        default=0.0005,
        help="cost of a scan on top of its bytes, in source bytes (default: %(default)s)",
    )
    command.add_argument(
        "--regret",
        type=float,
        default=2,
        help="weight of bytes that lengthen the whole file (default: %(default)s)",
    )
    command.add_argument(
        "--longer",
        type=float,
        default=1.006,
        help="whole file at most so many times standard's (default: %(default)s)",
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=150,
        help="CPU time of random changes (default: %(default)s)",
    )
    command.add_argument(
        "--start", help="file of a script to begin with, in place of the first search"
    )
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("measure", help="measure every script of a folder")
    command.set_defaults(run=measure_scripts)
    command.add_argument(
        "--scans",
        default=os.path.join(ROOT, "conf", "scans"),
        help="folder of scripts (default: conf/scans)",
    )
    command.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of decoding; the fastest counts (default: %(default)s)",
    )
    command.add_argument(
        "--json", default="scripts.json", help="where to write the figures (default: %(default)s)"
    )
    command = commands.add_parser(
        "test", help="what a network makes of scripts, on photographs that it was not searched on"
    )
    command.set_defaults(run=test_scripts, rounds=1)
    command.add_argument("scripts", nargs="+", metavar="FILE", help="scripts")
    command.add_argument(
        "--photographs", type=int, help="so many at most (default: half of the set)"
    )
    command.add_argument(
        "--json", default="scripts-top1.json", help="where to write (default: %(default)s)"
    )
    args = parser.parse_args()
    # Keep freed memory: the floats of a photograph would otherwise be mapped and unmapped for every
    # operation.
    for option, value in ((-3, 1 << 30), (-1, (1 << 31) - 1)):
        ctypes.CDLL(None).mallopt(option, value)
    args.run(args)


if __name__ == "__main__":
    main()
