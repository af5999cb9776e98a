"""Lightning saves into a store and resumes from it, with the real Trainer."""

import os

import pytest
import torch
from lightning_jobs import lightning, make_module, make_trainer

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import CorruptCheckpoint, UnsupportedState
from pcrshard.integrations.lightning_checkpoint import check_checkpoints, delta_checkpoint_io

pytestmark = pytest.mark.filterwarnings("ignore")


class Model:
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 32})
        self.layer = torch.nn.Linear(32, 32)
        self.losses = []

    def training_step(self, batch, _):
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(torch.randn(24, 32, generator=generator), batch_size=8)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(tmp_path, store, epochs, checkpoint=None):
    torch.manual_seed(0)
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "ckpt", save_top_k=-1, save_last=True, filename="{epoch}"
    )
    plugins = [delta_checkpoint_io(store)]
    model = make_module(Model)
    trainer = make_trainer(tmp_path, max_epochs=epochs, callbacks=[keep], plugins=plugins)
    trainer.fit(model, ckpt_path=checkpoint)
    return model


def test_training_resumes_from_a_version(tmp_path):
    """Epoch 3 of a resumed run has the losses of an uninterrupted one, losslessly."""
    store = DeltaStore(tmp_path / "store")
    whole = fit(tmp_path, store, 3)
    names = set(os.listdir(tmp_path / "ckpt"))
    assert {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"} <= names
    assert store.verify() == []
    resumed = fit(tmp_path, store, 3, str(tmp_path / "ckpt" / "epoch=1.ckpt"))
    assert resumed.losses == whole.losses[6:]
    loaded = store.load(1)
    assert loaded["hyper_parameters"] == {"width": 32}
    store.close()


class Odd(Model):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["odd"] = {"inner": [{1, 2}]}


def test_what_cannot_be_stored_is_found_when_training_starts(tmp_path):
    """A value without a stored form is named before the first step, and nothing is written."""
    store = DeltaStore(tmp_path / "store")
    options = {"plugins": [delta_checkpoint_io(store)], "callbacks": [check_checkpoints()]}
    model = make_module(Odd)
    with pytest.raises(UnsupportedState, match=r"set.*key=odd\.inner\.0"):
        make_trainer(tmp_path, max_epochs=1, **options).fit(model)
    assert model.losses == []
    assert store.versions() == []
    assert not list(tmp_path.rglob("*.ckpt"))
    make_trainer(tmp_path, max_epochs=1, **options).fit(make_module(Model))
    assert len(store.versions()) == 1


def test_hyperparameters_of_omegaconf_are_stored(tmp_path):
    """A DictConfig, alone or in a dict, is stored as the plain values that it resolves to."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": {"b": [1, 2]}, "c": "${a.b}"})
    for number, given in enumerate((config, {"config": config}), 1):
        with DeltaStore(tmp_path / f"store-{number}") as store:
            model = make_module(Model)
            model._hparams.clear()
            model.save_hyperparameters(given)
            plugins = [delta_checkpoint_io(store)]
            make_trainer(tmp_path, max_epochs=1, plugins=plugins).fit(model)
        found = store.load()["hyper_parameters"]
        expected = {"a": {"b": [1, 2]}, "c": [1, 2]}
        assert found.get("config", found) == expected


def test_files_name_a_version_wherever_its_store_is(tmp_path, monkeypatch):
    """A store may be moved, or opened by another spelling of its path; another run is refused."""
    monkeypatch.chdir(tmp_path)
    for name, epoch in (("store", 3), ("other", 4)):
        with DeltaStore(name) as store:
            delta_checkpoint_io(store).save_checkpoint({"epoch": epoch}, f"{name}.ckpt")
    os.rename("store", "moved")
    for url in ("moved/", tmp_path / "moved", f"file://{tmp_path}/moved"):
        assert delta_checkpoint_io(DeltaStore(url)).load_checkpoint("store.ckpt") == {"epoch": 3}
    with pytest.raises(CorruptCheckpoint, match="expected version 1 of store, got another"):
        delta_checkpoint_io(DeltaStore("other")).load_checkpoint("store.ckpt")


def test_files_that_name_no_version_are_refused(tmp_path):
    """An ordinary checkpoint, another store's file, nonsense."""
    with DeltaStore(tmp_path / "store") as store:
        plugin = delta_checkpoint_io(store)
        path = tmp_path / "a.ckpt"
        plugin.save_checkpoint({"epoch": 3}, path)
        assert plugin.load_checkpoint(path) == {"epoch": 3}
        torch.save({"epoch": 3}, tmp_path / "b.ckpt")
        for text in (b"", b"{}", b"[]", b"\xff\xfe", b'{"pcrshard_store": "x", "version": 1}',
                     b'{"pcrshard_store": "x", "version": "1"}', b"1" * 70_000):  # fmt: skip
            path.write_bytes(text)
            with pytest.raises(CorruptCheckpoint, match="expected a"):
                plugin.load_checkpoint(path)
        with pytest.raises(CorruptCheckpoint):
            plugin.load_checkpoint(tmp_path / "b.ckpt")
        plugin.remove_checkpoint(path)
        plugin.remove_checkpoint(path)
        assert not path.exists()
        assert len(store.versions()) == 1
        plugin.teardown()
