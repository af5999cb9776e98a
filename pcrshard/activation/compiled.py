"""Compress saved tensors in compiled models, with graphs that ``torch.compile`` inlines.

PyTorch inlines saved-tensor hooks that are FX GraphModules into the compiled forward and backward
(pytorch#150032), but only for intermediates of the graph, not for parameters, inputs, or outputs.
Because a compiled graph has fixed shapes, values without a code are stored as a fixed number of
whole blocks, those with the largest magnitudes. If more blocks need it, the tensor's step grows
until they fit; the error is then at most 1/254 of their largest value.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..errorbound import Absolute, RelativeStd
from .bits import from_planes, pack_booleans, to_planes, unpack_booleans
from .layout import Layout, flatten, layout_of, restore, size_hint
from .options import ActivationOptions
from .quantizer import MARGIN, MAX_CODE, estimated_deviation, nearest_codes
from .report import Row

_BLOCK = 256
# One block in this many is stored exactly.
_BLOCKS_PER_EXACT = 128
# Range of the codes of ``bits``, in standard deviations.
_REACH = 6.0
_TINY = 2.0**-120
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Operations, by their canonical names.
VIEWS = {
    "alias", "asstrided", "clone", "convertelementtype", "detach", "expand", "permute", "reshape",
    "reshapealias", "select", "slice", "squeeze", "t", "tocopy", "transpose", "unsafeview",
    "unsqueeze", "view",
}  # fmt: skip
SENSITIVE = {
    "exp", "logsoftmax", "logsumexp", "reciprocal", "rsqrt", "safesoftmax", "softmax", "sqrt",
}  # fmt: skip
_SPLITS = {"split", "splitwithsizes", "unbind"}
_NONNEGATIVE = {"relu", "sigmoid", "hardtanh"}
_POOLS = {"maxpool2dwithindices", "maxpool3dwithindices"}
# Tensors, and the sizes of the tensor that they encode.
_Packed = tuple[tuple[Tensor, ...], tuple[int, ...]]
_CONTEXT = "torch._functorch._aot_autograd.graph_compile"


class Saved(NamedTuple):
    """A saved tensor of a compiled graph.

    Attributes:
        node: The tensor's node in the forward graph.
        forward: The forward graph.
        backward: The backward graph, whose outputs are gradients in the order of inputs.
    """

    node: fx.Node
    forward: fx.Graph
    backward: fx.Graph


def tracing() -> Saved | None:
    """Return the saved tensor whose hook is being inlined; ``None`` in eager mode."""
    module = sys.modules.get(_CONTEXT)
    context = module._get_saved_tensor_hook_context() if module is not None else None
    if context is None:
        return None
    return Saved(context["_node"], context["_fw_graph"], context["_bw_graph"])


class CompiledHooks:
    """The pack and unpack operations of compiled graphs.

    Attributes:
        rows: The decisions, one row per saved tensor of each compiled graph.

    Args:
        bound: Largest absolute error.
        options: Selects the floats to compress.
        use_bits: Whether to pack codes into fewer than eight bits.
    """

    def __init__(
        self, bound: RelativeStd | Absolute, options: ActivationOptions, *, use_bits: bool
    ) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self._bound = bound
        self._use_bits = use_bits
        self._options = options

    def pack(self, tensor: Tensor, saved: Saved) -> Tensor | _Packed:
        """Return the packed form of a tensor for the forward graph, or the tensor unchanged."""
        kind = self._kind(tensor, saved)
        parts: tuple[Tensor, ...] = ()
        if kind == "lossy":
            parts = self._quantize(tensor, self._width(saved.node))
        elif kind == "lossless":
            parts = (_narrow(tensor, saved.node),)
        name, function = _describe(saved.node)
        row = self.rows[name, saved.node.name] = Row.of(name, function, kind, tensor)
        row.compiled = True
        row.stored_bytes = sum(size_hint(part.nbytes) for part in parts or (tensor,))
        if kind == "lossy":
            row.error_bound = math.nan
        # Symbolic sizes reach the backward graph only as separate values.
        return (parts, tuple(tensor.shape)) if parts else tensor

    def unpack(self, packed: Tensor | _Packed, saved: Saved) -> Tensor:
        """Compute the tensor from its packed form, in the backward graph."""
        if isinstance(packed, Tensor):
            return packed
        parts, shape = packed
        like = saved.node.meta["val"]
        if len(parts) > 1:
            flat = self._restore(parts, self._width(saved.node))
        elif like.dtype != torch.bool:
            return parts[0].to(like.dtype)
        else:
            flat = unpack_booleans(parts[0], 8 * parts[0].shape[0])
        return restore(flat, Layout(shape, layout_of(like).order))

    def _kind(self, tensor: Tensor, saved: Saved) -> str:
        """Return how to store a tensor, by the rules of eager code."""
        producer, relatives = _producer(saved.node)
        if size_hint(tensor.nbytes) < self._options.min_bytes or producer.op == "placeholder":
            return "exact"
        if tensor.dtype == torch.bool or _pool_of(saved.node) is not None:
            return "lossless"
        if tensor.dtype not in _FLOATS or tensor.dim() < 2 or size_hint(tensor.shape[-1]) == 1:
            return "exact"  # includes statistics of rows, such as logsumexp
        if _name(producer) in SENSITIVE or _is_second_result(producer):
            return "exact"
        if saved.node not in _differentiable(saved.forward, saved.backward):
            return "exact"
        least = self._options.min_dims
        rows = size_hint(tensor.shape[0])
        is_tokens = any(len(shape) >= least and size_hint(shape[0]) < rows for shape in relatives)
        return "lossy" if tensor.dim() >= least or is_tokens else "exact"

    def _width(self, node: fx.Node) -> tuple[int, bool]:
        """Return the number of bits per code, and whether one of them is the sign."""
        producer, _ = _producer(node)
        while _name(producer) in ("getitem", *_POOLS):
            producer, _ = _producer(producer.all_input_nodes[0])
        signed = _name(producer) not in _NONNEGATIVE
        if not self._use_bits or isinstance(self._bound, Absolute):
            return 8, signed
        codes = int(_REACH / (2 * self._bound.fraction)) + 1
        return min(codes.bit_length() + signed, 8), signed

    def _quantize(self, tensor: Tensor, width: tuple[int, bool]) -> tuple[Tensor, ...]:
        """Return the codes, the step, the rows of exact blocks, and these blocks."""
        flat = flatten(tensor, layout_of(tensor))
        blocks = _blocks(flat)
        bits, signed = width
        most = min(MAX_CODE, 2 ** (bits - signed) - 1)
        bound = self._bound
        if isinstance(bound, RelativeStd):
            std = estimated_deviation(flat, bound.outlier_guard)
            error_bound = std.nan_to_num(0).float() * bound.fraction
        else:
            error_bound = torch.full((), bound.error_bound, device=tensor.device)
        largest = blocks.abs().amax(1).float()
        count = blocks.shape[0] // _BLOCKS_PER_EXACT + 1
        top = largest.topk(count + 1 if size_hint(count) < size_hint(blocks.shape[0]) else count)
        exact = top.indices[:count]
        least = top.values[-1] / (2 * most)
        # If more blocks contain NaN than can be exact, the step and the whole tensor become NaN.
        step = torch.maximum(error_bound * (1 - MARGIN), least).clamp(min=_TINY)
        values = blocks.float()
        code = nearest_codes(values, step).clamp(max=most).copysign(values)
        # NaN has no integer value; its block is exact.
        codes = code.nan_to_num(0).to(torch.int8)
        packed = codes
        if bits < 8:
            # Plane 0 holds the signs.
            packed = to_planes(codes.flatten())[:, 1 - signed :][:, :bits].clone()
        return packed, step, exact.to(torch.int32), blocks[exact]

    def _restore(self, parts: tuple[Tensor, ...], width: tuple[int, bool]) -> Tensor:
        """Return the padded flat values."""
        codes, step, exact, kept = parts
        bits, signed = width
        if bits < 8:
            planes = torch.nn.functional.pad(codes, (1 - signed, 7 + signed - bits))
            codes = from_planes(planes).view(-1, _BLOCK)
        code = codes.float()
        values = ((2 * code - code.sign()) * step).to(kept.dtype)
        return values.index_copy(0, exact.long(), kept).flatten()


@functools.lru_cache(maxsize=1)
def _differentiable(forward: fx.Graph, backward: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the forward graph that depend on an input with a gradient."""
    inputs = forward.find_nodes(op="placeholder")
    gradients: Any = backward.output_node().args[0]
    known = {node for node, gradient in zip(inputs, gradients, strict=False) if gradient}
    for node in forward.nodes:
        if not known.isdisjoint(node.all_input_nodes):
            known.add(node)
    return known


