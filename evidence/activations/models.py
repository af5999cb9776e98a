"""The networks of the activation benchmarks, by hand: torchvision is not needed."""

import torch
from torch import nn
from torch.nn import functional


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


class ViT(nn.Module):
    """A vision transformer of ViT-Tiny's width, heads and, by default, depth."""

    def __init__(self, classes, size=224, patch=16, width=192, depth=12, dropout=0.0, heads=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        how = {"activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, **how)
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1)
        return self.head(self.blocks(tokens + self.positions)[:, 0])


class Block(nn.Module):
    """Causal attention and a gated MLP, each after an RMSNorm and around a shortcut."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        inner = 8 * width // 3 // 16 * 16
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def attention(self, tokens):
        batch, length, width = tokens.shape
        parts = self.qkv(tokens).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def mlp(self, tokens):
        return self.down(functional.silu(self.gate(tokens)) * self.up(tokens))

    def forward(self, tokens):
        tokens = tokens + self.drop(self.attention(self.norms[0](tokens)))
        return tokens + self.drop(self.mlp(self.norms[1](tokens)))


class GPT(nn.Module):
    """A decoder of characters."""

    def __init__(self, letters, length=64, width=128, heads=4, depth=3, dropout=0.1):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, letters, bias=False))

    def forward(self, codes):
        tokens = self.drop(self.letters(codes) + self.positions[: codes.shape[1]])
        return self.head(self.blocks(tokens))
