"""Sending a new version of a network over a slow link: the whole file, zstd of it, or a delta.

Figure 8 of Delta-DNN at this machine's scale. nginx serves from a network namespace behind a veth
pair that `tc tbf` limits (root, iproute2). Each way is encode, transfer and decode, in wall
seconds, and ends when the new weights are in memory and were compared: bit for bit with what the
sender has, or value by value within the bound. The versions are the last two epochs of a small
network that learns handwritten digits.
"""

import os
import tempfile
import time

import safetensors.torch
import servers
import torch
import zstandard
from torch import nn

from evidence.links import network
from pcrshard import storage
from pcrshard.checkpoint import DeltaStore, Precision, pull
from pcrshard.errorbound import RelativeStd

from .harness import Quartiles, ratios

ROUNDS = 3
EPOCHS = 6
RATES = (1, 5, 20)  # MB/s
BOUND = RelativeStd(0.01)


def _trained_pair(width):
    """The weights after the last two epochs."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    states = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states[-2:]


def _same(state, expected):
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in expected
    )


def _send_file(server, folder, after, pack, unpack):
    """(seconds, bytes moved) of the file, packed in some way."""
    begun = time.perf_counter()
    with open(os.path.join(folder, "weights"), "wb") as file:
        file.write(pack(safetensors.torch.save(after)))
    data = storage.read_bytes(server.url("weights"))
    loaded = safetensors.torch.load(unpack(data))
    seconds = time.perf_counter() - begun
    assert _same(loaded, after)
    return seconds, len(data)


def _send_delta(server, folder, number, pair, bound):
    """The receiver holds the version before, and pulls; both sides keep what they have."""
    name = f"{'exact' if bound is None else 'bounded'}-{number}"
    sender = DeltaStore(os.path.join(folder, name), Precision(weights=bound))
    receiver = DeltaStore(os.path.join(folder, "..", f"receiver-{name}"))
    sender.save(pair[0], blocking=True)
    pull(server.url(name), receiver)
    begun = time.perf_counter()
    sender.save(pair[1], blocking=True)
    got = pull(server.url(name), receiver)
    loaded = receiver.load(got.version)
    seconds = time.perf_counter() - begun
    assert _same(loaded, sender.load())
    for each, tensor in pair[1].items():
        error = float((loaded[each].double() - tensor.double()).abs().max())
        # The lattice of the version before stays while it allows at most a tenth more.
        allowed = 0.0 if bound is None else 1.1 * bound.fraction * float(tensor.double().std())
        assert error <= allowed * (1 + 1e-6), f"{each}: {error} > {allowed}"
    return seconds, got.moved_bytes


def _measure(bench, pair, rate):
    """(seconds, bytes moved) of each way behind one link, round by round."""
    found = {name: [] for name in ("safetensors", "zstd", "delta, lossless", "delta")}
    with (
        tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder,
        network(0, rate * 1e6, rate * 1e6) as (link, _),
    ):
        web = os.path.join(folder, "web")
        os.makedirs(web)
        with servers.nginx(web, link=link) as server:
            for number in range(bench.rounds):
                place = (server, web)
                sent = [
                    _send_file(*place, pair[1], bytes, bytes),
                    _send_file(*place, pair[1], zstandard.compress, zstandard.decompress),
                    _send_delta(*place, number, pair, None),
                    _send_delta(*place, number, pair, BOUND),
                ]
                for rows, row in zip(found.values(), sent, strict=True):
                    rows.append(row)
    return found


def run(bench):
    torch.set_num_threads(1)
    pair = _trained_pair(64 if bench.quick else 1536)
    raw_bytes = sum(tensor.nbytes for tensor in pair[1].values())
    for rate in RATES[-1:] if bench.quick else RATES:
        found = _measure(bench, pair, rate)
        seconds = {name: [row[0] for row in rows] for name, rows in found.items()}
        rows = [
            {
                "way": name,
                "MB moved": sent[0][1] / 1e6,
                "ratio": raw_bytes / sent[0][1],
                "seconds": Quartiles(seconds[name]),
            }
            for name, sent in found.items()
        ]
        bench.show(f"{raw_bytes / 1e6:.1f} MB over a link of {rate:g} MB/s", rows)
        best = [min(pair) for pair in zip(seconds["safetensors"], seconds["zstd"], strict=True)]
        # Once the link is faster than the coders, the delta need only not be a loss.
        what = f"{rate:g} MB/s: delta, times faster than the better of file and zstd"
        faster = ratios(best, seconds["delta"]).median
        bench.target(what, faster, least=5 if rate <= 1 else 1)
