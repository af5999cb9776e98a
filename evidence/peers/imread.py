"""pcrshard's decoder in imread_benchmark (ternaus, arXiv 2605.08731), on ordinary baseline JPEGs.

Usage: python evidence/peers/imread.py photos.tar

Needs that package, torch and the decoders in the environment that runs it; none of its code is
here. Its adapters and its two measuring functions are called as its campaigns call them, without
the campaigns' packages and locked environments: decoding resident bytes on one thread, and a
DataLoader of resident bytes with workers. Rounds are interleaved.
"""

import datetime
import importlib.metadata
import json
import pathlib
import sys
import tarfile
import types

from imread_benchmark.datasets.package import ResidentItem
from imread_benchmark.decoders import REGISTRY, BaseDecoder
from imread_benchmark.execution.loader_measurement import run_loader_supply_measurement
from imread_benchmark.execution.measurement import run_decode_memory_measurement

SETS = ("imagenet", "cars", "faces_1024", "animal_faces_512", "flowers", "ham10000")
EVERY = 4  # photographs
ROUNDS = 5
# By workers of a DataLoader; none of it decodes resident bytes on one thread.
PROTOCOLS = {"decode": None, "loader 0": 0, "loader 2": 2}


class PCRShardDecoder(BaseDecoder):
    """The native core, through ``pcrshard.decode_image``."""

    name = "pcrshard"
    package_name = "pcrshard"

    def decode(self, data):
        """(H, W, 3) uint8 RGB."""
        import pcrshard

        return pcrshard.decode_image(data)


REGISTRY["pcrshard"] = PCRShardDecoder


def find_items(tar, every):
    """Baseline color JPEGs, as the package keeps them."""
    items = []
    with tarfile.open(tar) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.split("/")[1] in SETS:
                data = archive.extractfile(member).read()
                frame = data.find(b"\xff\xc0\x00\x11\x08")
                if frame >= 0:  # three components
                    items.append(ResidentItem(member.name, member.name, "", len(data), data))
    return items[::every]


def measure(name, items, workers):
    """Return images per second of the best pass that the package times."""
    how = {
        "decoder_id": name,
        "warmup_passes": 1,
        "logical_repeat_factor": 1,
        "timed_passes_per_run": 2,
        "minimum_timed_seconds": 0.0,
        "requested_threads": None,
        "num_workers": workers,
        "batch_size": 1,
        "prefetch_factor": 2 if workers else None,
        "persistent_workers": bool(workers),
        "multiprocessing_start_method": "fork" if workers else None,
    }
    if workers is None:
        configuration = types.SimpleNamespace(protocol_id="decode-memory", **how)
        result = run_decode_memory_measurement(
            REGISTRY[name](), items, configuration, effective_threads=1
        )
    else:
        configuration = types.SimpleNamespace(protocol_id="loader-supply", **how)
        result = run_loader_supply_measurement(items, configuration)
    return max(sample.items_processed / sample.elapsed_seconds for sample in result.samples)


def main():
    """Measure what can be imported, and write imread.json."""
    items = find_items(sys.argv[1], EVERY)
    found = {"images": len(items), "versions": {}, "failures": {}, "rates": {}}
    for _ in range(ROUNDS):
        for name in sorted(REGISTRY):
            for protocol, workers in PROTOCOLS.items():
                if name in found["failures"]:
                    continue
                try:
                    rate = measure(name, items, workers)
                except Exception as error:  # a decoder that is not there
                    found["failures"][name] = f"{protocol}: {type(error).__name__}: {error}"
                    continue
                found["rates"].setdefault(name, {}).setdefault(protocol, []).append(rate)
                package = REGISTRY[name].package_name
                found["versions"].setdefault(name, importlib.metadata.version(package))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = {"experiment": "imread", "quick": False, "date": date, "results": found}
    target = pathlib.Path(__file__).with_name("imread.json")
    target.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
