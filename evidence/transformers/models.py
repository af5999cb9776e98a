"""A vision transformer and a small GPT, of the parts that today's models are made of."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head attention by ``scaled_dot_product_attention``."""

    def __init__(self, width, heads, *, causal=False, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens):
        batch, length, width = tokens.shape
        parts = self.qkv(tokens).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class GeluMLP(nn.Sequential):
    """Two linear layers with GELU between them."""

    def __init__(self, width, dropout=0.0):
        super().__init__(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )


class SwiGLU(nn.Module):
    """The gated MLP of LLaMA."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        inner = 8 * width // 3 // 16 * 16
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens):
        return self.drop(self.down(functional.silu(self.gate(tokens)) * self.up(tokens)))


class Block(nn.Module):
    """Attention and MLP, each after a normalization and around a shortcut."""

    def __init__(self, norm, attention, norm_of_mlp, mlp):
        super().__init__()
        self.norm1 = norm
        self.attention = attention
        self.norm2 = norm_of_mlp
        self.mlp = mlp

    def forward(self, tokens):
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class ViT(nn.Module):
    """A vision transformer; by default ViT-Tiny: width 192, 3 heads, 12 blocks, patches of 16."""

    def __init__(self, classes, size=224, patch=16, width=192, heads=3, depth=12, dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(
                    nn.LayerNorm(width),
                    Attention(width, heads, dropout=dropout),
                    nn.LayerNorm(width),
                    GeluMLP(width, dropout),
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1)
        tokens = self.blocks(self.drop(tokens + self.positions))
        return self.head(self.norm(tokens[:, 0]))


class GPT(nn.Module):
    """A decoder of characters: embeddings, RMSNorm, causal attention, SwiGLU, dropout."""

    def __init__(self, letters, length=64, width=128, heads=4, depth=3, dropout=0.1):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(
                    nn.RMSNorm(width),
                    Attention(width, heads, causal=True, dropout=dropout),
                    nn.RMSNorm(width),
                    SwiGLU(width, dropout),
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, codes):
        positions = torch.arange(codes.shape[1], device=codes.device)
        tokens = self.drop(self.letters(codes) + self.positions(positions))
        return self.head(self.norm(self.blocks(tokens)))
