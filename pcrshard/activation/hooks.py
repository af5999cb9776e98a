"""The pack and unpack hooks that autograd calls when it saves and retrieves a tensor.

A tensor that may be inexact is kept by reference until the operation that saved it is found in the
graph: autograd does not say who saves. It is found as soon as a later tensor is saved that depends
on it, which is one or two operations later, or at the end of the block from the results in the
caller's variables. Then the tensor is compressed if :mod:`.consumers` lists the operation.
Parameters, buffers and copies of weights are kept by reference.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from . import consumers, derived
from .codecs import Content
from .compiled import CompiledHooks, graph_of, kind_of, tracing
from .consumers import LIMITED, TOLERANT, TOLERANT_FUNCTIONS, Norm
from .entries import Entry, Ledger, Saved
from .graph_nodes import LEAF, operation, producer, source_of, storage_of
from .layout import MemoryLayout, flatten, layout_of, unflatten
from .noise import CONVOLUTIONS
from .options import ActivationOptions
from .pooling import Windows
from .report import Row

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
# What may lie between autograd and a hook on the stack, where compiled code breaks its graph.
_WRAPPERS = ("torch._dynamo.", __name__)
_REGION = "torch.utils.checkpoint"
_READ = TOLERANT | LIMITED
# The last decoded tensors are kept: one of them may be derived from another.
_DECODED = 2
# Encodes a tensor, by what is known of the operation that reads it, or returns None to keep it.
Encode = Callable[[Tensor, MemoryLayout, Row, Norm | Windows | None], Content | None]


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
        self._entries: weakref.WeakValueDictionary[object, Entry] = weakref.WeakValueDictionary()
        self._waiting: weakref.WeakSet[Entry] = weakref.WeakSet()
        # Numbers of the nodes of the graph: the first of this pass, and those that were visited.
        self._first = 0
        self._visited: set[int] = set()
        # Numbers of nodes that may have saved something here. What others have saved must not be
        # looked at: torch.utils.checkpoint would compute it.
        self._savers: set[int] = set()
        # The last of them.
        self._last = -1
        # What a node that is being visited has saved.
        self._is_visiting = False
        self._before_relu: set[int] = set()
        self._found: Saved | None = None
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
            storage_of(tensor)
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

    def _pack(self, tensor: Tensor) -> Saved:
        number = torch._C._autograd._get_sequence_nr() - 1  # of the saver, unless it is a function
        self._visit([tensor.grad_fn], number)
        is_again, self._last = number == self._last, number
        frame, function = _saver()
        if function != _REGION:
            self._savers.add(number)
        strides = tensor.stride() if tensor.layout == torch.strided else ()
        layout = layout_of(tensor.shape, strides) if strides else MemoryLayout((), (), ())
        saved = Saved(Entry(tensor, layout, Row.of("", "", tensor)), layout, strides)
        if type(tensor) is not Tensor or tensor.layout != torch.strided or 0 in strides:
            return saved  # a parameter, a subclass with unknown semantics, or an expanded tensor
        storage, origin = storage_of(tensor), producer(tensor)
        is_weight = tensor.requires_grad if origin is None else operation(origin) == LEAF
        if storage in self._parameters or is_weight:
            return saved
        name, convolution = self._module_of(frame, tensor)
        row = Row.of(name, operation(origin), tensor)
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
        is_new = entry is None
        if entry is None:
            entry = self._entries[key] = Entry(tensor, layout, row, kind)
            entry.node = source_of(tensor)
        saved.entry = entry
        if kind == "lossy":
            self._note_saver(saved, tensor, number, function)
        elif kind == "lossless" and is_new:
            entry.is_wanted = True
            # Max-pooling saves its input and its indices.
            if is_again and tensor.dtype == torch.int64 and tensor.dim() > 2:
                self._wait(saved, tensor)
            self._settle(entry, tensor)
        return saved

    def _wait(self, saved: Saved, tensor: Tensor) -> None:
        """Keep a tensor until its saver is known."""
        entry = saved.entry
        saved.is_waiting = True
        entry.waiting += 1
        entry.tensor = tensor.detach() if entry.tensor is None else entry.tensor
        self._waiting.add(entry)

    def _note_saver(self, saved: Saved, tensor: Tensor, number: int, function: str | None) -> None:
        """Note what the saver of a tensor tolerates, if it is known at once."""
        entry, node = saved.entry, tensor.grad_fn
        is_result = function is None and node is not None and node._sequence_nr() == number
        if function is None and not is_result:
            self._wait(saved, tensor)
        elif is_result and operation(node) in consumers.GATES:
            entry.is_gate = True
        elif (
            consumers.tolerates(operation(node), node, "result")
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
        known: list[Entry] = []
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

    def _saved_by(self, node: Any) -> Iterator[Entry]:
        """Note that a node is the saver of what it saved."""
        name = operation(node)
        if name == "relu":
            source = node.next_functions[0][0]
            self._before_relu.add(-1 if source is None else source._sequence_nr())
        for attribute in _READ.get(name, ()):
            saved = self._attribute(node, attribute)
            if saved is None or not saved.is_waiting:
                continue
            entry = saved.entry
            saved.is_waiting = False
            entry.waiting -= 1
            yield entry
            if not consumers.tolerates(name, node, attribute):
                sides = consumers.sides_of(name, node, saved.exact())
                if sides is None:
                    entry.is_exact = True
                else:
                    saved.own = self._sides(saved, *sides)
                continue
            entry.is_wanted = True
            if entry.by is None and entry.layout == saved.layout:
                entry.by = self._what_reads(entry, node, name, attribute)
                entry.reader = node._sequence_nr()

    def _what_reads(
        self, entry: Entry, node: Any, name: str, attribute: str
    ) -> Norm | Windows | None:
        """Return what a node says about the values that it reads."""
        if entry.kind == "lossy":
            return consumers.norm_of(name, node, attribute, entry.layout.shape)
        pooled = self._attribute(node, "self")
        if pooled is None or not hasattr(node, "_saved_kernel_size"):
            return None
        return Windows.of(lambda name: getattr(node, f"_saved_{name}"), pooled.layout.shape)

    def _sides(self, saved: Saved, inside: Tensor, one: float, other: float) -> Content | None:
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

    def _attribute(self, node: Any, name: str) -> Saved | None:
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

    def _settle(self, entry: Entry, tensor: Tensor | None) -> None:
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
            self._compress(entry)

    def _compress(self, entry: Entry) -> None:
        row = entry.row
        row.kind = entry.kind
        begun = time.perf_counter()
        content = self._derived(entry) if entry.kind == "lossy" else None
        if content is None:
            content = self._encode(entry.exact(), entry.layout, row, entry.by)
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

    def _derived(self, entry: Entry) -> Content | None:
        """Return a content that is computed from others; ``None`` if there is none."""
        name, content = operation(entry.node), None
        if not self.is_deriving:
            return None
        # Of a convolution that a normalization reads, but no ReLU behind it.
        is_last = entry.by is not None and entry.reader not in self._before_relu
        if name == "convolution" and self._options.recompute and is_last:
            content = derived.of_convolution(entry)
        elif name in ("gelu", "silu") and self._options.derive:
            content = derived.of_activation(entry, self._attribute, self._decode)
        elif self._options.derive:
            content = derived.of_norm(entry, self._attribute)
        if content is not None:
            entry.row.kind = "recomputed" if name == "convolution" else "derived"
        return content

    def end(self, frame: FrameType | None) -> None:
        """End a forward pass: what is still unknown stays exact.

        Args:
            frame: The caller's, among whose variables may be results.
        """
        if self._waiting and frame is not None:
            values = _tensors(frame.f_locals.values())
            self._visit([value.grad_fn for value in values], sys.maxsize)
        for entry in list(self._waiting):
            entry.is_exact, entry.waiting = entry.kind == "lossy", 0
            self._settle(entry, entry.tensor)

    def _module_of(self, frame: FrameType | None, tensor: Tensor) -> tuple[str, str | None]:
        """Return the running module, and the convolution that reads a tensor.

        They are found on the caller's stack, not by forward hooks, which would make
        ``torch.compile`` compile the model twice. What a convolution saves with the shape of its
        input is that input, even if autocast changed its type.
        """
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

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor with its original shape, order in memory, type, and device."""
        context = tracing()
        if context is not None:
            return self._compiled.unpack(saved, context)
        held: Saved = saved
        if self._is_visiting:
            self._found = held
            return torch.empty(0)
        if (held.own or held.entry.content) is None:
            return held.exact()
        return unflatten(self._decode(held.entry, held.own), held.layout.shape, held.layout.order)

    def _decode(self, entry: Entry, own: Content | None = None) -> Tensor:
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


def _saver() -> tuple[FrameType | None, str | None]:
    """Return the frame that a hook was called from, and the function in Python that saves, if any.

    torch.utils.checkpoint saves what its regions begin with by no operation: the last one may be of
    another region.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
        frame = frame.f_back
    if frame is None:
        return None, None
    if frame.f_code is _APPLY:
        return frame, frame.f_locals["cls"].__name__
    return frame, _REGION if frame.f_globals.get("__name__") == _REGION else None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Return the tensors among values, and in collections of them."""
    for value in values:
        if isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, Tensor))
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))
        elif isinstance(value, Tensor):
            yield value
