"""``pcrshard card``: what the Hub and Croissant readers want beside the shards."""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace

from .. import storage
from ..errors import EncodeError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex
from ..reading.shard import Shard
from ..upkeep.croissant import croissant
from ..upkeep.dataset_card import About, dataset_card
from .arguments import Command, argument, flag, open_source, value
from .progress import ProgressBar

CARD_FILES = ("README.md", "croissant.json")


def _card(args: Namespace) -> None:
    folder = _folder(args)
    targets = [os.path.join(folder, name) for name in CARD_FILES]
    there = [path for path in targets if os.path.lexists(path)]
    if there and not args.overwrite:
        raise EncodeError(f"{' and '.join(there)} is there already: --overwrite replaces it")

    for path, text in zip(targets, _texts(args, folder), strict=True):
        with storage.atomic_write(path) as file:
            file.write(text.encode(errors="backslashreplace"))
    print(f"wrote {' and '.join(targets)}; say in {CARD_FILES[0]} where the images come from")


def _folder(args: Namespace) -> str:
    folder = storage.plain_path(args.folder)
    if not storage.is_local(args.folder) or not os.path.isdir(folder):
        raise EncodeError(f"expected a local folder with {DATASET_INDEX}, got {args.folder}")
    return folder


def _texts(args: Namespace, folder: str) -> tuple[str, str]:
    index, urls = open_source(folder)
    schema = Shard(urls[0], entry=index.shards[0]).index.schema
    name = args.name or os.path.basename(os.path.realpath(folder))
    about = About(name, args.url or f"hf://datasets/USER/{name}", args.license or "")
    card = dataset_card(index, schema, about)
    return card, croissant(index, schema, about, _checksums(folder, index))


def _checksums(folder: str, index: DatasetIndex) -> dict[str, str]:
    """SHA-256 of every file, which Croissant wants."""
    names = [DATASET_INDEX, *(entry.name for entry in index.shards)]
    checksums = {}
    with ProgressBar("card", "files") as progress:
        for done, name in enumerate(names, 1):
            with open(os.path.join(folder, name), "rb") as file:
                checksums[name] = hashlib.file_digest(file, "sha256").hexdigest()
            progress(done, len(names))
    return checksums


CARD = Command(
    "card",
    "Write README.md (a card for the Hub) and croissant.json beside the shards; reads every byte"
    " once for their SHA-256.",
    "pcrshard card birds-pcr --license cc-by-4.0 --url hf://datasets/me/birds",
    _card,
    [
        argument("folder", "dataset folder"),
        value("--name", "of the dataset (default: the folder's)", "NAME"),
        value("--url", "where jobs will read it (default: hf://datasets/USER/NAME)", "URL"),
        value("--license", "identifier of the licence, as the Hub spells it", "ID"),
        flag("--overwrite", "replace files of these names"),
    ],
)
