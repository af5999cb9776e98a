"""The networks of scripts/train.py, all in plain torch except EfficientNet."""

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

    expansion = 1

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, 1, relu=False)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride, relu=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """The bottleneck block of He et al. 2016, with its stride in the 3x3 convolution."""

    expansion = 4

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = self.expansion * width
        self.body = nn.Sequential(
            conv(inputs, width, 1),
            conv(width, width, 3, stride),
            conv(width, outputs, 1, relu=False),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride, relu=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Stages of blocks (He et al. 2016), each half as large and twice as wide as the one before."""

    def __init__(self, block, depths, classes, width=64, stem=None):
        super().__init__()
        self.stem = stem or nn.Sequential(conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage and position == 0 else 1
                blocks.append(block(inputs, width << stage, stride))
                inputs = (width << stage) * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def resnet18(classes, width=64, stem=None):
    """ResNet-18; ``stem`` replaces the first layers, which are for 224x224 pixels."""
    return ResNet(Residual, (2, 2, 2, 2), classes, width, stem)


def resnet50(classes, width=64, stem=None):
    """ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, width, stem)


def efficientnet_lite0(classes):
    """EfficientNet-Lite0, the paper's second network, from timm, which it needs."""
    import timm

    return timm.create_model("efficientnet_lite0", num_classes=classes)


MODELS = {
    function.__name__: function for function in (small_cnn, resnet18, resnet50, efficientnet_lite0)
}
