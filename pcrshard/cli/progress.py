"""Progress of a command: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Self

from tqdm import tqdm


@dataclass(eq=False)
class ProgressBar:
    """A progress bar on a terminal, or a log line every few seconds elsewhere.

    Attributes:
        name: The command.
        unit: Unit of the counts, in the plural.
        log_seconds: Seconds between two log lines.
        done: Units done as of the latest call.
        bar: The bar, or ``None`` before it is created.
        started: Creation time.
        logged: Time of the latest log line.
    """

    name: str
    unit: str
    log_seconds: float = 5.0
    done: int = 0
    bar: Any = None
    started: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Report progress."""
        if sys.stderr.isatty():
            self._draw(done, total)
        elif time.monotonic() - self.logged > self.log_seconds:
            self._log(done, total)
        self.done = done

    def _draw(self, done: int, total: int) -> None:
        if self.bar is None:
            self.bar = tqdm(
                desc=self.name,
                total=total,
                unit=f" {self.unit}",
                smoothing=0.1,
            )
        self.bar.update(done - self.done)

    def _log(self, done: int, total: int) -> None:
        self.logged = time.monotonic()
        rate = done / (self.logged - self.started)
        left = human_seconds((total - done) / rate) if rate else "?"
        counted = f"{done}/{total} {self.unit}, {human_rate(rate)} {self.unit}/s"
        print(f"{self.name}: {counted}, {left} left", file=sys.stderr)


def human_rate(rate: float) -> str:
    """Format a rate for people; slow rates keep two digits instead of rounding to 0.

    >>> human_rate(1234.5), human_rate(9.94), human_rate(0.185)
    ('1234', '9.9', '0.18')
    """
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def human_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> human_seconds(59), human_seconds(3700)
    ('59 s', '1 h 2 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
