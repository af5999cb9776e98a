"""Every floating-point type goes to float64 and back without losing a bit."""

import numpy as np
import pytest
import torch

from pcrshard.errorbound import FLOAT_TYPES


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_words_of_a_small_type_come_back(name):
    """Each finite or infinite number of a 16-bit type is restored from float64 exactly."""
    kind = FLOAT_TYPES[name]
    words = np.arange(1 << 16, dtype=np.uint16)
    values = kind.widen(words)
    known = ~np.isnan(values)
    assert np.array_equal(kind.narrow(values[known]), words[known])


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_values_and_limits_are_those_of_torch(name):
    """Torch, an independent implementation, reads the same values from the same bits."""
    kind, info = FLOAT_TYPES[name], torch.finfo(getattr(torch, name))
    limits = (kind.smallest_normal, kind.largest, kind.half_ulp)
    assert limits == (info.smallest_normal, info.max, info.eps / 2)
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(getattr(torch, name))
    words = tensor.view(torch.uint8).numpy().view(kind.word)
    assert np.array_equal(kind.widen(words), tensor.double().numpy())


def test_rounding_to_bfloat16_is_that_of_torch():
    """Rounding is to nearest, ties to even, as everywhere else."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    ties = (torch.arange(1000, dtype=torch.int32) * 0x8000 + 0x3F800000).view(torch.float32)
    values = torch.cat([values, ties])
    expected = values.bfloat16().view(torch.uint8).numpy().view(np.uint16)
    assert np.array_equal(FLOAT_TYPES["bfloat16"].narrow(values.double().numpy()), expected)
