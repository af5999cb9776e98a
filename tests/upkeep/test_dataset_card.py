"""The card of a dataset on the Hub, read by the Hub's own library."""

import pytest

from pcrshard.format.dataset_index import DatasetIndex, ShardEntry
from pcrshard.format.schema import Field, Schema
from pcrshard.upkeep.dataset_card import dataset_card

huggingface_hub = pytest.importorskip("huggingface_hub")
ENTRY = ShardEntry("a.tar", 24, 0, (1536, 2048, 4096, 6144))
FIELDS = (Field("jpg", "image", 1), Field("cls", "class"))
PREVIEW = Schema("s", ("1", "2"), "preview", 1, FIELDS, preview_fields=("cls",))


def read(index, **about):
    text = dataset_card({"": index}, **about)
    return huggingface_hub.DatasetCard(text)


def test_the_hub_understands_the_header():
    """Which files are data, and what labels mean."""
    odd = ("cat", "a: 'b' #\"c\"\\", "Käfer\x7f\n", "1", "no")
    card = read(DatasetIndex(PREVIEW, (ENTRY,), odd), name="pets", url="hf://x", license="mit")
    data = card.data.to_dict()
    assert data["license"] == "mit"
    assert data["configs"][0]["data_files"] == [{"split": "train", "path": "*.tar"}]
    (label, *_) = data["dataset_info"]["features"]
    assert tuple(label["dtype"]["class_label"]["names"].values()) == odd
    assert "hf://x" in card.text


def test_a_card_of_compact_shards_turns_the_viewer_off():
    """Compact shards would show as rows of whole scan groups."""
    card = read(DatasetIndex(Schema("s", ("1", "2")), (ENTRY,)), name="pets", url="hf://x")
    data = card.data.to_dict()
    assert data["viewer"] is False
    assert not {"configs", "license"} & set(data)
    assert "| 1 | 0.1 |" in card.text


def test_a_card_of_splits_names_all_of_them():
    """One card at the root of a folder of splits is enough for the Hub."""
    index = DatasetIndex(PREVIEW, (ENTRY,), ("cat",))
    card = huggingface_hub.DatasetCard(
        dataset_card({"train": index, "val": index}, name="pets", url="hf://x")
    )
    assert card.data.to_dict()["configs"][0]["data_files"] == [
        {"split": "train", "path": "train/*.tar"},
        {"split": "val", "path": "val/*.tar"},
    ]
    assert "hf://x/train" in card.text
    assert "val: 24 samples in 1 shards" in card.text


def test_a_card_of_a_staged_copy_lists_its_scans():
    """A copy of the low scans can be published with a card of its own."""
    index = DatasetIndex(PREVIEW, (ENTRY.staged(1),))
    card = dataset_card({"": index}, name="pets", url="hf://x")
    assert "| 1 |" in card
    assert "| 2 |" not in card
    assert "scan=1," in card


def test_a_card_has_no_password():
    """A card is published, with a URL that has no secrets."""
    index = DatasetIndex(PREVIEW, (ENTRY,))
    card = dataset_card({"": index}, name="pets", url="https://me:secret@h/x")
    assert "load_dataset('https://h/x'" in card
