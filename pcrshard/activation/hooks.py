"""The pack and unpack hooks that autograd calls when it saves and retrieves a tensor.

Parameters, buffers, copies of weights, and results that backward divides by are kept by reference.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ..memory import when_gone
from .codecs import Content
from .compiled import VIEWS, CompiledHooks, canonical, graph_of, kind_of, tracing
from .layout import Layout, layout_of, restore
from .noise import CONVOLUTIONS
from .options import ActivationOptions
from .report import Row

_LEAF = "torch::autograd::accumulategrad"
# Functions whose backward looks for the values that equal their result.
_EXTREMES = {"amax": torch.amax, "max": torch.amax, "amin": torch.amin, "min": torch.amin}
# Encodes a tensor, or returns None to keep it unchanged.
Encode = Callable[[Tensor, Layout, Row], Content | None]


class Ledger:
    """A counter of the current and peak bytes of live compressed tensors.

    Finalizers decrease the count, so it returns to 0 however a step ends: with the backward pass,
    an exception, or a graph that is never differentiated.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        # Garbage collection may start while this thread holds the lock.
        self._lock = threading.RLock()

    def add(self, content: Content) -> None:
        """Count a compressed tensor until it is garbage-collected."""
        self._change(content.num_bytes)
        when_gone(content, self._change, -content.num_bytes)

    def _change(self, num_bytes: int) -> None:
        with self._lock:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _Blob(NamedTuple):
    """A compressed tensor that the graph holds in place of the original."""

    content: Content
    layout: Layout
    row: Row


class _Kept(NamedTuple):
    """A tensor kept by reference, as autograd does without hooks.

    A pack hook that returns its argument disables autograd's own check for in-place changes, so
    its version is compared. The tensor is detached, because a result that referenced its own graph
    would never be freed.
    """

    detached: Tensor
    version: int

    def tensor(self) -> Tensor:
        """Return the tensor, unless it was changed in place after it was saved."""
        found = self.detached._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.detached.shape)} is at version "
                f"{found}; expected version {self.version} instead"
            )
        return self.detached


