"""CRC-32C (Castagnoli), by the native core."""

from .native.pieces import crc32c

__all__ = ["crc32c"]
