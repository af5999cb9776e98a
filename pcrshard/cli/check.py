"""``pcrshard check``: is a dataset what its user believes it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated

from ..checking.check import CheckReport, check_parts
from ..checking.pictures import Part
from ..fidelity.costs import record_table
from ..reading.dataset_folder import find_datasets, open_dataset
from ..reading.shard import Shard
from ..redaction import redact_url
from ..storage import Options, file_name
from .parser import Keywords, Report, StorageOptions
from .progress import ProgressBar

Page = Annotated[str, Keywords(metavar="FILE.html")]


def check(
    train: str,
    val: Sequence[str] = (),
    *,
    mix: Sequence[str] = (),
    near: bool = False,
    sheet: Page | None = None,
    storage_option: StorageOptions = None,
) -> Report:
    """Look for what makes results wrong: pictures in two splits, labels, files, shortcuts.

    Compares the classes of all sets, and finds: the same picture in two splits or twice; files that
    cannot be decoded; missing labels; classes with few samples; JPEG quality, sizes, grayscale and
    color profiles that tell a class, or that differ between the splits. Reads scan 1 of all
    pictures (all scans if the sets have different scan scripts), and the shards of pictures that
    may be the same whole. The exit status is 1 if something makes results wrong.

    Example:
        pcrshard check /data/train-pcr /data/val-pcr --sheet check.html

    Args:
        train: Dataset that you train on, or a folder of splits.
        val: Datasets that you measure on.
        mix: Further datasets that you train on together with the first.
        near: Also report pictures that look the same but have other pixels, such as copies of
            another size or JPEG quality.
        sheet: HTML file that shows the pictures of the worst findings.
        storage_option: fsspec option of the datasets; repeatable.
    """
    parts = list(_parts(train, val, mix, storage_option))
    with ExitStack() as stack:

        def stage(name: str) -> Callable[[int, int], None]:
            return stack.enter_context(ProgressBar(name, "images"))

        found = check_parts(parts, near=near, stages=stage)
    if sheet is not None:
        found.sheet(sheet)
    return Report(found.as_dict(), _page(found), found.is_wrong)


def _parts(train: str, val: Sequence[str], mix: Sequence[str], options: Options) -> Iterator[Part]:
    splits = find_datasets(train, storage_options=options)
    # The training set of a folder of splits is the first of these that it has.
    first = next((name for name in ("", "train", "training") if name in splits), min(splits))
    named = [(splits.pop(first), "train"), *((url, "train") for url in mix)]
    named += [(url, name) for name, url in splits.items()]
    named += [(url, file_name(url.rstrip("/"))) for url in val]
    for url, split in named:
        index, urls = open_dataset(url, storage_options=options)
        shards = [
            Shard(each, entry=entry, schema=index.schema, storage_options=options)
            for each, entry in zip(urls, index.shards, strict=True)
        ]
        yield Part(redact_url(url), split, index, shards)


def _page(found: CheckReport) -> str:
    wrong = sum(each.is_wrong for each in found.findings)
    end = f"{wrong} wrong, {len(found.findings) - wrong} notes"
    return f"{record_table(found.datasets)}\n\n{found}\n\n{end}"
