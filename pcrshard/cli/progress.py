"""Progress of a command: a bar on a terminal, a line every half minute in a log file."""

from __future__ import annotations

import sys
from typing import Any, Self

from tqdm import tqdm

_LOG_LINE = "{desc}: {n_fmt}/{total_fmt}{unit}, {rate_fmt}, {remaining} left\n"


class ProgressBar:
    """A progress bar on a terminal, or a log line every half minute elsewhere.

    Args:
        name: The command.
        unit: Unit of the counts, in the plural.
        log_seconds: Seconds between two log lines.
    """

    def __init__(self, name: str, unit: str, log_seconds: float = 30.0) -> None:
        log: dict[str, Any] = {
            "mininterval": log_seconds,
            "delay": log_seconds,
            "bar_format": _LOG_LINE,
            "leave": False,
        }
        how = {} if sys.stderr.isatty() else log
        self._bar = tqdm(desc=name, unit=f" {unit}", file=sys.stderr, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Report progress."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
