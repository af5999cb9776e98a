"""The networks of the activation benchmarks, by hand: torchvision is not needed."""

from torch import nn
from torch.utils.checkpoint import checkpoint
from training.models import Bottleneck, Residual, conv


class ResNet(nn.Module):
    """18 or 50 layers, for 32x32 images (``small``) or 224x224.

    ``recompute`` puts each block into ``torch.utils.checkpoint``: ``"reentrant"`` or ``"frames"``,
    PyTorch's two ways.
    """

    def __init__(self, block, depths, width=64, classes=10, *, small=True, recompute=None):
        super().__init__()
        self.recompute = recompute
        self.stem = (
            conv(3, width) if small else nn.Sequential(conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        )
        blocks = []
        inputs = width
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage and position == 0 else 1
                blocks.append(block(inputs, width << stage, stride))
                inputs = (width << stage) * (4 if block is Bottleneck else 1)
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
    return ResNet(Residual, (2, 2, 2, 2), width, classes, **options)


def resnet110(classes=10, **options):
    """The deep network for 32x32 images (He et al. 2016, section 4.2)."""
    return ResNet(Residual, (18, 18, 18), 16, classes, **options)


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
