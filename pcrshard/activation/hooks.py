"""The pack and unpack hooks that autograd calls when it saves and retrieves a tensor.

Parameters, buffers, copies of weights, and results that backward divides by are kept by reference.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from .compiled import CompiledHooks, graph_of, tracing
from .layout import Layout, flatten, layout_of
from .options import ActivationOptions
from .stored import Blob, Content, Kept, Ledger, Row
from .trace import Trace

# Encodes the flat tensor at a position; returns None to keep the tensor unchanged.
Encode = Callable[[Tensor, Layout, int, Row], Content | None]
_Key = tuple[object, ...]
# Graph nodes between a saved tensor and the parameter of which it is a view or a copy. Autocast
# copies weights by ToCopyBackward; a linear layer transposes its weight by TBackward.
_VIEWS = {
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice",
    "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
# Results whose own backward divides by them or depends on their small differences.
_SENSITIVE = {"Exp", "LogSoftmax", "Reciprocal", "Rsqrt", "Softmax", "Sqrt"}


@dataclasses.dataclass
class _Seen:
    """A tensor that was saved before: its storage, stored form, and row index."""

    storage: StorageWeakRef
    kept: weakref.ref[Blob] | None
    ordinal: int

    def is_gone(self) -> bool:
        """Whether the memory was freed and may now belong to another tensor."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Hooks:
    """The hooks that pack and unpack the saved tensors of one model.

    The same memory is stored once. It is identified by the storage object, held by a weak reference
    so that freed and reallocated memory counts as a different storage, and by the offset, shape,
    strides, type, and version, so that views, transposes, and in-place changes are distinguished.

    Attributes:
        rows: One row for each tensor that eager code saved in the last forward pass.
        trace: Finds the modules that save tensors; ``None`` if they are known.
        graphs: The two hooks as FX GraphModules, which compiled code inlines.

    Args:
        encode: Packs flat tensors.
        ledger: Counts bytes.
        options: Selects the floats to compress.
        compiled: Packs tensors in compiled code; ``None`` to pack nothing there.
    """

    def __init__(
        self,
        encode: Encode,
        ledger: Ledger,
        options: ActivationOptions,
        compiled: CompiledHooks | None,
    ) -> None:
        self.rows: list[Row] = []
        self.trace: Trace | None = None
        # Created once, because compiled code has guards on their identity.
        self.graphs = (graph_of(self.pack), graph_of(self.unpack))
        self._compiled = compiled
        self._encode = encode
        self._ledger = ledger
        self._options = options
        self._parameters: set[int] = set()
        self._seen: dict[_Key, _Seen] = {}
        self._latest: weakref.ref[Blob] | None = None

    def begin(self, model: nn.Module) -> None:
        """Start a forward pass."""
        self._parameters = parameter_storages(model)
        self.rows = []
        self.forget()

    def end(self) -> None:
        """Forget the saved tensors: their memory may be changed or freed from now on."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that the graph stores in place of a tensor."""
        saved = tracing()
        if saved is not None:
            return tensor if self._compiled is None else self._compiled.pack(tensor, saved)
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return Kept(tensor)  # a parameter, or a subclass with unknown semantics
        if storage_id(tensor) in self._parameters or is_weight(tensor):
            return Kept(tensor)
        key = _key(tensor)
        seen = self._seen.get(key)
        is_first = seen is None or seen.is_gone()
        ordinal = len(self.rows) if seen is None or is_first else seen.ordinal
        name = self.trace.saves(tensor, ordinal) if self.trace is not None else ""
        if seen is None or is_first:
            self.rows.append(_row(tensor, name))
        elif seen.kept is None:
            return Kept(tensor)
        # The blob may be gone if the graph was freed but the tensor was not.
        elif (known := seen.kept()) is not None:
            return known
        blob = self._make(tensor, ordinal)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._seen[key] = _Seen(storage, None if blob is None else weakref.ref(blob), ordinal)
        return Kept(tensor) if blob is None else blob

    @torch.no_grad()
    def _make(self, tensor: Tensor, ordinal: int) -> Blob | None:
        layout = layout_of(tensor)
        kind = kind_of(tensor, self._options)
        if layout is None or kind == "exact":
            return None
        row = self.rows[ordinal]
        row.kind = kind
        begun = time.perf_counter()
        content = self._encode(flatten(tensor.detach(), layout), layout, ordinal, row)
        row.encode_seconds += time.perf_counter() - begun
        if content is None:
            row.kind = "exact"
            row.error_bound = 0.0
            return None
        row.stored_bytes = content.num_bytes
        # Other tensors predicted from the content may keep it alive longer than the blob.
        self._ledger.add(content, content.num_bytes)
        return Blob(content, layout, row)

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor, caching the last one decoded."""
        saved = tracing()
        if saved is not None:
            return kept if self._compiled is None else self._compiled.unpack(kept, saved)
        if isinstance(kept, Blob):
            latest = None if self._latest is None else self._latest()
            if latest is not None and latest is not kept:
                latest.forget()
            self._latest = weakref.ref(kept)
        tensor: Tensor = kept.tensor()
        return tensor

    def forget(self) -> None:
        """Release the last decoded tensor."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.forget()
        self._latest = None


def kind_of(tensor: Tensor, options: ActivationOptions) -> str:
    """Return how a tensor may be stored: ``lossy``, ``lossless``, or ``exact``."""
    if tensor.nbytes < options.min_bytes or tensor.dtype.is_complex:
        return "exact"
    if not tensor.dtype.is_floating_point or not (tensor.requires_grad or options.inputs):
        return "lossless"  # integers, masks; inputs and statistics, which are seldom smaller
    if tensor.grad_fn is not None and _operation(tensor.grad_fn) in _SENSITIVE:
        return "exact"
    if tensor.dim() >= options.min_dims:
        return "lossy"
    # Flattened features of a classifier have one row per sample; tokens have more.
    base = tensor._base
    if base is None or tensor.dim() < 2 or base.dim() < options.min_dims:
        return "lossless"
    return "lossy" if base.shape[0] < tensor.shape[0] else "lossless"


def _row(tensor: Tensor, name: str) -> Row:
    function = "" if tensor.grad_fn is None else _operation(tensor.grad_fn)
    shape = tuple(tensor.shape)
    return Row(name, function, "exact", shape, tensor.dtype, tensor.nbytes, tensor.nbytes)


def _key(tensor: Tensor) -> _Key:
    return (
        storage_id(tensor),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor._version,
        tensor.requires_grad,
    )


def storage_id(tensor: Tensor) -> int:
    """Return an id of the tensor's storage, unique while a weak reference to it is held."""
    return int(tensor.untyped_storage()._cdata)


def parameter_storages(model: nn.Module) -> set[int]:
    """Return the storages of a model's parameters and buffers."""
    storages = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            continue  # uninitialized, in a lazy module
        local = getattr(tensor, "_local_tensor", tensor)  # local part of a DTensor
        if local.layout == torch.strided and local.device.type != "meta":
            storages.add(storage_id(local))
    return storages


def _operation(node: Any) -> str:
    """Return the operation of a graph node: ``Relu`` for ``ReluBackward0``."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of the graph, or a view or a cast of one."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and _operation(node) in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and _operation(node).endswith("AccumulateGrad")
