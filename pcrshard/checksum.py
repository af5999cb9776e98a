"""Door to CRC-32C (Castagnoli, RFC 3720 appendix B.4)."""

from __future__ import annotations

from collections.abc import Callable

import crc32c as _crc32c

# crc32c(data, start_value=0) -> int; an alias, because it is called for every sample.
crc32c: Callable[..., int] = _crc32c.crc32c
