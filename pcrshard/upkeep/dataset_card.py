"""The card of a dataset on the Hub: a ``README.md`` whose header says which files are data.

Without a card the Hub and ``datasets`` take ``pcr.json`` for the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL
from ..format.schema import Schema

# A size category holds fewer samples than its limit.
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)
_MORE = "n>1B"
# The columns that the stock `webdataset` loader makes of preview fields.
_KINDS = {"cls": "int64", "txt": "string"}


class About(NamedTuple):
    """What a dataset is called.

    Attributes:
        name: In titles.
        url: Where jobs will read it.
        licence: An identifier such as ``cc-by-4.0``, or nothing.
    """

    name: str
    url: str
    licence: str = ""


def dataset_card(
    index: DatasetIndex,
    schema: Schema,
    about: About,
) -> str:
    """The text of ``README.md``.

    Args:
        index: The dataset.
        schema: Of its first shard.
        about: Its names.
    """
    header = "\n".join(_header(index, schema, about))
    return f"---\n{header}\n---\n{_body(index, schema, about)}"


def _header(
    index: DatasetIndex,
    schema: Schema,
    about: About,
) -> Iterator[str]:
    yield f"pretty_name: {_quoted(about.name)}"
    if about.licence:
        yield f"license: {_quoted(about.licence)}"
    yield "library_name: pcrshard"
    yield "tags: [pcrshard, webdataset, image]"
    if index.num_classes:
        yield "task_categories: [image-classification]"
    category = next((text for limit, text in _SIZES if index.num_samples < limit), _MORE)
    yield f"size_categories: [{_quoted(category)}]"
    if schema.layout != "preview":
        yield "viewer: false"
        return
    yield 'configs: [{config_name: default, data_files: [{split: train, path: "*.tar"}]}]'
    if set(schema.preview_fields) <= set(_KINDS):
        yield from _features(schema, index.classes)


def _features(schema: Schema, classes: Sequence[str]) -> Iterator[str]:
    """The columns that the stock loader finds, in its order, so that labels have names."""
    yield "dataset_info:"
    yield "  features:"
    for name in schema.preview_fields:
        if name == "cls" and classes:
            yield '  - {name: "cls", dtype: {class_label: {names: {'
            for label, each in enumerate(classes):
                yield f"      {_quoted(str(label))}: {_quoted(each)},"
            yield "    }}}}"
        else:
            yield f"  - {{name: {_quoted(name)}, dtype: {_KINDS[name]}}}"
    for name, _ in schema.streams:
        yield f"  - {{name: {_quoted(name)}, dtype: image}}"
    for name in ("__key__", "__url__"):
        yield f"  - {{name: {name}, dtype: string}}"


def _quoted(text: str) -> str:
    """A word of YAML, whatever is in it."""
    plain = (
        char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08X}" for char in text
    )
    return f'"{"".join(plain)}"'


def _body(
    index: DatasetIndex,
    schema: Schema,
    about: About,
) -> str:
    rows = "\n".join(
        f"| {scan} | {index.prefix_bytes(scan) / index.num_samples / 1e3:.1f} |"
        for scan in (*range(1, index.num_groups + 1), FULL)
    )
    preview = "The shards have no preview: they were not written with `--layout preview`."
    if schema.layout == "preview":
        preview = f"""The preview, `tar` and every WebDataset reader show scans 1 to {schema.base}
of each image."""
    name = " ".join(about.name.split())
    return f"""# {name}

{index.num_samples} samples in {len(index.shards)} shards, as Progressive Compressed Records: each
JPEG is stored once, losslessly, as progressive scans, and the first bytes of a shard are the whole
shard at low fidelity. What a job reads it chooses by `scan`:

| scan | kB a sample |
|---|---|
{rows}

```python
import pcrshard.hf  # pip install 'pcrshard[hf]'

dataset = pcrshard.hf.load_dataset({about.url!r}, scan={min(5, index.num_groups)}, streaming=True)
```

{preview}

## Source, licence and contents

Say here where the images come from, under which licence, and what the labels mean.
"""
