"""Weight sync: bytes of a changed word, and GB/s of publishing and of applying, on one core.

The sizes are of synthetic changes, and of a model fine-tuned by AdamW at two learning rates.
Asserts that the mirror has the published words.
"""

import os
import tempfile
import time

import numpy as np
import torch
from torch import nn

from pcrshard.weightsync import WeightMirror, WeightPublisher

from .harness import Quartiles

ROUNDS = 5


def _sync(bench, folder, megabytes):
    """Weight sync: 1.3 % of bfloat16 words changed by one unit; GB/s of CPU time of one core."""
    generator = np.random.default_rng(0)
    shape = (megabytes * 500, 1000)
    words = torch.from_numpy(generator.normal(0, 0.02, shape).astype(np.float32)).bfloat16()
    words = words.view(torch.int16)
    url = os.path.join(folder, "stream")
    publisher = WeightPublisher(url)
    publisher.publish({"w": words.view(torch.bfloat16)})
    mirror = WeightMirror(url, os.path.join(folder, "mirror"))
    mirror.update()
    rates, sizes = {"publish": [], "apply": []}, []
    for _ in range(bench.rounds):
        changed = torch.from_numpy(generator.random(words.shape) < 0.013)
        words = words + changed.to(torch.int16)
        state = {"w": words.view(torch.bfloat16)}
        for name, way in (("publish", lambda: publisher.publish(state)),
                          ("apply", mirror.update)):  # fmt: skip
            begun = time.process_time()
            way()
            rates[name].append(words.nbytes / 1e9 / (time.process_time() - begun))
        newest = max(name for name in os.listdir(url) if name.startswith("step"))
        sizes.append(os.path.getsize(os.path.join(url, newest)) / int(changed.sum()))
        assert torch.equal(mirror.tensors()["w"].view(torch.int16), words)
    found = {name: Quartiles(values) for name, values in rates.items()}
    bench.show("Weight sync", [found | {"bytes a changed word": Quartiles(sizes)}])
    bench.target("publish, GB/s a core", found["publish"].median, least=4)
    bench.target("apply, GB/s a core", found["apply"].median, least=6)
    bench.target("bytes a changed word at 1.3 %", Quartiles(sizes).median, most=1.3)


def _fine_tuned(rate, steps):
    """bfloat16 weights of a small language model after each step of AdamW on float32 masters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, batch_first=True)
    policy = nn.Sequential(
        nn.Embedding(4096, 384), nn.TransformerEncoder(layer, 4), nn.Linear(384, 4096, bias=False)
    )
    for parameter in policy.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        tokens = torch.randint(0, 4096, (4, 64)) // (1 + step % 3)
        logits = policy(tokens[:, :-1]).flatten(0, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        yield {name: tensor.bfloat16() for name, tensor in policy.state_dict().items()}


def _sync_sizes(bench, folder, steps):
    """Bytes of a real step for each word that changed, beside an index and the new value."""
    rows = []
    for rate in (3e-6, 8e-7):
        row = {"learning rate": f"{rate:g}"}
        for name, slow in (("bytes a changed word", False), ("slow link", True)):
            url = os.path.join(folder, f"tuned-{rate:g}-{slow}")
            publisher = WeightPublisher(url, slow_link=slow)
            mirror = WeightMirror(url, f"{url}-mirror")
            found, before = [], None
            for state in _fine_tuned(rate, steps):
                number = publisher.publish(state)
                mirror.update()
                held = mirror.tensors()
                assert all(torch.equal(held[each], state[each]) for each in state)
                words = torch.cat([tensor.view(torch.int16).flatten() for tensor in state.values()])
                if before is not None:
                    changed = int((words != before).sum())
                    size = os.path.getsize(os.path.join(url, f"step-{number:09d}.pcw"))
                    found.append((changed / len(words), size / max(changed, 1)))
                before = words
            late = found[len(found) // 2 :]
            row["words changed"] = Quartiles(fraction for fraction, _ in late).median
            row[name] = Quartiles(size for _, size in late).median
        rows.append(row | {"32-bit index and value": 6.0, "64-bit index and value": 10.0})
    bench.show("Weight sync of fine-tuning by AdamW", rows)
    most = max(row["bytes a changed word"] for row in rows)
    bench.target("fine-tuning: times smaller than 32-bit index and value", 6 / most, least=4)


def run(bench):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
        _sync(bench, folder, 8 if bench.quick else 200)
        _sync_sizes(bench, folder, 4 if bench.quick else 16)
