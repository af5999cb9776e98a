"""``croissant.json``: what a dataset consists of, in the words of MLCommons Croissant 1.0.

Shards are files with their checksums, and records that say what each holds. In the preview layout
the small images of the base scans are records, too, which any Croissant reader can load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..format.dataset_index import DATASET_INDEX, DatasetIndex
from ..format.schema import Schema
from .dataset_card import About

Node = dict[str, Any]
# The vocabulary, as the specification prints it, less what is not used here.
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **{
        word: f"cr:{word}"
        for word in (
            "citeAs", "extract", "field", "fileObject", "fileProperty", "fileSet", "includes",
            "jsonPath", "md5", "recordSet", "source",
        )
    },
}  # fmt: skip
_COLUMNS = {
    "name": "sc:Text",
    "num_samples": "sc:Integer",
    "shard_bytes": "sc:Integer",
}


def croissant(
    index: DatasetIndex,
    schema: Schema,
    about: About,
    checksums: Mapping[str, str],
) -> str:
    """The text of ``croissant.json``.

    Args:
        index: The dataset.
        schema: Of its first shard.
        about: Its names.
        checksums: SHA-256 in hexadecimal of ``pcr.json`` and of each shard, by name.
    """
    tars = [entry.name for entry in index.shards]
    files = [_file(DATASET_INDEX, "application/json", checksums)]
    files += [_file(name, "application/x-tar", checksums) for name in tars]
    records = [_shard_records()]
    if schema.layout == "preview":
        files.append(_images(tars))
        records.append(_image_records())
    document = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": about.name,
        "description": f"{index.num_samples} samples as Progressive Compressed Records, "
        f"scan script {index.script}, {index.num_groups} scans.",
        "url": about.url,
        **({"license": about.licence} if about.licence else {}),
        "version": "1.0.0",
        "keywords": ["pcrshard", "webdataset", "progressive JPEG"],
        "distribution": files,
        "recordSet": records,
    }
    return json.dumps(document, indent=1) + "\n"


def _file(name: str, kind: str, checksums: Mapping[str, str]) -> Node:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "encodingFormat": kind,
        "sha256": checksums[name],
    }


def _images(tars: list[str]) -> Node:
    return {
        "@type": "cr:FileSet",
        "@id": "preview",
        "name": "preview",
        "includes": "*.jpg",
        "encodingFormat": "image/jpeg",
        "containedIn": [{"@id": name} for name in tars],
    }


def _shard_records() -> Node:
    """A record for each shard, out of the dataset index."""
    source = {"fileObject": {"@id": DATASET_INDEX}}
    fields = [
        _field(f"shards/{name}", kind, source | {"extract": {"jsonPath": f"$.shards[*].{name}"}})
        for name, kind in _COLUMNS.items()
    ]
    return _record_set("shards", fields)


def _image_records() -> Node:
    """A record for each small image of a preview."""
    source = {"fileSet": {"@id": "preview"}}
    name = source | {"extract": {"fileProperty": "filename"}}
    content = source | {"extract": {"fileProperty": "content"}}
    return _record_set(
        "images",
        [
            _field("images/name", "sc:Text", name),
            _field("images/content", "sc:ImageObject", content),
        ],
    )


def _record_set(name: str, fields: list[Node]) -> Node:
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "field": fields,
    }


def _field(name: str, kind: str, source: Node) -> Node:
    return {
        "@type": "cr:Field",
        "@id": name,
        "name": name,
        "dataType": kind,
        "source": source,
    }
