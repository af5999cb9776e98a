"""What becomes of one-byte codes: kept as they are, packed into bits, or compressed."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import zstd
from . import bits

CodecName = Literal["zstd", "predicted", "bits", "int8", "none"]
Payload = tuple[Tensor | bytes | bool, ...]


class Codec(Protocol):
    """Lossless coding of (n,) int8 codes and of raw bytes."""

    name: CodecName

    def encode(self, codes: Tensor) -> Payload:
        """Makes codes smaller."""
        ...

    def decode(self, payload: Payload, count: int, device: torch.device) -> Tensor:
        """The (count,) int8 codes, on the device."""
        ...


def payload_bytes(payload: Payload) -> int:
    """Bytes of memory that a payload holds."""
    total = 0
    for part in payload:
        if isinstance(part, Tensor):
            total += part.nbytes
        elif isinstance(part, bytes):
            total += len(part)
    return total


class Int8:
    """Codes as they are: 4 times less than float32, at the speed of memory, on any device."""

    name: CodecName = "int8"

    def encode(self, codes: Tensor) -> Payload:
        """Keeps the codes."""
        return (codes,)

    def decode(self, payload: Payload, count: int, device: torch.device) -> Tensor:
        """The codes."""
        (codes,) = payload
        assert isinstance(codes, Tensor)
        return codes


class Bits:
    """Blocks of 64 codes in as many bits as they need, by PyTorch operations on any device."""

    name: CodecName = "bits"

    def encode(self, codes: Tensor) -> Payload:
        """Packs the codes; see :func:`pcrshard.activation.bits.pack`."""
        return bits.pack(codes)

    def decode(self, payload: Payload, count: int, device: torch.device) -> Tensor:
        """Unpacks the codes."""
        data, widths, signed = payload
        assert isinstance(data, Tensor)
        assert isinstance(widths, Tensor)
        assert isinstance(signed, bool)
        return bits.unpack(data, widths, signed, count)


class Zstd:
    """Zstandard at level 1, on the CPU: the smallest. From another device codes are copied here."""

    name: CodecName = "zstd"

    def encode(self, codes: Tensor) -> Payload:
        """Compresses the codes."""
        return (zstd.compress_codes(codes.cpu().numpy()),)

    def decode(self, payload: Payload, count: int, device: torch.device) -> Tensor:
        """Decompresses the codes."""
        (data,) = payload
        assert isinstance(data, bytes)
        # A copy, because a tensor must not share the memory of an immutable object.
        codes = np.frombuffer(zstd.decompress(data, count), np.int8).copy()
        return torch.from_numpy(codes).to(device)


class Predicted(Zstd):
    """The same, of what :class:`~.stored.Predictor` leaves of the codes."""

    name: CodecName = "predicted"


class Offloaded:
    """Another codec, whose results wait in the host's memory: compression with migration.

    What crosses the bus is the codec's result, a fraction of the tensor. Copies block; on a CPU
    there are none.

    Args:
        codec: What makes codes smaller, on the device.
    """

    def __init__(self, codec: Codec) -> None:
        self.name = codec.name
        self._codec = codec

    def encode(self, codes: Tensor) -> Payload:
        """Codes them and copies the result to the host."""
        payload = self._codec.encode(codes)
        return tuple(part.cpu() if isinstance(part, Tensor) else part for part in payload)

    def decode(self, payload: Payload, count: int, device: torch.device) -> Tensor:
        """Copies the result back and decodes it."""
        back = (part.to(device) if isinstance(part, Tensor) else part for part in payload)
        return self._codec.decode(tuple(back), count, device)


def make_codec(name: str, *, offload: bool = False) -> Codec | None:
    """The codec of a name; ``None`` for ``none``, which only counts.

    Args:
        name: ``zstd``, ``predicted``, ``bits``, ``int8`` or ``none``.
        offload: Whether its results are to wait in the host's memory.

    Raises:
        ValueError: There is none of that name.
    """
    codecs: dict[str, type[Int8 | Bits | Zstd]] = {
        "zstd": Zstd,
        "predicted": Predicted,
        "bits": Bits,
        "int8": Int8,
    }
    if name == "none":
        return None
    if name not in codecs:
        raise ValueError(f"expected a codec of zstd, predicted, bits, int8 and none, got {name!r}")
    codec = codecs[name]()
    return Offloaded(codec) if offload else codec
