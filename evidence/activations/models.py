"""The networks of the activation benchmarks, by hand: torchvision is not needed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016)."""

    expansion = 1

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, values):
        out = self.relu(self.bn1(self.conv1(values)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.shortcut(values))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1; the stride is in the 3x3 convolution, as everywhere today."""

    expansion = 4

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, values):
        out = self.relu(self.bn1(self.conv1(values)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + self.shortcut(values))


def _shortcut(inputs, outputs, stride):
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """18 or 50 layers, for 32x32 images (``small``) or 224x224.

    ``recompute`` puts each block into ``torch.utils.checkpoint``: ``"reentrant"`` or ``"frames"``,
    PyTorch's two ways.
    """

    def __init__(self, block, depths, width=64, classes=10, *, small=True, recompute=None):
        super().__init__()
        self.recompute = recompute
        if small:
            stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        else:
            stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            stem.append(nn.MaxPool2d(3, 2, 1))
        self.stem = nn.Sequential(*stem)
        blocks = []
        inputs = width
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage and position == 0 else 1
                blocks.append(block(inputs, width << stage, stride))
                inputs = (width << stage) * block.expansion
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images):
        values = self.stem(images)
        for block in self.blocks:
            if self.recompute:
                reentrant = self.recompute == "reentrant"
                values = checkpoint(block, values, use_reentrant=reentrant)
            else:
                values = block(values)
        return self.head(values.mean((2, 3)))


def resnet18(width=64, classes=10, **options):
    return ResNet(Block, (2, 2, 2, 2), width, classes, **options)


def resnet110(classes=10, **options):
    """The deep network for 32x32 images (He et al. 2016, section 4.2)."""
    return ResNet(Block, (18, 18, 18), 16, classes, **options)


def resnet50(width=64, classes=10, **options):
    return ResNet(Bottleneck, (3, 4, 6, 3), width, classes, **options)


def vgg16(classes=10):
    """Simonyan and Zisserman 2015, configuration D, without batch normalization."""
    layers = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout()]
    head += [nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers, *head)


def alexnet(classes=10):
    """Krizhevsky 2014, one tower."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 36, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, classes),
    )


def _double(inputs, outputs):
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv3d(channels, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet3d(nn.Module):
    """Cicek et al. 2016, three levels."""

    def __init__(self, width=16, classes=3):
        super().__init__()
        self.down = nn.ModuleList([_double(1, width), _double(width, 2 * width)])
        self.middle = _double(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose3d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose3d(2 * width, width, 2, 2),
            ]
        )
        self.merge = nn.ModuleList([_double(4 * width, 2 * width), _double(2 * width, width)])
        self.pool = nn.MaxPool3d(2)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volume):
        first = self.down[0](volume)
        second = self.down[1](self.pool(first))
        values = self.up[0](self.middle(self.pool(second)))
        values = self.merge[0](torch.cat([second, values], 1))
        values = self.merge[1](torch.cat([first, self.up[1](values)], 1))
        return self.head(values)
