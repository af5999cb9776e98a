"""Weight sync: bytes a changed word, and GB/s of publishing and of applying, on one core.

Real updates: a transformer's bfloat16 weights, of which AdamW moves float32 masters at learning
rates of 3e-6 and 8e-7; the trainer publishes the rounded weights. Beside it the forms of others,
computed from what each stores for a changed word: an index and the new value.
"""

import argparse
import os
import tempfile
import time

import common
import numpy as np
import torch
from common import judge

from pcrshard.checkpoint.sync import WeightMirror, WeightPublisher

LEARNING_RATES = (3e-6, 8e-7)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=200, help="bfloat16 weights for the speed")
    parser.add_argument("--folder", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    default = os.path.join(tempfile.gettempdir(), "pcrshard-benchmarks", "bench_sync.json")
    parser.add_argument("--json", default=default)
    return parser.parse_args()


class Policy(torch.nn.Module):
    """A small language model."""

    def __init__(self, width=384, layers=4, words=4096):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers)
        self.head = torch.nn.Linear(width, words, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask))


def fine_tuned(rate, steps):
    """bfloat16 weights after each step of AdamW on float32 masters."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        tokens = torch.randint(0, 4096, (4, 64)) // (1 + step % 3)
        loss = torch.nn.functional.cross_entropy(
            policy(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {name: tensor.bfloat16() for name, tensor in policy.state_dict().items()}


def sizes(folder, rate, rounds):
    """Bytes of the last steps' files, by the words that changed."""
    url = os.path.join(folder, f"stream-{rate:g}")
    publisher = WeightPublisher(url)
    mirror = WeightMirror(url, os.path.join(folder, f"mirror-{rate:g}"))
    rows = []
    before = None
    for state in fine_tuned(rate, rounds + 12):
        number = publisher.publish(state)
        mirror.update()
        held = mirror.tensors()
        assert all(torch.equal(held[name], state[name]) for name in state)
        words = torch.cat([tensor.view(torch.int16).flatten() for tensor in state.values()])
        if before is not None:
            changed = int((words != before).sum())
            size = os.path.getsize(os.path.join(url, f"step-{number:09d}.pcw"))
            rows.append((changed / len(words), size / max(changed, 1)))
        before = words
    last = rows[-rounds:]
    return {
        "learning_rate": rate,
        "changed_share": float(np.median([row[0] for row in last])),
        "bytes_a_changed_word": float(np.median([row[1] for row in last])),
        "index64_and_value": 10.0,
        "index32_and_value": 6.0,
    }


def speed(folder, megabytes, rounds):
    """GB/s of CPU time, 1.3 % of the words changed by one unit."""
    generator = np.random.default_rng(0)
    count = megabytes * 1_000_000 // 2
    words = torch.from_numpy(generator.normal(0, 0.02, count).astype(np.float32)).bfloat16()
    words = words.view(torch.int16).reshape(-1, 1000)
    url = os.path.join(folder, "stream")
    publisher = WeightPublisher(url)
    publisher.publish({"w": words.view(torch.bfloat16)})
    WeightMirror(url, os.path.join(folder, "mirror")).update()
    found = {"publish": [], "first touch": [], "warm": []}
    warm = WeightMirror(url, os.path.join(folder, "warm"))
    warm.update()
    sizes = []
    for _ in range(rounds):
        changed = torch.from_numpy(generator.random(words.shape) < 0.013)
        words = words + changed.to(torch.int16)
        state = {"w": words.view(torch.bfloat16)}
        start = time.process_time()
        number = publisher.publish(state)
        found["publish"].append(2e-9 * count / (time.process_time() - start))
        path = os.path.join(url, f"step-{number:09d}.pcw")
        sizes.append(os.path.getsize(path) / int(changed.sum()))
        start = time.process_time()
        warm.update()
        found["warm"].append(2e-9 * count / (time.process_time() - start))
        # A mapping of its own: its first access to each page is a fault.
        cold = WeightMirror(url, os.path.join(folder, "mirror"))
        start = time.process_time()
        cold.update()
        found["first touch"].append(2e-9 * count / (time.process_time() - start))
        assert torch.equal(warm.tensors()["w"].view(torch.int16), words)
    rates = {name: common.summary(values) for name, values in found.items()}
    return rates | {"bytes_a_changed_word": float(np.median(sizes))}


def main():
    args = parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-", dir=args.folder) as folder:
        rows = [sizes(folder, rate, args.rounds) for rate in LEARNING_RATES]
        rates = speed(folder, args.megabytes, args.rounds)
    header = list(rows[0])
    common.print_table(
        "Bytes a changed word", header, [[f"{row[name]:.4g}" for name in header] for row in rows]
    )
    print(rates)
    targets = [
        judge("publish, GB/s a core", rates["publish"]["median"], 4, at_most=False),
        judge("apply, first touch, GB/s", rates["first touch"]["median"], 1.5, at_most=False),
        judge("apply, warm, GB/s a core", rates["warm"]["median"], 6, at_most=False),
        judge("bytes a changed word at 1.3 %", rates["bytes_a_changed_word"], 1.3, at_most=True),
    ]
    common.save(args, {"sizes": rows, "speed": rates}, targets)


if __name__ == "__main__":
    main()
