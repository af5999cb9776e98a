"""Check the arguments of public calls against their annotations, for uniform errors."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
    os.PathLike: "a path",
    collections.abc.Callable: "a function",
    collections.abc.Sequence: "a sequence",
    collections.abc.Iterable: "a sequence",
    collections.abc.Mapping: "a dict",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B")


class Least(NamedTuple):
    """The smallest value of an annotated number."""

    value: float

    def __str__(self) -> str:
        return f"a whole number of at least {self.value}"


Natural = Annotated[int, Least(0)]
Positive = Annotated[int, Least(1)]
ByteSize = Annotated[int | str, "a positive number of bytes, or a size such as '50GB'"]


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a value is an int or a NumPy integer, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def num_bytes(name: str, size: int | str) -> int:
    """Return the number of bytes of a size.

    Raises:
        ValueError: The value is not a size, or not positive.

    >>> num_bytes("cache_bytes", "50GB"), num_bytes("cache_bytes", "1.5 GiB")
    (50000000000, 1610612736)
    """
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        number, prefix, binary = found.groups()
        base = 1024 if binary else 1000
        size = int(float(number) * base ** " KMGT".index(prefix.upper() or " "))
    if isinstance(size, str) or size < 1:
        raise ValueError(f"expected {name} to be {_describe(ByteSize)}, got {size!r}")
    return int(size)


def checked(**elsewhere: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks a function's arguments against its annotations.

    Errors describe a type annotated with a string by that string; a number annotated with
    :class:`Least` has a lower bound.

    Args:
        elsewhere: Replacements for arguments of other libraries or versions.

    Raises:
        TypeError: An argument is unknown, missing or of another type.
        ValueError: An argument is out of range.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _refuse_unknown(signature, kwargs, elsewhere)
            _check(_hints(function), signature.bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return call

    return decorate


def check_fields(instance: object) -> None:
    """Check the attributes of a dataclass against their annotations.

    Raises:
        TypeError: An attribute is of another type.
        ValueError: An attribute is out of range.
    """
    kind: Any = type(instance)
    _check(_hints(kind), vars(instance))


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def _refuse_unknown(
    signature: inspect.Signature,
    given: Mapping[str, Any],
    elsewhere: Mapping[str, str],
) -> None:
    known = list(signature.parameters)
    for name in given:
        if name not in known:
            near = elsewhere.get(name) or next(iter(difflib.get_close_matches(name, known)), None)
            hint = f"use {near}" if near else f"there are {', '.join(known[1:])}"
            raise TypeError(f"unexpected argument {name!r}; {hint}")


def _check(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        hint = hints.get(name, Any)
        if not _accepts(hint, value):
            error = ValueError if _accepts(hint, value, kind_only=True) else TypeError
            raise error(f"expected {name} to be {_describe(hint)}, got {value!r}")


def _accepts(hint: Any, value: Any, *, kind_only: bool = False) -> bool:
    """Tell whether an annotation allows a value; with ``kind_only`` any value of the same type."""
    origin = get_origin(hint)
    parts = get_args(hint)
    accepts = functools.partial(_accepts, kind_only=kind_only)
    if origin is Annotated:
        least = [extra.value for extra in parts[1:] if isinstance(extra, Least)]
        found = accepts(parts[0], value) and (kind_only or all(value >= each for each in least))
    elif origin in (Union, types.UnionType):
        found = any(accepts(part, value) for part in parts)
    elif origin is Literal:
        kinds = set(map(type, parts))
        found = type(value) in kinds and (kind_only or value in parts)
    elif hint in (int, float):
        found = is_integer(value) or (hint is float and isinstance(value, float | np.floating))
    elif origin is tuple:
        is_tuple = isinstance(value, tuple | list) and len(value) == len(parts)
        found = is_tuple and all(map(accepts, parts, value))
    elif origin is collections.abc.Sequence:
        # Arrays and tensors are sequences of no registered kind.
        is_sequence = hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)
        found = is_sequence and all(accepts(parts[0], each) for each in value)
    else:
        kind = origin or hint
        found = kind is Any or not isinstance(kind, type) or isinstance(value, kind)
    return found


def _describe(hint: Any) -> str:
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return str(parts[-1])
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_describe, parts)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, parts))
    kind = get_origin(hint) or hint
    return _NAMES.get(kind) or f"of type {kind.__name__}"
