"""Work on large tensors: on a CPU in blocks, on several threads; elsewhere in fused kernels."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..memory import allocate

S = TypeVar("S")
T = TypeVar("T")

CORE_DEVICE = "cpu"
# What PyTorch compiles for accelerators with.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
# As long as a block of Zstandard.
_LEAST = 1 << 17
# The C library maps larger memory again for each tensor, and the system clears it page by page.
# Huge pages take a fifth of the time.
_LARGE = 1 << 25
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# What compilers make of ``#pragma omp parallel``; found if PyTorch loaded OpenMP.
_parallel: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
_ADDRESS = ctypes.cast(_parallel, ctypes.c_void_p).value or 0


def has_core(device: torch.device) -> bool:
    """Return whether the native core works on a device; elsewhere, PyTorch operations do."""
    return device.type == CORE_DEVICE


def team() -> tuple[int, int]:
    """Return PyTorch's threads as the native core takes them."""
    return _ADDRESS, torch.get_num_threads()


def blocks_of(count: int) -> list[slice]:
    """Return a block of (count,) elements for each thread, all equally long."""
    number = min(max(count // _LEAST, 1), torch.get_num_threads())
    size = -(-count // number)
    return [slice(start, start + size) for start in range(0, count, size)]


def share(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Return ``work(item)`` of each item, in order.

    The items are shared among PyTorch's own threads, which wait actively for some milliseconds
    after each operation, so that other threads would not get their processors. Where PyTorch does
    not use OpenMP, this thread does all the work.

    Args:
        work: Must release the GIL to gain from it, and must not use PyTorch.
        items: What to work on.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2 or _parallel is None:
        return [work(item) for item in items]
    waiting = iter(enumerate(items))
    done: dict[int, T] = {}
    errors: list[BaseException] = []

    def take(_: object) -> None:
        try:
            for place, item in waiting:
                done[place] = work(item)
        except BaseException as error:  # raised below, because OpenMP would drop it
            errors.append(error)

    _parallel(_TASK(take), None, threads, 0)
    for error in errors:
        raise error
    return [done[place] for place in range(len(items))]


def empty_floats(count: int, dtype: torch.dtype) -> Tensor:
    """Return (count,) floats of any value."""
    num_bytes = count * dtype.itemsize
    if num_bytes < _LARGE:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(allocate(num_bytes), dtype=dtype, count=count)


def fused(function: Callable[..., T], device: torch.device, *constants: Any) -> Callable[..., T]:
    """Return a function of tensors and sizes, on an accelerator as a few fused kernels.

    There, separate operations would take many times as long, and several times the memory of their
    result. The first call takes seconds.

    Args:
        function: Takes the constants, then tensors of any size, and numbers.
        device: Where the tensors are.
        constants: Hashable arguments.
    """
    if has_core(device) or not _HAS_TRITON:
        return functools.partial(function, *constants)
    return _compiled(function, constants)


@functools.cache
def _compiled(function: Callable[..., T], constants: tuple[Any, ...]) -> Callable[..., T]:
    def call(*arguments: Any) -> T:
        return function(*constants, *arguments)

    # The compiler caches a few variants of each code object, and takes numbers that differ between
    # objects of one name for variables.
    call.__code__ = call.__code__.replace(co_name=f"{function.__name__}{constants}")
    compiled = torch.compile(call)

    def of_any_size(*arguments: Any) -> T:
        for tensor in filter(torch.is_tensor, arguments):
            # Bit planes have the same number of columns always.
            for dim in range(1 if tensor.dim() == 2 else tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return compiled(*arguments)

    return of_any_size
