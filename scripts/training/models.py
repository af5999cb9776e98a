"""The networks of scripts/train.py, in plain torch but for EfficientNet."""

import itertools

import torch
from torch import nn


def conv(inputs, outputs, kernel=3, stride=1, groups=1, relu=True):
    """Convolution, BatchNorm and, unless told otherwise, ReLU."""
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class Head(nn.Sequential):
    def __init__(self, features, classes):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


def small_cnn(classes):
    """Six layers, 0.4 million parameters: minutes on two cores."""
    widths = [24, 48, 96, 192]
    layers = [conv(3, widths[0], 5, 2)]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [conv(inputs, outputs, 3, 2), conv(outputs, outputs, 3, 1, groups=4)]
    return nn.Sequential(*layers, Head(widths[-1], classes))


class Residual(nn.Module):
    """The basic block of He et al. 2016."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, 1, relu=False)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride, relu=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(classes):
    """ResNet-18 (He et al. 2016)."""
    layers = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, Head(512, classes))


class Bottleneck(nn.Module):
    """The bottleneck block of He et al. 2016, with its stride in the 3x3 convolution."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            conv(inputs, width, 1),
            conv(width, width, 3, stride),
            conv(width, outputs, 1, relu=False),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride, relu=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(classes):
    """ResNet-50 (He et al. 2016)."""
    layers = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, Head(inputs, classes))


def efficientnet_lite0(classes):
    """EfficientNet-Lite0, the paper's second network, from timm."""
    try:
        import timm
    except ImportError:
        raise SystemExit("train: model=efficientnet_lite0 needs timm: pip install timm") from None
    return timm.create_model("efficientnet_lite0", num_classes=classes)


class ShuffleUnit(nn.Module):
    """The unit of ShuffleNetV2 (Ma et al. 2018): half of the channels pass, half are worked on,
    then they are shuffled.
    """

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.stride, half = stride, outputs // 2
        taken = inputs if stride == 2 else inputs // 2
        self.right = nn.Sequential(
            conv(taken, half, 1), conv(half, half, 3, stride, half, relu=False), conv(half, half, 1)
        )
        self.left = (
            nn.Sequential(conv(inputs, inputs, 3, 2, inputs, relu=False), conv(inputs, half, 1))
            if stride == 2
            else None
        )

    def forward(self, x):
        left, right = (x, x) if self.left is not None else x.chunk(2, 1)
        both = torch.stack((left if self.left is None else self.left(left), self.right(right)), 2)
        return both.flatten(1, 2)


def shufflenet_v2(classes):
    """ShuffleNetV2 x0.5."""
    layers, inputs = [conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)], 24
    for outputs, units in ((48, 4), (96, 8), (192, 4)):
        layers += [
            ShuffleUnit(inputs, outputs, 2),
            *(ShuffleUnit(outputs, outputs, 1) for _ in range(units - 1)),
        ]
        inputs = outputs
    return nn.Sequential(*layers, conv(192, 512, 1), Head(512, classes))


MODELS = {
    function.__name__: function
    for function in (small_cnn, resnet18, resnet50, shufflenet_v2, efficientnet_lite0)
}
