"""Strides survive."""

import pytest
import torch

from pcrshard.activation.layout import flatten, layout_of, restore

BASE = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
CASES = {
    "contiguous": BASE,
    "channels_last": BASE.contiguous(memory_format=torch.channels_last),
    "transposed": BASE.transpose(1, 3),
    "slice": BASE[:, 1:, ::2],
    "offset": BASE.flatten()[7:31].view(4, 6),
    "one": BASE[:1, :, :1],
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "empty slice": BASE[:, :0],
}


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_comes_back_with_its_strides(name):
    """Dense in any order, with gaps, with an offset, empty."""
    tensor = CASES[name]
    layout = layout_of(tensor)
    flat = flatten(tensor, layout)
    assert flat.shape == (tensor.numel(),)
    assert flat.is_contiguous()
    again = restore(flat.clone(), layout)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride()


def test_dense_memory_is_not_copied():
    """Whatever the order of the dimensions."""
    for name in ("contiguous", "channels_last", "transposed", "offset"):
        tensor = CASES[name]
        assert flatten(tensor, layout_of(tensor)).data_ptr() == tensor.data_ptr(), name


def test_overlapping_memory_is_refused():
    """Expanded tensors and windows would be larger than what they came from."""
    assert layout_of(BASE[:1].expand(7, 3, 4, 5)) is None
    assert layout_of(torch.arange(10.0).unfold(0, 4, 1)) is None
    assert layout_of(torch.empty(20).as_strided((2, 2), (3, 3))) is None
