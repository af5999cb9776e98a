"""Sending a new version of a network over a slow link: the whole file, zstd of it, or a delta.

Figure 8 of Delta-DNN at this machine's scale. nginx serves from a network namespace behind a veth
pair that `tc tbf` limits (root, iproute2). Each way is encode, transfer and decode, in wall
seconds, and ends when the new weights are in memory and were compared: bit for bit with what the
sender has, or value by value within the bound. "alone" is the transfer and the CPU seconds, as on
a core that nobody else uses. The pair of versions is two epochs of a small real
training, or any two safetensors files of one network (--before, --after).
"""

import argparse
import os
import sys
import tempfile
import time

import safetensors.torch
import torch
import zstandard
from common import ROOT, judge, print_table, save, show, summary
from torch import nn

from pcrshard import storage
from pcrshard.checkpoint import DeltaStore, Precision, pull
from pcrshard.errorbound import RelativeStd

sys.path.insert(0, os.path.join(ROOT, "tests"))
import servers

EPOCHS = 6
STEPS = ("encode", "transfer", "decode")
COLUMNS = (*STEPS, "total", "cpu", "alone")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", help="safetensors file that the receiver has")
    parser.add_argument("--after", help="safetensors file that it shall get")
    parser.add_argument("--megabytes-per-second", type=float, nargs="+", default=[1, 5, 20])
    parser.add_argument("--bound", type=float, default=0.01, help="share of the std of a tensor")
    default = os.path.join(tempfile.gettempdir(), "pcrshard-benchmarks", "bench_release.json")
    parser.add_argument("--json", default=default)
    return parser.parse_args()


def trained_pair():
    """The weights after the last two epochs of a network that learns handwritten digits."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    states = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states[-2:]


class Clock:
    """Wall seconds of the steps of one way, and CPU seconds of all of them."""

    def __init__(self):
        self.seconds = {}
        self.started = time.perf_counter()
        self.cpu_started = time.process_time()

    def end(self, step):
        now = time.perf_counter()
        self.seconds[step] = now - self.started
        self.seconds["cpu"] = time.process_time() - self.cpu_started
        self.started = now


def same(state, expected):
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in expected
    )


def send_whole(server, folder, after):
    """The file as it is."""
    clock = Clock()
    safetensors.torch.save_file(after, os.path.join(folder, "whole.safetensors"))
    clock.end("encode")
    data = storage.read_bytes(server.url("whole.safetensors"))
    clock.end("transfer")
    loaded = safetensors.torch.load(data)
    clock.end("decode")
    assert same(loaded, after)
    return clock.seconds, len(data)


def send_zstd(server, folder, after):
    """The file, compressed."""
    clock = Clock()
    path = os.path.join(folder, "whole.safetensors.zst")
    with open(path, "wb") as file:
        file.write(zstandard.compress(safetensors.torch.save(after), 3))
    clock.end("encode")
    data = storage.read_bytes(server.url("whole.safetensors.zst"))
    clock.end("transfer")
    loaded = safetensors.torch.load(zstandard.decompress(data))
    clock.end("decode")
    assert same(loaded, after)
    return clock.seconds, len(data)


def send_delta(server, folder, number, pair, bound):
    """The receiver holds the release before, and pulls; both sides keep what they have."""
    before, after = pair
    round_name = f"{'exact' if bound is None else 'bounded'}-{number}"
    web = os.path.join(folder, round_name)
    sender = DeltaStore(web, Precision(weights=bound))
    receiver = DeltaStore(os.path.join(folder, "..", f"receiver-{round_name}"))
    sender.save(before, blocking=True)
    pull(server.url(round_name), receiver)
    clock = Clock()
    sender.save(after, blocking=True)
    clock.end("encode")
    moments = []
    got = pull(
        server.url(round_name), receiver, progress=lambda *_: moments.append(time.perf_counter())
    )
    loaded = receiver.load(got.version)
    clock.end("decode")
    clock.seconds["transfer"] = moments[-1] - moments[0]
    clock.seconds["decode"] -= clock.seconds["transfer"]
    assert same(loaded, sender.load())
    check_bound(loaded, after, bound)
    return clock.seconds, got.moved_bytes


def check_bound(loaded, after, bound):
    """Every value is as close as the option says, or equal."""
    for name, tensor in after.items():
        error = float((loaded[name].double() - tensor.double()).abs().max())
        # The lattice of the version before stays while it allows at most a tenth more.
        allowed = 0.0 if bound is None else 1.1 * bound.fraction * float(tensor.double().std())
        assert error <= allowed * (1 + 1e-6), f"{name}: {error} > {allowed}"


def measure(pair, bound, rate, rounds):
    """Seconds of each step and bytes moved, of each way behind one link."""
    senders = {
        "safetensors": lambda *place: send_whole(*place[:2], pair[1]),
        "zstd": lambda *place: send_zstd(*place[:2], pair[1]),
        "delta, lossless": lambda *place: send_delta(*place, pair, None),
        "delta": lambda *place: send_delta(*place, pair, bound),
    }
    found = {name: [] for name in senders}
    with (
        tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder,
        servers.limited_link(int(rate * 1e6)) as link,
    ):
        web = os.path.join(folder, "web")
        os.makedirs(web)
        with servers.nginx(web, link=link) as server:
            for number in range(rounds):
                for name, send in senders.items():
                    found[name].append(send(server, web, number))
    rows = {}
    for name, results in found.items():
        totals = [sum(seconds[step] for step in STEPS) for seconds, _ in results]
        # What the same would take on a core of its own: the link's time, and the work's.
        alone = [seconds["transfer"] + seconds["cpu"] for seconds, _ in results]
        columns = {step: [seconds[step] for seconds, _ in results] for step in (*STEPS, "cpu")}
        columns |= {"total": totals, "alone": alone}
        rows[name] = {column: summary(values) for column, values in columns.items()}
        rows[name]["moved_bytes"] = results[0][1]
    return rows


def load_pair(args):
    if args.before and args.after:
        return [safetensors.torch.load_file(path) for path in (args.before, args.after)]
    return trained_pair()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    pair = load_pair(args)
    raw_bytes = sum(tensor.nbytes for tensor in pair[1].values())
    results = {"raw_bytes": raw_bytes, "bound_std": args.bound, "links": {}}
    targets = []
    for rate in args.megabytes_per_second:
        rows = measure(pair, RelativeStd(args.bound), rate, args.rounds)
        results["links"][f"{rate:g}"] = rows
        lines = [
            [
                name,
                f"{row['moved_bytes'] / 1e6:.3f}",
                f"{raw_bytes / row['moved_bytes']:.1f}",
                *(show(row[column]) for column in COLUMNS),
            ]
            for name, row in rows.items()
        ]
        header = ["way", "MB moved", "ratio", *COLUMNS]
        title = (
            f"{raw_bytes / 1e6:.1f} MB over a link of {rate:g} MB/s: seconds, median [quartiles]"
        )
        print_table(title, header, lines)
        for column in ("total", "alone"):
            whole = min(rows[name][column]["median"] for name in ("safetensors", "zstd"))
            faster = whole / rows["delta"][column]["median"]
            # Once the link is faster than the coders, the delta need only not be a loss.
            limit = 5 if rate <= 1 else 1
            what = f"{rate:g} MB/s, {column}: delta, times faster than the better of file and zstd"
            targets.append(judge(what, faster, limit, at_most=False))
    save(args, results, targets)


if __name__ == "__main__":
    main()
