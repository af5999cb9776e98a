"""Compress saved tensors in compiled models, with graphs that ``torch.compile`` inlines.

PyTorch inlines saved-tensor hooks that are FX GraphModules into the compiled forward and backward
(pytorch#150032), but only for intermediates of the graph, not for parameters, inputs, or outputs.
What they add is one operator for each tensor in each direction.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..errorbound import Absolute, RelativeStd
from . import operators
from .fixed_size import BYTE, Width, width_of
from .graph_nodes import VIEWS, canonical
from .layout import order_of, size_hint
from .options import ActivationOptions
from .pooling import Windows
from .report import Row

# Operations, by their canonical names.
SENSITIVE = {
    "amax", "amin", "exp", "logsoftmax", "logsumexp", "reciprocal", "rsqrt", "safesoftmax",
    "softmax", "sqrt",
}  # fmt: skip
# What an inexact argument ruins, besides divisors, powers, and comparisons with limits.
_RUINED = {
    "acos", "asin", "atanh", "amax", "amin", "ceil", "cos", "floor", "fmod", "log", "log10",
    "log1p", "log2", "logsumexp", "max", "maximum", "min", "minimum", "reciprocal", "remainder",
    "round", "rsqrt", "sin", "sort", "sqrt", "tan", "topk", "trunc",
}  # fmt: skip
_COMPARISONS = {"eq", "ge", "gt", "le", "lt", "ne"}
# Backward operations that tolerate it, by a part of their names; others do not.
_TOLERANT = (
    "avgpool", "batchnorm", "convolution", "elu", "embedding", "glu", "leakyrelu", "maxpool",
    "mish", "norm", "preluk", "scaleddotproduct", "silu", "softplus", "threshold", "upsample",
)  # fmt: skip
_GATES = {"sigmoidbackward", "tanhbackward"}
_POOLS = {"maxpool2dwithindices", "maxpool3dwithindices"}
# Tensors, and sizes: of the tensor that they encode, and of what its windows lie in.
_Packed = tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]
# PyTorch's description of a saved tensor of a compiled graph: its node in the forward graph
# (``_node``), that graph (``_fw_graph``), and the backward graph (``_bw_graph``), whose outputs are
# gradients in the order of inputs.
Context = Any
_CONTEXT = "torch._functorch._aot_autograd.graph_compile"


def tracing() -> Context | None:
    """Return the context of the hook that is being inlined; ``None`` in eager mode."""
    module = sys.modules.get(_CONTEXT)
    return None if module is None else module._get_saved_tensor_hook_context()


def kind_of(
    row: Row,
    relatives: Iterable[Sequence[Any]],
    options: ActivationOptions,
    *,
    has_gradient: bool,
) -> str:
    """Return how a tensor may be stored: ``lossy``, ``lossless``, or ``exact``.

    Args:
        row: The tensor's row.
        relatives: Shapes that views give to the same elements.
        options: Selects the floats to compress.
        has_gradient: Whether a gradient is computed for it.
    """
    is_byte = row.dtype.is_floating_point and row.dtype.itemsize == 1  # float8 is small already
    if row.raw_bytes < max(options.min_bytes, 1) or is_byte:
        return "exact"
    if not row.dtype.is_floating_point or not has_gradient:
        return "lossless"  # integers, masks; inputs and statistics, which are seldom smaller
    if row.function in SENSITIVE:
        return "exact"
    # Flattened features of a classifier have one row per sample; tokens have more.
    least = max(options.min_dims, 1)
    is_tokens = len(row.shape) > 1 and any(
        len(shape) >= least and size_hint(shape[0]) < row.shape[0] for shape in relatives
    )
    return "lossy" if len(row.shape) >= least or is_tokens else "lossless"


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

    def pack(self, tensor: Tensor, context: Context) -> Tensor | _Packed:
        """Return the packed form of a tensor for the forward graph, or the tensor unchanged."""
        node = context["_node"]
        name = _module_of(node)
        producer, relatives = _producer(node)
        row = self.rows[name, node.name] = Row.of(name, _name(producer), tensor)
        row.compiled = True
        if not (producer.op == "placeholder" or tensor.dtype == torch.float64):
            # Secondary results are masks and statistics, such as the logsumexp of attention.
            has_gradient = not _is_second_result(producer) and node in _differentiable(
                context["_fw_graph"], context["_bw_graph"]
            )
            row.kind = kind_of(row, relatives, self._options, has_gradient=has_gradient)
        if row.kind == "lossy" and _is_needed_exactly(node.name, context["_bw_graph"]):
            row.kind = "exact"
        order, windows = order_of(tensor.stride()), _windows_of(node)
        # Symbolic sizes reach the backward graph only as separate values.
        sizes: tuple[int, ...] = ()
        parts: tuple[Tensor, ...]
        if row.kind == "lossy":
            row.error_bound = math.nan
            dims = _normalized_dims(node) if isinstance(self._bound, RelativeStd) else []
            parts = operators.pack_floats(tensor, order, dims, self._width(node), self._bound)
        elif row.kind == "lossless" and tensor.dtype == torch.bool:
            parts = (operators.pack_mask(tensor, order),)
        elif row.kind == "lossless" and windows is not None:
            parts, sizes = (operators.pack_index(tensor, order, windows),), windows.sizes
        else:
            row.kind = "exact"
            return tensor
        row.stored_bytes = sum(Row.of("", "", part).raw_bytes for part in parts)
        return parts, tuple(tensor.shape), sizes

    def unpack(self, packed: Tensor | _Packed, context: Context) -> Tensor:
        """Compute the tensor from its packed form, in the backward graph."""
        if isinstance(packed, Tensor):
            return packed
        parts, shape, sizes = packed
        node = context["_node"]
        like = node.meta["val"]
        order, windows = order_of(like.stride()), _windows_of(node)
        if len(parts) > 1:
            width = self._width(node)
            return operators.unpack_floats(parts, shape, order, like.dtype, width, self._bound)
        if like.dtype == torch.bool or windows is None:
            return operators.unpack_mask(parts[0], shape, order)
        return operators.unpack_index(parts[0], shape, order, windows._replace(sizes=sizes))

    def _width(self, node: fx.Node) -> Width:
        return width_of(self._bound, _name(_producer(node)[0])) if self._use_bits else BYTE


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


def _is_needed_exactly(name: str, backward: fx.Graph) -> bool:
    """Return whether a backward graph computes something of a saved tensor that must be exact."""
    saved = next(iter(node for node in backward.nodes if node.name == name), None)
    if saved is None:
        return True
    direct, inexact = {saved}, {saved}
    users: set[str] = set()
    for node in backward.nodes:
        if inexact.isdisjoint(node.all_input_nodes):
            continue
        if _is_ruined(node, direct, inexact):
            return True
        inexact.add(node)
        if not direct.isdisjoint(node.all_input_nodes):
            if _name(node) in VIEWS:
                direct.add(node)
            else:
                users.add(_name(node))
    # A gate is exact if nothing else is done with it: see consumers.GATES.
    return users <= _GATES


def _is_ruined(node: fx.Node, direct: set[fx.Node], inexact: set[fx.Node]) -> bool:
    name, args = _name(node), node.args
    if name in _COMPARISONS:
        return bool(args[1] != 0)
    if name.endswith("backward"):
        is_tolerant = name in _GATES or any(part in name for part in _TOLERANT)
        if name == "thresholdbackward":
            is_tolerant = bool(args[2] == 0)
        return not (is_tolerant or inexact.isdisjoint(args[1:]))
    if name == "pow":
        exponent = args[1]
        return not (isinstance(exponent, int | float) and exponent >= 1)
    if name == "div":
        return args[1] in inexact
    if name == "sub":  # of an error, which may be far smaller than both
        both = [arg for arg in args[:2] if isinstance(arg, fx.Node)]
        shapes = [arg.meta["val"].shape for arg in both]
        are_saved = all(arg in direct or arg.op == "placeholder" for arg in both)
        return len(both) == 2 and are_saved and shapes[0] == shapes[1]
    return name in _RUINED


def _normalized_dims(node: fx.Node) -> list[int]:
    """Return the dimensions over which an operation normalizes a node; none if it does not."""
    found = (_dims_of(user, node) for user in node.users)
    return next(filter(None, found), [])


def _dims_of(user: fx.Node, node: fx.Node) -> list[int]:
    name, args = _name(user), user.args
    shape = node.meta["val"].shape
    count = len(shape)
    every: list[int] = list(range(count))
    some: Any = args[1] if len(args) > 1 else ()
    factors = [arg for arg in args if isinstance(arg, fx.Node) and _name(arg) == "rsqrt"]
    if name in ("nativelayernorm", "fusedrmsnorm"):
        every = every[count - len(some) :]
    elif "batchnorm" in name and args[0] is node:
        every.remove(1)
    elif name == "nativegroupnorm":
        every = every[2:]
    elif name == "varmean":
        every = list(some)
    elif name == "mul" and factors and factors[0].meta["val"].shape[-1] == 1:
        every = every[-1:]
    elif name in VIEWS and isinstance(user.meta["val"], Tensor):
        return _dims_behind(user, shape)
    else:
        every = []
    return every


def _dims_behind(view: fx.Node, shape: torch.Size) -> list[int]:
    """Return the same if the last dimensions of a view, which are normalized, are the node's."""
    dims, sizes = _normalized_dims(view), view.meta["val"].shape
    first, ahead = min(dims, default=-1), len(sizes) - len(shape)
    if first >= max(ahead, 0) and sizes[first:] == shape[first - ahead :]:
        return [dim - ahead for dim in dims]
    return []


