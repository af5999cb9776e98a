"""What the tests of HuggingFace datasets share; imports ``datasets`` without a network."""

import atexit
import os
import shutil
import tempfile

from imported_later import Later

# Read when datasets is imported: no network, and no cache outside this run.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": tempfile.mkdtemp(prefix="pcrshard-hf-"),
}
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
import pcrshard
from pcrshard.testing import make_jpeg

datasets = Later("datasets", "NO HUGGINGFACE: pip install 'pcrshard[hf]'")
huggingface = Later("pcrshard.integrations.huggingface")


def load_dataset(url, **options):
    """A stream, unless a test asks for something else."""
    return huggingface.load_dataset(url, **{"streaming": True} | options)


def keys(rows):
    return [row["__key__"] for row in rows]


def write(folder, samples, **options):
    """A dataset with these samples; a key and an image are added where there is none."""
    with pcrshard.ShardWriter(folder, **options) as writer:
        for i, fields in enumerate(samples):
            writer.write({"__key__": f"k{i}", "jpg": make_jpeg(i)} | fields)
    return str(folder)
