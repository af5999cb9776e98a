"""``pcrshard index``."""

from __future__ import annotations

from typing import Annotated, Any

from ..encoding.labels import read_classes
from ..encoding.tar_index import IndexOptions, index_tars
from ..fidelity.costs import scan_costs
from ..redaction import redact_url
from .encode import Part, names
from .parser import KIND, Report, StorageOptions, from_file
from .progress import ProgressBar

Options = Annotated[
    IndexOptions,
    {
        "on_error": {"choices": ("raise", "skip")},
        "classes": from_file(read_classes),
        "kinds": KIND,
        "lists": {"type": names, "metavar": "A,B"},
    },
]


def index(
    src: str,
    dst: str | None = None,
    *,
    options: Options,
    part: Part = None,
    storage_option: StorageOptions = None,
) -> Report:
    """Index WebDataset tars, so that PCRDataset and PCRLoader read them as they are.

    Only headers, small values and the first bytes of pictures are read. Tars whose index is there
    already are not read, unless they have changed.

    Example:
        pcrshard index s3://bucket/train-{0000..0999}.tar train-index

    Args:
        src: Folder, URL, pattern, or wids index (.json) of WebDataset tars.
        dst: Folder for the indexes, local or a URL (default: the folder of the tars).
        options: What is read, and how fields are understood.
        part: Index only part I (from 0) of N; the last part to finish writes the dataset index.
        storage_option: fsspec option for the tars and the indexes; repeatable.
    """
    with ProgressBar("index", "tars") as progress:
        done = index_tars(
            src, dst, options, part=part, progress=progress, storage_options=storage_option
        )
    figures: dict[str, Any] = {
        "url": redact_url(done.folder),
        "tars": done.num_tars,
        "listed": done.num_listed,
    }
    if done.skipped:
        first = done.skipped[0]
        figures |= {
            "skipped": len(done.skipped),
            "first_skipped": f"{first.source}: {first.reason}",
        }
    if done.dataset is None:
        note = "this part is done; others have tars left to index"
        return Report(figures | {"note": note})
    found = done.dataset
    figures |= {
        "samples": found.num_samples,
        "shards": len(found.shards),
        "fields": [f"{field.name}={field.kind}" for field in found.schema.fields],
        "num_classes": found.num_classes,
    }
    return Report(figures | {"scans": scan_costs(found)})