def graph_of(function: Any) -> fx.GraphModule:
    """Return a GraphModule with a single call, which PyTorch considers inlineable."""
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("saved"),)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _blocks(flat: Tensor) -> Tensor:
    padding = -flat.shape[0] % _BLOCK
    if not isinstance(padding, int) or padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(-1, _BLOCK)


def _narrow(tensor: Tensor, node: fx.Node) -> Tensor:
    """Pack booleans into bits, and pooling indices into as few bytes as the plane allows."""
    if tensor.dtype == torch.bool:
        return pack_booleans(flatten(tensor, layout_of(tensor)))
    return tensor.to(_pool_of(node))


def _pool_of(node: fx.Node) -> torch.dtype | None:
    """Return a type for max-pooling indices; ``None`` if the node does not compute any."""
    pool = node.args[0] if _is_second_result(node) else None
    if not isinstance(pool, fx.Node) or _name(pool) not in _POOLS:
        return None
    places = torch.Size(map(size_hint, pool.all_input_nodes[0].meta["val"].shape[2:])).numel()
    return torch.int16 if places < 2**15 else torch.int32


def _producer(node: fx.Node) -> tuple[fx.Node, list[torch.Size]]:
    """Return the node that computes a node's values, and the shapes that views give them."""
    shapes = [user.meta["val"].shape for user in node.users if _name(user) in VIEWS]
    while True:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _name(source) in _SPLITS:
            source = source.args[0]
        elif _name(node) not in VIEWS:
            return node, shapes
        if not isinstance(source, fx.Node):
            return node, shapes
        node = source
        shapes.append(node.meta["val"].shape)


def canonical(name: str) -> str:
    """Return the name that eager and compiled code share for an operation.

    >>> canonical("ToCopy") == canonical("_to_copy")
    True
    """
    return name.replace("_", "").lower()


def _name(node: fx.Node) -> str:
    """Return the operation's name without its overload: ``relu`` for ``aten.relu.default``."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return canonical(getattr(packet, "__name__", ""))


def _is_second_result(node: fx.Node) -> bool:
    """Return whether a node is a secondary result, such as a mask or the logsumexp of attention."""
    return _name(node) == "getitem" and bool(node.args[1] != 0)


def _describe(node: fx.Node) -> tuple[str, str]:
    """Return the module and the function that a node comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    producer, _ = _producer(node)
    source = producer.all_input_nodes[0] if _name(producer) == "getitem" else producer
    return path.rpartition("]")[2].removeprefix("._orig_mod").lstrip("."), str(source.target)
