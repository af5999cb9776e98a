"""The two functions that autograd calls: for a tensor that it saves, and when it wants it back.

Parameters, buffers, copies of weights and results that divide are kept by reference.
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

# Gives the content of a flat tensor at a position, or None if it is to be kept as it is.
Encode = Callable[[Tensor, Layout, int, Row], Content | None]
_Key = tuple[object, ...]
# Steps from a saved tensor to the parameter that it is a view or a copy of. Autocast's copies of
# the weights come by ToCopyBackward, a linear layer's transposed weight by TBackward.
_VIEWS = {
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice",
    "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
# Results whose own backward divides by them or compares their small differences.
_SENSITIVE = {"Exp", "LogSoftmax", "Reciprocal", "Rsqrt", "Softmax", "Sqrt"}


@dataclasses.dataclass
class _Seen:
    """A tensor that was saved before: its storage, what is kept, its row's position."""

    storage: StorageWeakRef
    kept: weakref.ref[Blob] | None
    ordinal: int

    def is_gone(self) -> bool:
        """Whether the memory was freed, and may be another tensor's now."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Hooks:
    """Packs and unpacks the tensors of one model.

    The same memory is kept once. Its name is the storage itself, held by a weak reference, so that
    memory that was freed and taken again is another storage; and offset, shape, strides, type and
    version, so that a view, a transpose, or the same memory after a change in place are others.

    Attributes:
        rows: What became of each tensor that eager code saved in the last forward pass.
        trace: Finds the modules that save; ``None`` if they are known.
        graphs: The two functions as FX GraphModules, which compiled code inlines.

    Args:
        encode: Packs flat tensors.
        ledger: Counts bytes.
        options: Which floats may be changed.
        compiled: Packs in compiled code; ``None`` if nothing is packed there.
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
        # Made once: compiled code is guarded by their identity.
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
        """Forget the tensors that were seen: their memory may be changed or freed from now on."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Any:
        """What the graph is to hold in place of a tensor."""
        saved = tracing()
        if saved is not None:
            return tensor if self._compiled is None else self._compiled.pack(tensor, saved)
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return Kept(tensor)  # a parameter, or a subclass of unknown meaning
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
        # The blob may be gone: its graph was freed, the tensor was not.
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
        # Others may be predicted from the content, and keep it for longer than the blob.
        self._ledger.add(content, content.num_bytes)
        return Blob(content, layout, row)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor; a decoded one is at hand until another one is."""
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
        """Release the tensor that was decoded last."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.forget()
        self._latest = None


def kind_of(tensor: Tensor, options: ActivationOptions) -> str:
    """How a tensor may be kept: ``lossy``, ``lossless`` or ``exact``."""
    if tensor.nbytes < options.min_bytes or tensor.dtype.is_complex:
        return "exact"
    if not tensor.dtype.is_floating_point or not (tensor.requires_grad or options.inputs):
        return "lossless"  # integers, masks; inputs and statistics, which are seldom smaller
    if tensor.grad_fn is not None and _operation(tensor.grad_fn) in _SENSITIVE:
        return "exact"
    if tensor.dim() >= options.min_dims:
        return "lossy"
    # A classifier's flattened features have as many rows as the batch has samples, tokens more.
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
    """A name of the tensor's storage, unique while a weak reference to it is held."""
    return int(tensor.untyped_storage()._cdata)


def parameter_storages(model: nn.Module) -> set[int]:
    """The storages of a model's parameters and buffers."""
    storages = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            continue  # of a lazy module; it has no memory yet
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if local.layout == torch.strided and local.device.type != "meta":
            storages.add(storage_id(local))
    return storages


def _operation(node: Any) -> str:
    """The operation of a node of the graph: ``Relu`` of ``ReluBackward0``."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf of the graph, or a view or a cast of one."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and _operation(node) in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and _operation(node).endswith("AccumulateGrad")