def graph_of(function: Any) -> fx.GraphModule:
    """Return a GraphModule with a single call, which PyTorch considers inlineable."""
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("saved"),)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    # Eager code calls it without the graph; the class is this module's own.
    type(module).__call__ = staticmethod(function)  # type: ignore[method-assign]
    return module


def _windows_of(node: fx.Node) -> Windows | None:
    """Return the windows that a node's indices lie in; ``None`` if it does not compute any."""
    if not _is_second_result(node) or _name(node) not in _POOLS:
        return None
    pool = node.all_input_nodes[0]
    names = ("kernel_size", "stride", "padding", "dilation")
    given: dict[str, Any] = {"stride": (), "padding": (0,), "dilation": (1,)}
    given |= dict(zip(names, pool.args[1:], strict=False)) | pool.kwargs
    return Windows.of(given.__getitem__, pool.all_input_nodes[0].meta["val"].shape)


def _producer(node: fx.Node) -> tuple[fx.Node, list[torch.Size]]:
    """Return the node that computes a node's values, and the shapes that views give them."""
    views = [user for user in node.users if _name(user) in VIEWS]
    while _name(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
        views.append(node)
    values = [view.meta["val"] for view in views]
    return node, [value.shape for value in values if isinstance(value, Tensor)]


def _name(node: fx.Node) -> str:
    """Return the operation's name without its overload: ``relu`` for ``aten.relu.default``."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    packet = getattr(node.target, "overloadpacket", node.target)
    return canonical(getattr(packet, "__name__", ""))


def _is_second_result(node: fx.Node) -> bool:
    """Return whether a node is a secondary result of its operation."""
    return node.target is operator.getitem and bool(node.args[1])


def _module_of(node: fx.Node) -> str:
    """Return the name of the module that a node comes from."""
    stack = node.meta.get("nn_module_stack") or {"": ("",)}
    path = next(reversed(stack.values()))[0]
    name: str = path.rpartition("]")[2].removeprefix("._orig_mod").lstrip(".")
    return name
