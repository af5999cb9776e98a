"""JSON of which only what is asked for is made: all else is skipped, however large it is.

``json.loads`` would make every value first, thirty times as large in memory as in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from .shard_head import require

# Characters of one value that is made.
MAX_VALUE = 1 << 16
_SPACE = re.compile(r"[ \t\n\r]*")
_ITEM = re.compile(r"[\"\[\]{},]")
_BRACKET = re.compile(r"[\"\[\]{}]")
# An object without objects in it, if its quotes are even.
_PLAIN_OBJECT = re.compile(r"\{[^{}\\]*\}")
_QUOTE_OR_ESCAPE = re.compile(r"[\"\\]")
# Where a value is in a text, half-open; there may be space around it.
Span = tuple[int, int]
# A character that was found, and where.
Found = tuple[int, str]


def object_spans(text: str, names: Collection[str]) -> dict[str, Span]:
    """Where the values of some names of an object are.

    Args:
        text: JSON, all of it one object.
        names: Those that are asked for; values of others are neither made nor checked.

    Raises:
        CorruptIndex: It is not such an object, or has a name twice.
        ValueError: A name is not JSON.
    """
    spans: dict[str, Span] = {}
    for start, stop in _items(text, (0, len(text)), "{}"):
        quote = _after_space(text, start)
        require(text[quote] == '"', "expected a name in quotes")
        colon = _after_space(text, _string_stop(text, quote))
        require(text[colon] == ":", "expected ':' after a name")
        name = read_value(text, (quote, colon))
        if name in names:
            require(name not in spans, f"{name!r} is there twice")
            spans[name] = (colon + 1, stop)
    return spans


def read_value(text: str, span: Span) -> Any:
    """The value at a place.

    Raises:
        CorruptIndex: It is too long.
        ValueError: It is not JSON.
    """
    start, stop = span
    require(stop - start <= MAX_VALUE, f"expected a value of at most {MAX_VALUE} characters")
    return json.loads(text[start:stop])


def read_list(text: str, span: Span) -> Iterator[Any]:
    """The values of a list, one by one; raises as :func:`read_value`."""
    for item in _items(text, span, "[]"):
        yield read_value(text, item)


def _items(
    text: str,
    span: Span,
    brackets: str,
) -> Iterator[Span]:
    """Where the items are that commas part, between two brackets."""
    opened = _after_space(text, span[0])
    begin = text[opened : opened + 20]
    require(begin.startswith(brackets[0]), f"expected JSON in {brackets}, got {begin!r}")
    start = position = opened + 1
    while True:
        at, found = _find(_ITEM, text, position)
        if found == brackets[1]:
            break
        if found == ",":
            yield start, at
            start = position = at + 1
        else:
            require(found not in "]}", "a bracket is not closed")
            position = _value_stop(text, at)
    # A comma before the end leaves an empty item, which is not JSON.
    if start != opened + 1 or _after_space(text, start) != at:
        yield start, at
    require(_after_space(text, at + 1) == span[1], "expected nothing after the last bracket")


def _value_stop(text: str, start: int) -> int:
    """Where a string, list or object that begins here stops."""
    depth = 0
    position = start
    while True:
        at, found = _find(_BRACKET, text, position)
        plain = _plain_stop(text, at) if found == "{" else None
        if plain is not None:
            position = plain
        elif found == '"':
            position = _string_stop(text, at)
        else:
            position = at + 1
            depth += 1 if found in "[{" else -1
        if depth == 0:
            return position


def _plain_stop(text: str, start: int) -> int | None:
    """Where an object without objects stops, such as the entry of a shard: ten times faster."""
    plain = _PLAIN_OBJECT.match(text, start)
    if plain is None or text.count('"', start, plain.end()) % 2:
        return None
    return plain.end()


def _string_stop(text: str, start: int) -> int:
    position = start + 1
    while True:
        at, found = _find(_QUOTE_OR_ESCAPE, text, position)
        if found == '"':
            return at + 1
        position = at + 2


def _find(
    pattern: re.Pattern[str],
    text: str,
    start: int,
) -> Found:
    match = pattern.search(text, start)
    if match is None:
        raise ValueError("the JSON is cut")
    return match.start(), match[0]


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start
