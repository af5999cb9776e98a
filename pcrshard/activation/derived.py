"""Saved tensors that need no bytes, because others that are saved give them again.

A ReLU after BatchNorm and a normalization of rows are computed from the codes of their input, GELU
and SiLU from what is kept of theirs, and 1x1 convolutions from what the graph holds of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .codecs import Content
from .consumers import TOLERANT
from .entries import Entry, Saved
from .graph_nodes import operation
from .layout import MemoryLayout, flatten
from .normalized import Normalized

# Returns what a node has saved under a name, if these hooks packed it.
Find = Callable[[Any, str], Saved | None]


def of_activation(entry: Entry, find: Find, decode: Callable[[Entry], Tensor]) -> Content | None:
    """Return the result of the GELU or SiLU that computed an entry, from its argument."""
    node, dtype = entry.node, entry.row.dtype
    name = operation(node)
    source = find(node, "self")
    if source is None or source.entry.content is None or not _alike(entry, source.entry.layout):
        return None
    argument = source.entry
    how = {"approximate": node._saved_approximate} if name == "gelu" else {}
    function: Any = getattr(nn.functional, name)
    return Content(0, lambda: function(decode(argument), **how).to(dtype))


def of_norm(entry: Entry, find: Find) -> Content | None:
    """Return the result of a normalization, or of the ReLU after it, from codes of its input."""
    node, dtype = entry.node, entry.row.dtype
    is_relu = operation(node) == "relu"
    if is_relu:
        node = node.next_functions[0][0]
    for attribute in TOLERANT.get(operation(node), ()):
        source = find(node, attribute)
        if source is None or source.entry.reader != node._sequence_nr():
            continue
        content = source.entry.content
        if isinstance(content, Normalized) and _alike(entry, content.layout):
            return _affine(content, dtype, is_relu=is_relu)
    return None


def _affine(source: Normalized, dtype: torch.dtype, *, is_relu: bool) -> Content | None:
    norm, derive = source.norm, source.derive
    gain, offset = norm.gain, norm.offset
    if gain is None or offset is None or (is_relu and norm.threshold is None):
        return None
    return Content(0, lambda: derive(gain, offset, dtype, is_relu))


def of_convolution(entry: Entry) -> Content | None:
    """Return the result of a 1x1 convolution with more outputs than inputs and without a bias."""
    node, order = entry.node, entry.layout.order
    weight = node._saved_weight
    is_wide = weight.shape[0] > weight.shape[1] and weight.shape[2:].numel() == 1
    if not is_wide or node.next_functions[2][0] is not None:
        return None
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")

    def decode() -> Tensor:
        tensors = node._saved_input, node._saved_weight, None
        with torch.no_grad():
            values = torch.ops.aten.convolution(
                *tensors, *(getattr(node, f"_saved_{name}") for name in names)
            )
        return flatten(values, order)

    return Content(0, decode)


def _alike(entry: Entry, source: MemoryLayout) -> bool:
    """Return whether an entry has as many elements as its source, in the same order."""
    layout = entry.layout
    if layout.shape == source.shape:
        return layout.order == source.order
    are_plain = all(each.order == tuple(sorted(each.order)) for each in (layout, source))
    return are_plain and math.prod(layout.shape) == math.prod(source.shape)
