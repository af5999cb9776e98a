"""The two functions that autograd calls: for a tensor that it saves, and when it wants it back.

What must never be changed is kept: parameters, buffers, copies of weights, small differences.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from .layout import Layout, flatten, layout_of
from .stored import Blob, Content, Kept, Ledger, Row
from .trace import Trace

# Gives the content of a flat tensor at a position, or None if it is to be kept as it is.
Encode = Callable[[Tensor, Layout, int, Row], Content | None]
_Key = tuple[object, ...]
# Steps from a saved tensor to the parameter that it is a view or a copy of. Autocast's copies of
# the weights come by ToCopyBackward, a linear layer's transposed weight by TBackward.
_VIEWS = {
    "AliasBackward", "AsStridedBackward", "CloneBackward", "ExpandBackward", "PermuteBackward",
    "ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SqueezeBackward", "TBackward",
    "ToCopyBackward", "TransposeBackward", "UnsafeViewBackward", "UnsqueezeBackward",
    "ViewBackward",
}  # fmt: skip
# Results whose own backward divides by them or compares their small differences.
_SENSITIVE = {
    "ExpBackward", "LogSoftmaxBackward", "ReciprocalBackward", "RsqrtBackward", "SoftmaxBackward",
    "SqrtBackward",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which floats may be changed.

    Attributes:
        min_bytes: Smaller tensors are exact.
        min_dims: Those of fewer dimensions are, too: logits, features of linear layers.
        inputs: Whether floats without gradient may be changed, too: images, above all.
    """

    min_bytes: int = 16_384
    min_dims: int = 3
    inputs: bool = False


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

    Args:
        encode: Makes tensors small.
        ledger: Counts bytes.
        limits: Which floats may be changed.
    """

    def __init__(self, encode: Encode, ledger: Ledger, limits: Limits) -> None:
        self.rows: list[Row] = []
        self.trace: Trace | None = None
        self.saw_compiled = False
        self._encode = encode
        self._ledger = ledger
        self._limits = limits
        self._parameters: set[int] = set()
        self._seen: dict[_Key, _Seen] = {}
        self._latest: weakref.ref[Blob] | None = None

    def begin(self, parameters: set[int]) -> None:
        """Starts a forward pass."""
        self._parameters = parameters
        self.rows = []
        self.end()

    def end(self) -> None:
        """Forgets what was seen: the memory may be changed or freed from now on."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Blob | Kept:
        """What the graph is to hold in place of a tensor."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return Kept(tensor)  # a parameter, or a kind that we know nothing of
        if storage_id(tensor) in self._parameters or is_weight(tensor):
            return Kept(tensor)
        key = _key(tensor)
        seen = self._seen.get(key)
        if seen is None or seen.is_gone():
            return self._pack_first(tensor, key)
        return self._pack_again(tensor, seen)

    def _pack_again(self, tensor: Tensor, seen: _Seen) -> Blob | Kept:
        if self.trace is not None:
            self.trace.saves(tensor, seen.ordinal)
        if seen.kept is None:
            return Kept(tensor)
        blob = seen.kept()
        if blob is None:
            # Its graph was freed, the tensor was not.
            blob = self._make(tensor, seen.ordinal)
            seen.kept = None if blob is None else weakref.ref(blob)
        return Kept(tensor) if blob is None else blob

    def _pack_first(self, tensor: Tensor, key: _Key) -> Blob | Kept:
        ordinal = len(self.rows)
        num_bytes = tensor.nbytes
        name = ""
        if self.trace is not None:
            name = self.trace.name
        shape = tuple(tensor.shape)
        row = Row(
            name,
            "exact",
            shape,
            tensor.dtype,
            raw_bytes=num_bytes,
            stored_bytes=num_bytes,
        )
        self.rows.append(row)
        if self.trace is not None:
            self.trace.saves(tensor, ordinal)
        blob = self._make(tensor, ordinal)
        reference = None if blob is None else weakref.ref(blob)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._seen[key] = _Seen(storage, reference, ordinal)
        return Kept(tensor) if blob is None else blob

    def _make(self, tensor: Tensor, ordinal: int) -> Blob | None:
        layout = layout_of(tensor)
        kind = self._kind(tensor)
        if layout is None or kind == "exact":
            return None
        row = self.rows[ordinal]
        row.kind = kind
        begun = time.perf_counter()
        content = self._content(tensor, layout, ordinal, row)
        row.encode_seconds += time.perf_counter() - begun
        if content is None:
            row.kind = "exact"
            row.error_bound = 0.0
            return None
        blob = Blob(content, layout, row)
        row.stored_bytes = content.num_bytes
        # Others may be predicted from the content, and keep it for longer than the blob.
        self._ledger.add(content, content.num_bytes)
        return blob

    @torch.no_grad()
    def _content(self, tensor: Tensor, layout: Layout, ordinal: int, row: Row) -> Content | None:
        return self._encode(flatten(tensor.detach(), layout), layout, ordinal, row)

    def _kind(self, tensor: Tensor) -> str:
        """How a tensor may be kept: see :class:`~.stored.Row`."""
        if tensor.nbytes < self._limits.min_bytes:
            return "exact"
        if not tensor.requires_grad and inside_compiled_call():
            # It would ask for all of its tensors at once.
            self.saw_compiled = True
            return "exact"
        if tensor.dtype.is_complex:
            return "exact"
        differentiable = tensor.requires_grad or self._limits.inputs
        if not (tensor.dtype.is_floating_point and differentiable):
            return "lossless"  # integers, masks; inputs and statistics, which are seldom smaller
        if is_sensitive(tensor):
            return "exact"
        return "lossy" if self._has_dims(tensor) else "sparse"

    def _has_dims(self, tensor: Tensor) -> bool:
        """Whether it has enough dimensions, or is the tokens of such a tensor in rows."""
        least = self._limits.min_dims
        base = tensor._base
        if tensor.dim() >= least or base is None or tensor.dim() < 2:
            return tensor.dim() >= least
        return base.dim() >= least and base.shape[-1] == tensor.shape[-1]

    def unpack(self, kept: Blob | Kept) -> Tensor:
        """The tensor; one that was decoded is at hand until another one is."""
        if isinstance(kept, Blob):
            latest = None if self._latest is None else self._latest()
            if latest is not None and latest is not kept:
                latest.forget()
            self._latest = weakref.ref(kept)
        return kept.tensor()

    def forget(self) -> None:
        """Lets go of the tensor that was decoded last."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.forget()
        self._latest = None


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


def _kind(node: Any) -> str:
    name: str = node.name()
    return name.rstrip("0123456789")


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf of the graph, or a view or a cast of one."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and _kind(node) in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and _kind(node).endswith("AccumulateGrad")


def is_sensitive(tensor: Tensor) -> bool:
    """Whether it is the result of an operation whose backward needs it exactly."""
    return tensor.grad_fn is not None and _kind(tensor.grad_fn) in _SENSITIVE


def is_compiled(model: nn.Module) -> bool:
    """Whether a module of the model was given to ``torch.compile``."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return True
    return False


def inside_compiled_call() -> bool:
    """Whether the caller was called by code that ``torch.compile`` made."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "_functorch" in file and "aot" in file:
            return True
        frame = frame.f_back
    return False
