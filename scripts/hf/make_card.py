"""Fill README.md.template for a dataset: make_card.py FOLDER [NAME] [URL] > FOLDER/README.md."""

import pathlib
import string
import sys

import pcrshard
from pcrshard.format.shard_index import Schema

TEMPLATE = pathlib.Path(__file__).with_name("README.md.template")
SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)
KINDS = {"cls": "int64", "txt": "string"}


def features(schema: Schema, classes: tuple[str, ...]) -> str:
    """The columns that the stock `webdataset` loader finds, in its order, so that labels have
    names; empty where it must infer types.
    """
    if not set(schema.preview_fields) <= set(KINDS):
        return ""
    lines = ["dataset_info:", "  features:"]
    columns = [(name, KINDS[name]) for name in schema.preview_fields] + [
        (name, "image") for name, _ in schema.streams
    ]
    for name, kind in [*columns, ("__key__", "string"), ("__url__", "string")]:
        lines.append(f"  - name: {name}")
        if name == "cls" and classes:
            quoted = ("'" + label.replace("'", "''") + "'" for label in classes)
            lines += [
                "    dtype:",
                "      class_label:",
                "        names:",
                *(f"          '{i}': {q}" for i, q in enumerate(quoted)),
            ]
        else:
            lines.append(f"    dtype: {kind}")
    return "\n".join(lines)


def card(folder: str, name: str, url: str) -> str:
    """The text of README.md."""
    index, urls = pcrshard.open_dataset(folder)
    schema = pcrshard.Shard(urls[0], entry=index.shards[0]).index.schema
    rows = [
        f"| {scan} | {index.prefix_bytes(scan) / index.num_samples / 1e3:.1f} |"
        for scan in (*range(1, index.num_groups + 1), "full")
    ]
    # Without this the Hub takes pcr.json for the data.
    viewer = (
        'configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: "*.tar"\n'
        + features(schema, index.classes)
    )
    preview = (
        f"The preview, `tar` and every WebDataset reader show scans 1 to {schema.base} of each "
        "image."
    )
    if schema.layout != "preview":
        viewer, preview = (
            "viewer: false",
            "The shards have no preview: they were not written with `--layout preview`.",
        )
    return string.Template(TEMPLATE.read_text()).substitute(
        name=name,
        url=url,
        num_samples=index.num_samples,
        num_shards=len(index.shards),
        size_category=next((text for limit, text in SIZES if index.num_samples < limit), "n>10M"),
        table="\n".join(["| scan | kB an image |", "|---|---|", *rows]),
        viewer=viewer.rstrip(),
        preview=preview,
    )


if __name__ == "__main__":
    folder = sys.argv[1]
    name = sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(folder).resolve().name
    print(
        card(folder, name, sys.argv[3] if len(sys.argv) > 3 else f"hf://datasets/USER/{name}"),
        end="",
    )
