"""The pack and unpack hooks that autograd calls when it saves and retrieves a tensor.

A tensor that may be inexact is kept by reference until the operation that saved it is found in the
graph: autograd does not say who saves. It is found as soon as a later tensor is saved that depends
on it, which is one or two operations later, or at the end of the block from the results in the
caller's variables. Then the tensor is compressed if :mod:`.consumers` lists the operation.
Parameters, buffers and copies of weights are kept by reference.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ..memory import when_gone
from . import consumers
from .codecs import Content
from .compiled import VIEWS, CompiledHooks, canonical, graph_of, kind_of, tracing
from .consumers import LIMITED, TOLERANT, TOLERANT_FUNCTIONS, Norm
from .layout import Layout, flatten, layout_of, restore
from .noise import CONVOLUTIONS
from .normalized import Normalized
from .options import ActivationOptions
from .report import Row

_LEAF = "torch::autograd::accumulategrad"
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
# What may lie between autograd and a hook on the stack, where compiled code breaks its graph.
_WRAPPERS = ("torch._dynamo.", __name__)
_READ = TOLERANT | LIMITED
# Views that keep the order of elements.
_SAME_ORDER = {"alias", "detach", "reshapealias", "tocopy", "unsafeview", "view"}
# The last decoded tensors are kept: one of them may be derived from another.
_DECODED = 2
# Encodes a tensor, or returns None to keep it unchanged.
Encode = Callable[[Tensor, Layout, Row, Norm | None], Content | None]


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


class _Entry:
    """The elements that one or more operations saved, exact, compressed, or both for a while.

    Attributes:
        tensor: The exact tensor; ``None`` after it was compressed. It is detached, because a result
            that referenced its own graph would never be freed.
        version: Its version when it was saved. A pack hook that returns its argument disables
            autograd's own check for in-place changes, so versions are compared.
        content: The compressed elements.
        waiting: How many of the savers are not known yet.
        is_exact: Whether a saver needs the exact tensor.
        is_wanted: Whether a saver tolerates an inexact one.
        is_gate: Whether it is the result of a gate, which is exact if nothing else is done with it.
        norm: The statistics by which an operation normalizes it.
        normalizer: The number of that operation.
        node: The operation that computed the elements, in the same order; ``None`` once compressed.
    """

    def __init__(self, tensor: Tensor, layout: Layout, row: Row) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.layout = layout
        self.row = row
        self.content: Content | None = None
        self.waiting = 0
        self.is_exact = False
        self.is_wanted = False
        self.is_gate = False
        self.norm: Norm | None = None
        self.normalizer = -1
        self.node: Any = None

    def exact(self) -> Tensor:
        """Return the tensor, unless it was changed in place after it was saved."""
        assert self.tensor is not None
        found = self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{found}; expected version {self.version} instead"
            )
        return self.tensor


class _Saved:
    """What the graph holds in place of a tensor.

    Attributes:
        entry: The elements.
        layout: Shape and order that the saver's view gives to them.
        strides: Its strides while they are exact.
        own: What only this saver can use in place of them.
        is_waiting: Whether the saver is not known yet.
    """

    def __init__(self, entry: _Entry, layout: Layout, strides: tuple[int, ...]) -> None:
        self.entry = entry
        self.layout = layout
        self.strides = strides
        self.own: Content | None = None
        self.is_waiting = False

    def exact(self) -> Tensor:
        """Return the saver's view of the exact tensor."""
        tensor = self.entry.exact()
        if tensor.layout != torch.strided or tensor.stride() == self.strides:
            return tensor
        return tensor.as_strided(self.layout.shape, self.strides)


