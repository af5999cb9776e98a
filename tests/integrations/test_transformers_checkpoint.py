"""A Hugging Face Trainer adds a version at each save, with the real Trainer."""

import pytest
import torch

from pcrshard.checkpoint import DeltaStore
from pcrshard.integrations.transformers_checkpoint import delta_trainer_callback

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 20)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def test_each_save_is_a_version_that_can_be_resumed(tmp_path):
    """Model, optimizer, scheduler and the trainer's step."""
    torch.manual_seed(0)
    model = Model()
    store = DeltaStore(tmp_path / "store", "lossless")
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), save_strategy="steps", save_steps=2, max_steps=4, use_cpu=True,
        report_to=[], disable_tqdm=True, save_only_model=True, per_device_train_batch_size=4,
    )  # fmt: skip
    data = [{"x": torch.randn(20)} for _ in range(32)]
    callback = delta_trainer_callback(store)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert [record.metrics["step"] for record in store.versions()] == [2, 4]
    state = store.load()
    assert torch.equal(state["model"]["layer.weight"], model.layer.weight)
    assert state["trainer"]["global_step"] == 4
    trainer.optimizer.load_state_dict(state["optimizer"])
    moments = state["optimizer"]["state"][0]["exp_avg"]
    assert moments.abs().sum() > 0
    store.close()
