"""The command that proves a dataset: ``pcrshard verify``."""

from __future__ import annotations

from argparse import Namespace

from ..encoding.labels import renumber
from ..encoding.resume_journal import SKIPPED, read_report
from ..encoding.sources import SampleRef, list_source
from ..encoding.worker_processes import run_tasks, worker_pool
from ..errors import EncodeError, PCRError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex
from ..reading.shard import Shard
from ..upkeep.verify import VerifyResult, VerifyTask, verify_shard
from .arguments import (
    DATASET_OR_SHARD,
    JSON,
    Command,
    flag,
    is_shard,
    open_source,
    print_json,
    sizes,
    value,
)
from .progress import ProgressBar

Sources = dict[str, SampleRef]


def _verify(args: Namespace) -> bool:
    index, urls = open_source(args.src)
    problems = _verify_shards(args, index, urls)
    if args.json:
        counted = {"samples": index.num_samples, "shards": len(index.shards)}
        print_json(counted | {"problems": problems})
    elif problems:
        print("\n".join(problems))
        print(f"{len(problems)} problems in {index.num_samples} samples")
    else:
        proven = ", pixels equal the source's" if args.against else ""
        print(f"{sizes(index)}: checksums and layout are right{proven}")
    return bool(problems)


VERIFY = Command(
    "verify",
    "Check every byte of a dataset; with --against, prove that all pixels equal the source's.",
    "pcrshard verify /data/train-pcr --against imagenet/train",
    _verify,
    [
        DATASET_OR_SHARD,
        value("--against", "the source that was encoded", "SRC"),
        flag("--prefix-keys", "as given to encode"),
        value("--workers", "worker processes (default: one a core)", "N", int),
        JSON,
    ],
)


def _list_sources(args: Namespace, index: DatasetIndex) -> Sources | None:
    if not args.against:
        return None
    listed = list_source(args.against, prefix_keys=args.prefix_keys)
    # A split alone may lack classes that the dataset numbers; other names are other labels.
    if set(listed.classes) <= set(index.classes):
        listed = renumber(listed, index.classes)
    if index.scan is not None:
        raise EncodeError(
            f"--against needs full fidelity, this staged copy holds scans 1 to {index.scan}: "
            "verify the dataset itself"
        )
    return {sample.key: sample for sample in listed.samples}


def _verify_shards(
    args: Namespace,
    index: DatasetIndex,
    urls: list[str],
) -> list[str]:
    """The problems of each shard, and of the source's samples that no shard holds."""
    sources = _list_sources(args, index)
    entries = [None] if is_shard(args.src) else index.shards
    tasks = {
        number: VerifyTask(url, entry, sources and _sources_of(url, sources))
        for number, (url, entry) in enumerate(zip(urls, entries, strict=True))
    }
    results = _run(args, index, tasks)
    problems = [problem for result in results for problem in result.problems]
    return problems + _name_missing(args.src, sources, results)


def _run(
    args: Namespace,
    index: DatasetIndex,
    tasks: dict[int, VerifyTask],
) -> list[VerifyResult]:
    results = []
    with ProgressBar("verify", "images") as bar, worker_pool(args.workers, len(tasks)) as pool:
        for number, result in run_tasks(pool, verify_shard, tasks):
            results.append(result)
            bar(bar.done + index.shards[number].num_samples, index.num_samples)
    return results


def _name_missing(
    src: str,
    sources: Sources | None,
    results: list[VerifyResult],
) -> list[str]:
    # Of a shard that could not be read nobody knows what is missing.
    if sources is None or is_shard(src) or not all(result.keys for result in results):
        return []
    missing = set(sources).difference(*(result.keys for result in results))
    skipped = read_report(src.removesuffix(DATASET_INDEX), SKIPPED)
    missing.difference_update(row.key for row in skipped)
    return [f"the source's sample {key} is in no shard" for key in sorted(missing)]


def _sources_of(url: str, sources: Sources) -> Sources:
    """Only the sources of a shard's samples, so that a task stays small."""
    try:
        keys = Shard(url).index.keys
    except PCRError:
        return {}
    return {key: sources[key] for key in keys if key in sources}
