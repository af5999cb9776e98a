"""Sending a new version of a network over a slow link: the whole file, zstd of it, or a delta.

Figure 8 of Delta-DNN at this machine's scale. nginx serves from a network namespace behind a veth
pair that `tc tbf` limits (root, iproute2). Each way is encode, transfer and decode, in wall
seconds, and ends when the new weights are in memory; they must equal what the sender has, bit for
bit. The versions are the last two epochs of a small
network that learns handwritten digits.
"""

import os
import tempfile
import time

import safetensors.torch
import servers
import torch
import zstandard
from sklearn.datasets import load_digits
from torch import nn

from evidence.learning import drawn, fit
from evidence.links import network
from pcrshard import storage
from pcrshard.checkpoint import DeltaStore, Precision, pull
from pcrshard.errorbound import RelativeStd

from .harness import Quartiles

ROUNDS = 3
EPOCHS = 6
RATES = (1, 5, 20)  # MB/s
BOUND = RelativeStd(0.01)


def _trained_pair(width):
    """The weights after the last two epochs."""
    torch.manual_seed(0)
    digits = load_digits()
    data = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(EPOCHS):
        fit(model, optimizer, drawn(data, 64, len(digits.target) // 64, generator))
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
    return seconds, got.moved_bytes


def _measure(bench, pair, rate):
    """{way: (seconds, bytes moved) of each round} behind a link."""
    with (
        tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder,
        network(0, rate * 1e6, rate * 1e6) as (link, _),
    ):
        web = os.path.join(folder, "web")
        os.makedirs(web)
        with servers.nginx(web, link=link) as server:
            new = (server, web, pair[1])
            zstd = (zstandard.compress, zstandard.decompress)
            ways = {
                "safetensors": lambda _: _send_file(*new, bytes, bytes),
                "zstd": lambda _: _send_file(*new, *zstd),
                "delta, lossless": lambda number: _send_delta(server, web, number, pair, None),
                "delta": lambda number: _send_delta(server, web, number, pair, BOUND),
            }
            rounds = range(bench.rounds)
            return {name: [send(number) for number in rounds] for name, send in ways.items()}


def run(bench):
    torch.set_num_threads(1)
    pair = _trained_pair(64 if bench.quick else 1536)
    raw_bytes = sum(tensor.nbytes for tensor in pair[1].values())
    for rate in RATES[-1:] if bench.quick else RATES:
        rows = {
            way: {
                "way": way,
                "MB moved": sent[0][1] / 1e6,
                "ratio": raw_bytes / sent[0][1],
                "seconds": Quartiles(seconds for seconds, _ in sent),
            }
            for way, sent in _measure(bench, pair, rate).items()
        }
        bench.show(f"{raw_bytes / 1e6:.1f} MB over a link of {rate:g} MB/s", list(rows.values()))
        best = min(rows[way]["seconds"].median for way in ("safetensors", "zstd"))
        # Once the link is faster than the coders, the delta need only not be a loss.
        what = f"{rate:g} MB/s: delta, times faster than the better of file and zstd"
        faster = best / rows["delta"]["seconds"].median
        bench.target(what, faster, least=5 if rate <= 1 else 1)
