"""Lossless coding of one-byte codes: stored, bit-packed, or compressed."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from .. import zstd
from . import bits

CodecName = Literal["zstd", "predicted", "bits", "int8", "none"]
Payload = tuple[Tensor | bytes, ...]


@dataclasses.dataclass(frozen=True)
class Codec:
    """A lossless coder of (n,) int8 codes and of raw bytes.

    Attributes:
        name: ``int8`` stores codes unchanged and ``bits`` packs each block of 64 to its bit width,
            both on any device. ``zstd`` and ``predicted`` compress on the CPU. ``none`` disables
            compression.
        offload: Whether to keep results in host memory; copies are synchronous.

    Raises:
        ValueError: The codec name is unknown.
    """

    name: CodecName
    offload: bool = False

    def __post_init__(self) -> None:
        if self.name not in get_args(CodecName):
            raise ValueError(f"expected a codec of {get_args(CodecName)}, got {self.name!r}")

    @property
    def is_zstd(self) -> bool:
        """Whether results are Zstandard frames."""
        return self.name in ("zstd", "predicted")

    def encode(self, codes: Tensor) -> Payload:
        """Encode (n,) int8 codes."""
        if self.is_zstd:
            return (zstd.compress_codes(codes.cpu().numpy()),)
        payload = bits.pack(codes) if self.name == "bits" else (codes,)
        return tuple(part.cpu() for part in payload) if self.offload else payload

    def decode(self, payload: Payload, count: int, device: torch.device) -> Tensor:
        """Decode (count,) int8 codes onto a device."""
        if self.is_zstd:
            (frame,) = payload
            # Copied, because a tensor must not share the memory of an immutable object.
            codes = np.frombuffer(zstd.decompress(frame, count), np.int8).copy()
            return torch.from_numpy(codes).to(device)
        parts = [part.to(device) for part in payload if isinstance(part, Tensor)]
        return bits.unpack(parts[0], parts[1], count) if self.name == "bits" else parts[0]


def payload_bytes(payload: Payload) -> int:
    """Return the size of a payload in bytes."""
    return sum(part.nbytes if isinstance(part, Tensor) else len(part) for part in payload)