class Hooks:
    """The hooks that pack and unpack the saved tensors of one model.

    The same memory is stored once. It is identified by a weak reference to the storage, so that
    freed and reallocated memory counts as a different storage, and by the elements' places in it,
    their type, and the version. Views of the same elements share what is stored.

    Attributes:
        rows: One row for each tensor that eager code saved in the last forward pass.
        ledger: Counts the live bytes.
        is_deriving: Whether tensors may be derived from others, or computed again.
        graphs: The two hooks as FX GraphModules, which compiled code inlines.

    Args:
        encode: Packs flat tensors.
        options: Selects the floats to compress.
        compiled: Packs tensors in compiled code.
    """

    def __init__(self, encode: Encode, options: ActivationOptions, compiled: CompiledHooks) -> None:
        self.rows: dict[object, Row] = {}
        self.ledger = Ledger()
        self.is_deriving = True
        # Created once, because compiled code has guards on their identity.
        self.graphs = (graph_of(self.pack), graph_of(self.unpack))
        self._compiled = compiled
        self._encode = encode
        self._options = options
        self._names: dict[nn.Module, str] = {}
        self._parameters: set[StorageWeakRef] = set()
        # The elements of rows, while the graph holds them.
        self._entries: weakref.WeakValueDictionary[object, _Entry] = weakref.WeakValueDictionary()
        self._waiting: weakref.WeakSet[_Entry] = weakref.WeakSet()
        # Numbers of the nodes of the graph: the first of this pass, and those that were visited.
        self._first = 0
        self._visited: set[int] = set()
        # Numbers of nodes that may have saved something here. What others have saved must not be
        # looked at: torch.utils.checkpoint would compute it.
        self._savers: set[int] = set()
        # What a node that is being visited has saved.
        self._is_visiting = False
        self._before_relu: set[int] = set()
        self._found: _Saved | None = None
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
        self._entries.clear()
        self._waiting.clear()
        self._first = torch._C._autograd._get_sequence_nr()
        self._visited.clear()
        self._savers.clear()
        self._before_relu.clear()
        self._decoded.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that the graph stores in place of a tensor."""
        context = tracing()
        if context is not None:
            return self._compiled.pack(tensor, context)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> _Saved:
        number = torch._C._autograd._get_sequence_nr() - 1  # of the saver, unless it is a function
        node = tensor.grad_fn
        self._visit([node], number)
        self._savers.add(number)
        strides = tensor.stride() if tensor.layout == torch.strided else ()
        layout = layout_of(tensor.shape, strides) if strides else Layout((), (), ())
        saved = _Saved(_Entry(tensor, layout, Row.of("", "", tensor)), layout, strides)
        if type(tensor) is not Tensor or tensor.layout != torch.strided or 0 in strides:
            return saved  # a parameter, a subclass with unknown semantics, or an expanded tensor
        storage = _storage_of(tensor)
        producer = _producer(tensor)
        is_weight = tensor.requires_grad if producer is None else _operation(producer) == _LEAF
        if storage in self._parameters or is_weight:
            return saved
        name, convolution, function = self._module_of(tensor)
        row = Row.of(name, _operation(producer), tensor)
        row.position = len(self.rows)
        # What a projection copies to a matrix has no base; the copy remembers its shape.
        sizes = getattr(tensor.grad_fn, "_saved_self_sym_sizes", tensor.shape)
        relatives = [sizes, sizes if tensor._base is None else tensor._base.shape]
        has_gradient = tensor.requires_grad or self._options.inputs
        kind = kind_of(row, relatives, self._options, has_gradient=has_gradient)
        key = storage, tensor.data_ptr(), layout.spans, tensor.dtype, tensor._version, kind
        row = self.rows.setdefault(key, row)
        if convolution is not None and convolution not in row.read_by:
            row.read_by += (convolution,)
        entry = self._entries.get(key)
        # It is new, or its graph was freed but the tensor was not.
        if entry is None:
            entry = self._entries[key] = _Entry(tensor, layout, row)
            entry.node = _source_of(tensor)
            if kind == "lossless":
                self._compress(entry, kind)
        saved.entry = entry
        if kind == "lossy":
            self._note_saver(saved, tensor, number, function)
        return saved

    def _note_saver(self, saved: _Saved, tensor: Tensor, number: int, function: str | None) -> None:
        """Note what the saver of a tensor tolerates, if it is known at once."""
        entry, node = saved.entry, tensor.grad_fn
        is_result = node is not None and node._sequence_nr() == number
        if function is None and not is_result:
            saved.is_waiting = True
            entry.waiting += 1
            entry.tensor = tensor.detach() if entry.tensor is None else entry.tensor
            self._waiting.add(entry)
        elif is_result and _operation(node) in consumers.GATES:
            entry.is_gate = True
        elif (
            consumers.tolerates(_operation(node), node, "result")
            if is_result
            else (function in TOLERANT_FUNCTIONS)
        ):
            entry.is_wanted = True
        else:
            entry.is_exact = True
        self._settle(entry, tensor)

    def _visit(self, nodes: list[Any], number: int) -> None:
        """Find out who saved the tensors that wait, among the nodes behind some others.

        Args:
            nodes: Nodes or ``None``; emptied.
            number: Of the node that is being made, which has not saved everything yet.
        """
        known: list[_Entry] = []
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            place = node._sequence_nr()
            # Leaves have the largest number of all.
            if not self._first <= place <= number or place in self._visited:
                continue
            nodes += [following for following, _ in node.next_functions]
            if place < number:
                self._visited.add(place)
                known += self._saved_by(node)
        for entry in known:
            self._settle(entry, entry.tensor)

    def _saved_by(self, node: Any) -> Iterator[_Entry]:
        """Note that a node is the saver of what it saved."""
        operation = _operation(node)
        if operation == "relu":
            source = node.next_functions[0][0]
            self._before_relu.add(-1 if source is None else source._sequence_nr())
        for attribute in _READ.get(operation, ()):
            saved = self._attribute(node, attribute)
            if saved is None or not saved.is_waiting:
                continue
            entry = saved.entry
            saved.is_waiting = False
            entry.waiting -= 1
            yield entry
            if consumers.tolerates(operation, node, attribute):
                entry.is_wanted = True
                if entry.norm is None and entry.layout == saved.layout:
                    shape = entry.layout.shape
                    entry.norm = consumers.norm_of(operation, node, attribute, shape)
                    entry.normalizer = node._sequence_nr()
                continue
            tensor = saved.exact()
            sides = consumers.sides_of(operation, node, tensor)
            if sides is None:
                entry.is_exact = True
            else:
                inside, *others = sides
                saved.own = self._sides(inside, saved, *others)

    def _sides(self, inside: Tensor, saved: _Saved, one: float, other: float) -> Content | None:
        """Return a content that says only on which side of limits each element lies."""
        entry = saved.entry
        packed = self._encode(inside, saved.layout, entry.row, None)
        if packed is None:
            entry.is_exact = True
            return None
        self.ledger.add(packed)
        dtype = entry.row.dtype

        def decode() -> Tensor:
            places = packed.decode()
            values = torch.full(places.shape, other, dtype=dtype, device=places.device)
            return values.masked_fill_(places, one)

        row = entry.row
        is_first = row.kind == "exact" and not entry.is_exact
        row.stored_bytes = packed.num_bytes + (0 if is_first else row.stored_bytes)
        row.kind = "lossless" if is_first else row.kind
        return Content(packed.num_bytes, decode)

    def _attribute(self, node: Any, name: str) -> _Saved | None:
        """Return what a node has saved; ``None`` if these hooks did not pack it."""
        if node is None or node._sequence_nr() not in self._savers:
            return None
        self._is_visiting = True
        try:
            getattr(node, f"_saved_{name}", None)
        finally:
            self._is_visiting = False
            found, self._found = self._found, None
        return found

    def _settle(self, entry: _Entry, tensor: Tensor | None) -> None:
        """Compress what no saver needs exactly, once all of them are known."""
        if entry.waiting or tensor is None or (entry.is_gate and not entry.is_wanted):
            return
        self._waiting.discard(entry)
        if entry.is_exact:
            entry.content = None
            entry.tensor = tensor.detach() if entry.tensor is None else entry.tensor
            entry.row.kind, entry.row.stored_bytes = "exact", entry.row.raw_bytes
            entry.row.error_bound = 0.0
        elif entry.content is not None or not entry.is_wanted:
            entry.tensor = None
        elif tensor._version == entry.version:
            self._compress(entry, "lossy")

    def _compress(self, entry: _Entry, kind: str) -> None:
        row = entry.row
        row.kind = kind
        begun = time.perf_counter()
        content = self._derived(entry) if kind == "lossy" else None
        if content is None:
            content = self._encode(entry.exact(), entry.layout, row, entry.norm)
        row.seconds += time.perf_counter() - begun
        entry.node = None
        if content is None:
            row.kind = "exact"
            row.error_bound = 0.0
            entry.is_exact = True
            return
        row.stored_bytes = content.num_bytes
        entry.content, entry.tensor = content, None
        # Others derived from the content may keep it alive longer than the graph.
        self.ledger.add(content)

    def _derived(self, entry: _Entry) -> Content | None:
        """Return a content that is computed from others; ``None`` if there is none."""
        node, row = entry.node, entry.row
        if node is None or not self.is_deriving:
            return None
        operation = _operation(node)
        content = None
        if self._options.recompute and entry.norm is not None:
            content = self._recomputed(entry, node, operation)
        if self._options.derive and operation in ("gelu", "silu"):
            content = self._of_activation(entry, node, operation)
        elif self._options.derive and content is None:
            content = self._of_norm(entry, node, operation)
        if content is not None:
            row.kind = "recomputed" if operation == "convolution" else "derived"
        return content

    def _of_activation(self, entry: _Entry, node: Any, operation: str) -> Content | None:
        source = self._attribute(node, "self")
        if source is None or source.entry.content is None or not _alike(entry, source.entry.layout):
            return None
        values, dtype = source.entry, entry.row.dtype
        how = {"approximate": node._saved_approximate} if operation == "gelu" else {}
        function: Any = getattr(nn.functional, operation)

        def decode() -> Tensor:
            result: Tensor = function(self._decode(values), **how)
            return result.to(dtype)

        return Content(0, decode)

    def _of_norm(self, entry: _Entry, node: Any, operation: str) -> Content | None:
        is_relu = operation == "relu"
        if is_relu:
            node = node.next_functions[0][0]
            operation = _operation(node)
        for attribute in TOLERANT.get(operation, ()):
            source = self._attribute(node, attribute)
            if source is None or source.entry.normalizer != node._sequence_nr():
                continue
            content = source.entry.content
            if not isinstance(content, Normalized) or not _alike(entry, content.layout):
                continue
            return _affine(content, entry.row.dtype, is_relu=is_relu)
        return None

    def _recomputed(self, entry: _Entry, node: Any, operation: str) -> Content | None:
        """The result of a 1x1 convolution that a normalization reads, but no ReLU after it."""
        if operation != "convolution" or entry.normalizer in self._before_relu:
            return None
        weight, order = node._saved_weight, entry.layout.order
        is_wide = weight.shape[0] > weight.shape[1] and weight.shape[2:].numel() == 1
        if not is_wide or node.next_functions[2][0] is not None:
            return None

        def decode() -> Tensor:
            settings = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
            how = [getattr(node, f"_saved_{name}") for name in settings]
            with torch.no_grad():
                values = torch.ops.aten.convolution(
                    node._saved_input, node._saved_weight, None, *how
                )
            return flatten(values, order)

        return Content(0, decode)

    def end(self, frame: FrameType | None) -> None:
        """End a forward pass: what is still unknown stays exact.

        Args:
            frame: The caller's, among whose variables may be results.
        """
        if self._waiting and frame is not None:
            values = _tensors(frame.f_locals.values())
            self._visit([value.grad_fn for value in values], sys.maxsize)
        for entry in list(self._waiting):
            entry.is_exact, entry.waiting = True, 0
            self._settle(entry, entry.tensor)

    def _module_of(self, tensor: Tensor) -> tuple[str, str | None, str | None]:
        """Return the running module, the convolution that reads a tensor, and the function.

        The function is the one in Python that saves it. They are found on the caller's stack, not
        by forward hooks, which would make ``torch.compile`` compile the model twice. What a
        convolution saves with the shape of its input is that input, even if autocast changed its
        type.
        """
        frame: FrameType | None = sys._getframe(3)
        function = None
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
            frame = frame.f_back
        if frame is not None and frame.f_code is _APPLY:
            function = frame.f_locals["cls"].__name__
        while frame is not None:
            names = frame.f_code.co_varnames
            module = frame.f_locals["self"] if names[:1] == ("self",) else None
            if isinstance(module, nn.Module) and module in self._names:
                name = self._names[module]
                values = frame.f_locals[names[1]] if isinstance(module, CONVOLUTIONS) else None
                is_input = isinstance(values, Tensor) and values.shape == tensor.shape
                return name or type(module).__name__, name if is_input else None, function
            frame = frame.f_back
        return "", None, function

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor with its original shape, order in memory, type, and device."""
        context = tracing()
        if context is not None:
            return self._compiled.unpack(saved, context)
        held: _Saved = saved
        if self._is_visiting:
            self._found = held
            return torch.empty(0)
        if (held.own or held.entry.content) is None:
            return held.exact()
        return restore(self._decode(held.entry, held.own), held.layout.shape, held.layout.order)

    def _decode(self, entry: _Entry, own: Content | None = None) -> Tensor:
        """Return the (n,) elements of an entry."""
        content = own or entry.content
        if content is None:
            return flatten(entry.exact(), entry.layout.order)
        cached = self._decoded.get(content)
        if cached is not None and cached[0]._version == cached[1]:
            return cached[0]
        begun = time.perf_counter()
        flat = content.decode()
        entry.row.seconds += time.perf_counter() - begun
        while len(self._decoded) >= _DECODED:
            self._decoded.pop(next(iter(self._decoded)))
        self._decoded[content] = (flat, flat._version)
        return flat


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Return the tensors among values, and in collections of them."""
    for value in values:
        if isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, Tensor))
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))
        elif isinstance(value, Tensor):
            yield value


def _affine(source: Normalized, dtype: torch.dtype, *, is_relu: bool) -> Content | None:
    """Return the result of a normalization, from the codes of its input."""
    norm, derive = source.norm, source.derive
    gain, offset = norm.gain, norm.offset
    if gain is None or offset is None or (is_relu and norm.threshold is None):
        return None
    return Content(0, lambda: derive(gain, offset, dtype, is_relu))


def _source_of(tensor: Tensor) -> Any:
    """Return the node that computed the elements in the order that they have in memory."""
    node: Any = tensor.grad_fn
    if _operation(node) in _SAME_ORDER and not tensor.is_contiguous():
        return None
    while _operation(node) in _SAME_ORDER:
        node = node.next_functions[0][0]
    return node


def _alike(entry: _Entry, source: Layout) -> bool:
    """Return whether an entry has as many elements as its source, in the same order."""
    layout = entry.layout
    if layout.shape == source.shape:
        return layout.order == source.order
    are_plain = all(each.order == tuple(sorted(each.order)) for each in (layout, source))
    return are_plain and math.prod(layout.shape) == math.prod(source.shape)


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
