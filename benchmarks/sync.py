"""Weight sync: bytes of a changed word, and GB/s of publishing and of applying, on one core.

Asserts that the mirror has the published words.
"""

import os
import tempfile
import time

import numpy as np
import torch

from pcrshard.checkpoint.sync import WeightMirror, WeightPublisher

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
        for name, way in (("publish", lambda: publisher.publish(state)),  # noqa: B023
                          ("apply", mirror.update)):  # fmt: skip
            begun = time.process_time()
            way()
            rates[name].append(words.nbytes / 1e9 / (time.process_time() - begun))
        newest = max(name for name in os.listdir(url) if name.endswith(".pcw"))
        sizes.append(os.path.getsize(os.path.join(url, newest)) / int(changed.sum()))
        assert torch.equal(mirror.tensors()["w"].view(torch.int16), words)
    found = {name: Quartiles(values) for name, values in rates.items()}
    bench.show("Weight sync", [found | {"bytes a changed word": Quartiles(sizes)}])
    bench.target("publish, GB/s a core", found["publish"].median, least=4)
    bench.target("apply, GB/s a core", found["apply"].median, least=6)
    bench.target("bytes a changed word at 1.3 %", Quartiles(sizes).median, most=1.3)


def run(bench):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
        _sync(bench, folder, 8 if bench.quick else 200)
