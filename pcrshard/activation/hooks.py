"""The pack and unpack hooks that autograd calls when it saves and retrieves a tensor.

Parameters, buffers, copies of weights, and results that backward divides by are kept by reference.
"""

from __future__ import annotations

import dataclasses
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
from .compiled import SENSITIVE, VIEWS, CompiledHooks, canonical, graph_of, tracing
from .layout import Layout, layout_of, restore, spans
from .noise import CONVOLUTIONS
from .options import ActivationOptions
from .report import Row

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


@dataclasses.dataclass
class _Seen:
    """A tensor that was saved before.

    Attributes:
        storage: Keeps the id of its storage from being used again.
        row: Its row.
        content: Returns its content if it is compressed and alive.
    """

    storage: StorageWeakRef
    row: Row
    content: Callable[[], Content | None] = lambda: None


class Hooks:
    """The hooks that pack and unpack the saved tensors of one model.

    The same memory is stored once. It is identified by the storage object, held by a weak reference
    so that freed and reallocated memory counts as a different storage, and by the elements' places
    in it, their type, and the version. Views of the same elements share what is stored.

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
        self.rows: list[Row] = []
        self.ledger = Ledger()
        # Created once, because compiled code has guards on their identity.
        self.graphs = (graph_of(self.pack), graph_of(self.unpack))
        self._compiled = compiled
        self._encode = encode
        self._options = options
        self._names: dict[nn.Module, str] = {}
        self._parameters: set[int] = set()
        self._seen: dict[object, _Seen] = {}
        # A decoded tensor may be needed again immediately (by a convolution, then by the ReLU
        # before it), so the last one is cached, with its version, while its content is alive.
        self._decoded: weakref.WeakKeyDictionary[Content, tuple[Tensor, int]] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self, model: nn.Module) -> None:
        """Start a forward pass."""
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = _parameter_storages(model)
        self.rows = []
        self._decoded.clear()

    def end(self) -> None:
        """Forget the saved tensors: their memory may be changed or freed from now on."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that the graph stores in place of a tensor."""
        saved = tracing()
        if saved is not None:
            return self._compiled.pack(tensor, saved)
        kept = _Kept(tensor.detach(), tensor._version)
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return kept  # a parameter, or a subclass with unknown semantics
        if _storage_id(tensor) in self._parameters or _is_weight(tensor):
            return kept
        layout = layout_of(tensor)
        kind = _kind_of(tensor, self._options)
        key = (
            _storage_id(tensor),
            tensor.data_ptr(),
            tuple(spans(tensor, layout)),
            tensor.dtype,
            tensor._version,
            kind,
        )
        name, convolution = self._module_of(tensor)
        if key not in self._seen:
            # torch does not annotate StorageWeakRef.
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            function = "" if tensor.grad_fn is None else _operation(tensor.grad_fn)
            row = Row.of(name, function, kind, tensor)
            row.position = len(self.rows)
            self.rows.append(row)
            self._seen[key] = _Seen(storage, row)
        seen = self._seen[key]
        row = seen.row
        if convolution is not None and convolution not in row.read_by:
            row.read_by += (convolution,)
        content = seen.content()
        # It is new, or its graph was freed but the tensor was not.
        if content is None and row.kind != "exact":
            content = self._make(tensor.detach(), layout, row)
        if content is None:
            return kept
        seen.content = weakref.ref(content)
        return _Blob(content, layout, row)

    def _module_of(self, tensor: Tensor) -> tuple[str, str | None]:
        """Return the innermost running module, and the convolution whose input a tensor is.

        They are found on the caller's stack, not by forward hooks, which would make
        ``torch.compile`` compile the model twice. What a convolution saves with the shape of its
        input is that input, even if autocast changed its type.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            module = frame.f_locals.get("self") if arguments[:1] == ("self",) else None
            if isinstance(module, nn.Module) and module in self._names:
                name = self._names[module]
                values = None
                if isinstance(module, CONVOLUTIONS) and len(arguments) > 1:
                    values = frame.f_locals[arguments[1]]
                is_input = isinstance(values, Tensor) and values.shape == tensor.shape
                return name or type(module).__name__, name if is_input else None
            frame = frame.f_back
        return "", None

    @torch.no_grad()
    def _make(self, tensor: Tensor, layout: Layout, row: Row) -> Content | None:
        begun = time.perf_counter()
        content = self._encode(tensor, layout, row)
        row.seconds += time.perf_counter() - begun
        if content is None:
            row.kind = "exact"
            row.error_bound = 0.0
            return None
        row.stored_bytes = content.num_bytes
        # Other tensors predicted from the content may keep it alive longer than the graph.
        self.ledger.add(content)
        return content

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor with its original shape, order in memory, type, and device."""
        saved = tracing()
        if saved is not None:
            return self._compiled.unpack(kept, saved)
        if isinstance(kept, _Kept):
            return kept.tensor()
        flat, version = self._decoded.get(kept.content, (None, 0))
        if flat is None or flat._version != version:
            begun = time.perf_counter()
            with torch.no_grad():
                flat = kept.content.decode()
            kept.row.seconds += time.perf_counter() - begun
            self._decoded.clear()
            self._decoded[kept.content] = (flat, flat._version)
        return restore(flat, kept.layout)


def _kind_of(tensor: Tensor, options: ActivationOptions) -> str:
    """Return how a tensor may be stored: ``lossy``, ``lossless``, or ``exact``."""
    is_expanded = 0 in tensor.stride()
    if tensor.nbytes < max(options.min_bytes, 1) or tensor.dtype.is_complex or is_expanded:
        return "exact"
    if not tensor.dtype.is_floating_point or not (tensor.requires_grad or options.inputs):
        return "lossless"  # integers, masks; inputs and statistics, which are seldom smaller
    if tensor.grad_fn is not None and canonical(_operation(tensor.grad_fn)) in SENSITIVE:
        return "exact"
    if tensor.dim() >= options.min_dims:
        return "lossy"
    # Flattened features of a classifier have one row per sample; tokens have more.
    base = tensor._base
    if base is None or tensor.dim() < 2 or base.dim() < options.min_dims:
        return "lossless"
    return "lossy" if base.shape[0] < tensor.shape[0] else "lossless"


def _storage_id(tensor: Tensor) -> int:
    """Return an id of the tensor's storage, unique while a weak reference to it is held."""
    return int(tensor.untyped_storage()._cdata)


def _parameter_storages(model: nn.Module) -> set[int]:
    """Return the storages of a model's parameters and buffers."""
    storages = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            continue  # uninitialized, in a lazy module
        local = getattr(tensor, "_local_tensor", tensor)  # local part of a DTensor
        if local.layout == torch.strided and local.device.type != "meta":
            storages.add(_storage_id(local))
    return storages


def _operation(node: Any) -> str:
    """Return the operation of a graph node: ``Relu`` for ``ReluBackward0``."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of the graph, or a view or a cast of one.

    Autocast copies weights; a linear layer transposes its weight.
    """
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and canonical(_operation(node)) in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and _operation(node).endswith("AccumulateGrad")