class Hooks:
    """The hooks that pack and unpack the saved tensors of one model.

    The same memory is stored once. It is identified by a weak reference to the storage, so that
    freed and reallocated memory counts as a different storage, and by the elements' places in it,
    their type, and the version. Views of the same elements share what is stored.

    Attributes:
        rows: One row for each tensor that eager code saved in the last forward pass.
        ledger: Counts the live bytes.
        graphs: The two hooks as FX GraphModules, which compiled code inlines.

    Args:
        encode: Packs flat tensors.
        options: Selects the floats to compress.
        compiled: Packs tensors in compiled code.
    """

    def __init__(self, encode: Encode, options: ActivationOptions, compiled: CompiledHooks) -> None:
        self.rows: dict[object, Row] = {}
        self.ledger = Ledger()
        # Created once, because compiled code has guards on their identity.
        self.graphs = (graph_of(self.pack), graph_of(self.unpack))
        self._compiled = compiled
        self._encode = encode
        self._options = options
        self._names: dict[nn.Module, str] = {}
        self._parameters: set[StorageWeakRef] = set()
        # The contents of rows that are compressed, while the graph holds them.
        self._contents: weakref.WeakValueDictionary[object, Content] = weakref.WeakValueDictionary()
        # A decoded tensor may be needed again immediately (by a convolution, then by the ReLU
        # before it), so the last one is cached, with its version, while its content is alive.
        self._decoded: weakref.WeakKeyDictionary[Content, tuple[Tensor, int]] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self, model: nn.Module) -> None:
        """Start a forward pass."""
        if "torch._dynamo" in sys.modules:
            # Where compiled code breaks its graph, it would compile the hooks that eager code runs.
            for graph, hook in zip(self.graphs, (self.pack, self.unpack), strict=True):
                eager: Any = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
                type(graph).__call__ = staticmethod(eager)  # type: ignore[method-assign]
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {
            _storage_of(tensor)
            for tensor in (*model.parameters(), *model.buffers())
            if not is_lazy(tensor) and tensor.layout == torch.strided
        }
        self.rows = {}
        self._contents.clear()
        self._decoded.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that the graph stores in place of a tensor."""
        context = tracing()
        if context is not None:
            return self._compiled.pack(tensor, context)
        return self._pack(tensor) or _Kept(tensor.detach(), tensor._version)

    def _pack(self, tensor: Tensor) -> _Blob | None:
        """Return the compressed tensor; ``None`` to keep it by reference."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or 0 in tensor.stride():
            return None  # a parameter, a subclass with unknown semantics, or an expanded tensor
        storage = _storage_of(tensor)
        producer = _producer(tensor)
        is_weight = tensor.requires_grad if producer is None else _operation(producer) == _LEAF
        if storage in self._parameters or is_weight:
            return None
        layout = layout_of(tensor.shape, tensor.stride())
        name, convolution = self._module_of(tensor)
        row = Row.of(name, _operation(producer), tensor)
        row.position = len(self.rows)
        # What a projection copies to a matrix has no base; the copy remembers its shape.
        sizes = getattr(tensor.grad_fn, "_saved_self_sym_sizes", tensor.shape)
        relatives = [sizes, sizes if tensor._base is None else tensor._base.shape]
        has_gradient = tensor.requires_grad or self._options.inputs
        row.kind = kind_of(row, relatives, self._options, has_gradient=has_gradient)
        key = storage, tensor.data_ptr(), layout.spans, tensor.dtype, tensor._version, row.kind
        row = self.rows.setdefault(key, row)
        if convolution is not None and convolution not in row.read_by:
            row.read_by += (convolution,)
        content = self._contents.get(key)
        # It is new, or its graph was freed but the tensor was not.
        if content is None and row.kind != "exact":
            begun = time.perf_counter()
            content = self._encode(tensor.detach(), layout, row)
            row.seconds += time.perf_counter() - begun
            if content is None:
                row.kind = "exact"
                row.error_bound = 0.0
            else:
                row.stored_bytes = content.num_bytes
                self._contents[key] = content
                # Other tensors predicted from the content may keep it alive longer than the graph.
                self.ledger.add(content)
        return None if content is None else _Blob(content, layout, row)

    def _module_of(self, tensor: Tensor) -> tuple[str, str | None]:
        """Return the innermost running module, and the convolution whose input a tensor is.

        They are found on the caller's stack, not by forward hooks, which would make
        ``torch.compile`` compile the model twice. What a convolution saves with the shape of its
        input is that input, even if autocast changed its type.
        """
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            names = frame.f_code.co_varnames
            module = frame.f_locals["self"] if names[:1] == ("self",) else None
            if isinstance(module, nn.Module) and module in self._names:
                name = self._names[module]
                values = frame.f_locals[names[1]] if isinstance(module, CONVOLUTIONS) else None
                is_input = isinstance(values, Tensor) and values.shape == tensor.shape
                return name or type(module).__name__, name if is_input else None
            frame = frame.f_back
        return "", None

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor with its original shape, order in memory, type, and device."""
        context = tracing()
        if context is not None:
            return self._compiled.unpack(kept, context)
        if isinstance(kept, _Kept):
            return kept.tensor()
        flat, version = self._decoded.get(kept.content, (None, 0))
        if flat is None or flat._version != version:
            begun = time.perf_counter()
            flat = kept.content.decode()
            kept.row.seconds += time.perf_counter() - begun
            self._decoded.clear()
            self._decoded[kept.content] = (flat, flat._version)
        values = restore(flat, kept.layout.shape, kept.layout.order)
        return _as_compared(values) if kept.row.kind == "lossy" else values


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage, which is equal for the same storage only."""
    # torch does not annotate it.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _operation(node: Any) -> str:
    """Return the canonical operation of a graph node, such as ``relu``; ``""`` without a node."""
    return "" if node is None else _named(node.name())


@functools.cache
def _named(name: str) -> str:
    return canonical(name.rstrip("0123456789").removesuffix("Backward"))


def _producer(tensor: Tensor) -> Any:
    """Return the graph node that computed a tensor's values: views and casts have no own values.

    Autocast casts weights; a linear layer transposes its weight. It is ``None`` without a graph.
    """
    node: Any = tensor.grad_fn
    while _operation(node) in VIEWS:
        node = node.next_functions[0][0]
    return node


def _as_compared(values: Tensor) -> Tensor:
    """Return restored values as the running node of the backward pass can use them.

    A maximum is where a saved tensor equals the result, which no inexact value does. The largest
    of the restored values are set to the result.

    Raises:
        RuntimeError: A function compares in another way.
    """
    node: Any = torch._C._current_autograd_node()
    name = _operation(node)
    is_norm = name == "linalgvectornorm" and math.isinf(node._saved_ord)
    if is_norm or name == "aminmax" or getattr(node, "_saved_reduce", "") in _EXTREMES:
        raise RuntimeError(
            f"{node.name()} compares a saved tensor with its result, which a compressed tensor "
            "never equals: use max(dim=) or amax, or compute it outside of `with saver:`"
        )
    result = getattr(node, "_saved_result", None) if name in _EXTREMES else None
    if result is None:  # another function, which may have the same name
        return values
    # Negative dimensions come as unsigned numbers.
    dims = [(dim + 2**63) % 2**64 - 2**63 for dim in getattr(node, "_saved_dim", ())]
    extreme = _EXTREMES[name](values, dims, keepdim=True)
    return values.where(values != extreme, result.detach().reshape(extreme.shape))
