"""How each peer stops in the middle of an epoch and goes on, by the state that it offers.

Each function gives the batches of an epoch, as lists that tell which images they hold, and a
function that says where it is. ``state`` is what that said in another process.
"""

import collections
import itertools
import os
import pickle
import shutil
import time

from adapters import PEERS
from images import BATCH, decode_plain, label_of


def of_pcrshard(peer, folder, workers, state):
    loader = peer.loader(folder, workers)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["__key__"] for batch in loader), loader.state_dict


def of_streaming(peer, folder, workers, state):
    import streaming
    import torch
    from images import batches_of

    torch.set_num_threads(1)
    loader = streaming.StreamingDataLoader(
        peer.dataset(folder), batch_size=BATCH, num_workers=workers, collate_fn=batches_of
    )
    if state is not None:
        loader.load_state_dict(state)
    return (labels.tolist() for _, labels in loader), loader.state_dict


def of_litdata(peer, folder, workers, state):
    """Its state is taken only by a dataset with the same path of the cache, which begins empty."""
    cache = os.path.join(os.environ["PEERS_SCRATCH"], "litdata")
    shutil.rmtree(cache, ignore_errors=True)
    os.mkdir(cache)
    loader = peer.loader(peer.dataset(folder, (cache, "100GB")), workers)
    if state is not None:
        loader.load_state_dict(state)
    return (labels.tolist() for _, labels in loader), loader.state_dict


def of_grain(peer, folder, workers, state):
    iterator = iter(peer.dataset(folder, workers))
    if state is not None:
        iterator.set_state(state)
    return (labels.tolist() for _, labels in iterator), iterator.get_state


def of_datasets(peer, folder, _, state):
    """Without workers: with them the state needs a loader of another library."""
    import datasets

    dataset, image = peer.dataset(folder)
    dataset = dataset.cast_column(image, datasets.Image(decode=False))
    dataset = dataset.map(lambda sample: decoded(sample[image]["bytes"]))
    if state is not None:
        dataset.load_state_dict(state)
    samples = iter(dataset)
    batches = iter(lambda: list(itertools.islice(samples, BATCH)), [])
    return ([sample["label_of"] for sample in batch] for batch in batches), dataset.state_dict


def decoded(jpeg):
    return {"pixels": decode_plain(jpeg), "label_of": label_of(jpeg, None)}


WAYS = {
    "pcrshard scan 5": of_pcrshard,
    "pcrshard scan 5, threads": of_pcrshard,
    "pcrshard full": of_pcrshard,
    "MosaicML": of_streaming,
    "LitData": of_litdata,
    "Grain": of_grain,
    "HF parquet": of_datasets,
    "HF webdataset": of_datasets,
}


def read_part(name, folder, options):
    """Read up to ``stop_after`` batches, from where ``state`` says, and keep the state there."""
    state = None
    if os.path.exists(options["state"]):
        with open(options["state"], "rb") as file:
            state = pickle.load(file)
    start = time.perf_counter()
    batches, say = WAYS[name](PEERS[name], folder, options["workers"], state)
    first = None
    read = []
    for batch in itertools.islice(batches, options["stop_after"]):
        first = first or time.perf_counter() - start
        read.append(list(map(str, batch)))
    wall = time.perf_counter() - start
    with open(options["state"], "wb") as file:
        pickle.dump(say(), file)
    return {"first": first, "wall": wall, "batches": read}


def compare(whole, before, after):
    """Whether two parts are the epoch, which images came in neither, and which came twice."""
    expected = collections.Counter(itertools.chain(*whole))
    got = collections.Counter(itertools.chain(*before, *after))
    return {
        "exact": before + after == whole,
        "lost": (expected - got).total(),
        "repeated": (got - expected).total(),
    }
