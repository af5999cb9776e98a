"""The dataset card for the Hub: a ``README.md`` whose header lists the data files.

Without a card, the Hub and ``datasets`` treat ``pcr.json`` as the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..format.dataset_index import DatasetIndex
from ..format.levels import LEVELS
from ..format.scan import FULL
from ..redaction import redact_url

# Column types that the stock `webdataset` loader gives preview fields.
_TYPES = {"cls": "int64", "txt": "string"}


def dataset_card(
    splits: Mapping[str, DatasetIndex],
    *,
    name: str,
    url: str,
    license: str = "",  # noqa: A002  # the Hub's field
) -> str:
    """Return the text of ``README.md``.

    Args:
        splits: The index of each split, in the folder of its name; ``{"": index}`` for a folder
            that is itself a dataset.
        name: Title of the card.
        url: URL from which jobs will read the dataset.
        license: An identifier such as ``cc-by-4.0``, or empty.
    """
    header = {"pretty_name": name} | ({"license": license} if license else {})
    header |= _header(splits)
    lines = [f"{key}: {_as_yaml(value)}" for key, value in header.items()]
    return "\n".join(["---", *lines, "---", _body(splits, name, url)])


def _as_yaml(value: object) -> str:
    """Return JSON with non-printable characters escaped, which makes it valid YAML."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in text)


def _header(splits: Mapping[str, DatasetIndex]) -> dict[str, Any]:
    first = next(iter(splits.values()))
    schema = first.schema
    header: dict[str, Any] = {
        "library_name": "pcrshard",
        "tags": ["pcrshard", "webdataset", "image"],
    }
    if first.num_classes:
        header["task_categories"] = ["image-classification"]
    if schema.layout != "preview":
        return header | {"viewer": False}
    files = [
        {"split": split or "train", "path": f"{split}/*.tar" if split else "*.tar"}
        for split in splits
    ]
    header["configs"] = [{"config_name": "default", "data_files": files}]
    if set(schema.preview_fields) <= set(_TYPES):
        # The stock loader's columns, in its order, so that labels get names.
        names = {str(label): name for label, name in enumerate(first.classes)}
        types: dict[str, Any] = {name: _TYPES[name] for name in schema.preview_fields}
        if "cls" in types and names:
            types["cls"] = {"class_label": {"names": names}}
        types |= dict.fromkeys(schema.streams, "image")
        types |= {"__key__": "string", "__url__": "string"}
        features = [{"name": name, "dtype": kind} for name, kind in types.items()]
        header["dataset_info"] = {"features": features}
    return header


def _describe(index: DatasetIndex) -> str:
    """Return what is unusual about the images of a dataset."""
    counts = index.counts
    if counts is None or not counts.whole:
        return ""
    return f", {counts.whole} files kept whole ({counts.undecodable} of them undecodable)"


def _body(splits: Mapping[str, DatasetIndex], title: str, url: str) -> str:
    first_split, first = next(iter(splits.items()))
    schema = first.schema
    contents = "\n".join(
        f"- {split}{split and ': '}{index.num_samples} samples in {len(index.shards)} shards"
        + _describe(index)
        for split, index in splits.items()
    )
    scans = (*range(1, first.num_groups + 1), FULL)[: first.scan]
    rows = "\n".join(
        f"| {scan} | {first.prefix_bytes(scan) / first.num_samples / 1e3:.1f} |" for scan in scans
    )
    name, levels = "scan", ""
    if schema.script == LEVELS:
        name, levels = "level", ", a level: each image stops where further bytes are worth little"
    preview = ""
    if schema.layout == "preview":
        preview = f"""
The preview, `tar` and every WebDataset reader show scans 1 to {schema.base} of each image.
"""
    url = redact_url(f"{url}/{first_split}" if first_split else url)
    return f"""# {" ".join(title.split())}

Progressive Compressed Records: each JPEG is stored once, losslessly, as progressive scans, and the
first bytes of a shard are the whole shard at low fidelity.

{contents}

A job chooses what it reads by `scan`{levels}:

| {name} | kB per sample |
|---|---|
{rows}

```python
import pcrshard.hf  # pip install 'pcrshard[hf]'

dataset = pcrshard.hf.load_dataset({url!r}, scan={scans[:5][-1]!r}, streaming=True)
```
{preview}
## Source, license and contents

Say here where the images come from, under which license, and what the labels mean.
"""
