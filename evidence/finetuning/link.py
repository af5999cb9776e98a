"""Epochs of fine-tuning that are read over HTTP behind a link that is really shaped: nginx as the
storage, tc as the link, the whole network in the loop.
"""

import time

import servers
import torch

from pcrshard.format.scan import FULL

from ..learning import fit
from ..links import apart, network
from . import tails

# Bytes a second: at full fidelity the processor waits for most of the time.
LINK = 0.2e6
FAST = 100e6
READ = (FULL, 5, 2)


def rate(lab):
    """Bytes a second of the link."""
    return 4e6 if lab.quick else LINK


def measure(lab, task, scan):
    """Seconds, images and bytes of an epoch."""
    folder = lab.dataset(task.name, "train")
    with (
        network(1, rate(lab), FAST) as (link, nodes),
        servers.nginx(folder, link=link) as server,
    ):
        server.reset()
        row = apart(_epoch, lab, server.url(), scan, namespace=nodes[0])
        requests = server.requests()
    shards = [request for request in requests if request.path.endswith(".tar")]
    print(f"{task.name}, scan {scan}: {row['seconds']:.0f} s", flush=True)
    return row | {"bytes": sum(request.body_bytes for request in shards)}


def _epoch(lab, url, scan):
    """An epoch: read, decode, trunk, a step of the tail."""
    side = 64 if lab.quick else tails.SIZE
    loader = tails.loader(url, scan, side, "train", lanes_per_rank=1)
    whole = tails.Whole(tails.trunk(), tails.tail(1000))
    optimizer = torch.optim.AdamW(whole.tail.parameters(), **tails.ADAMW)
    # The memory is there before the clock starts.
    blank = torch.zeros(tails.BATCH, 3, side, side, dtype=torch.uint8)
    fit(whole, optimizer, [(blank, torch.zeros(tails.BATCH, dtype=torch.long))] * 3)
    begun = time.monotonic()
    computed = time.process_time()
    fit(whole, optimizer, loader)
    seconds = time.monotonic() - begun
    cpu = time.process_time() - computed
    return {"seconds": seconds, "cpu_seconds": cpu, "images": len(loader.dataset)}
