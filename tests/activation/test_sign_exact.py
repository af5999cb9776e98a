"""Bound, sign and zero of every element, for every type."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.activation import sign_exact as module
from pcrshard.activation.sign_exact import FLOATS, bound_after_cast, dequantise, quantise

ROUNDINGS = ("nearest", "stochastic")


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def fused(request):
    """With the native core, and as on another device."""
    if request.param and not module.native.available:
        pytest.skip("pcrshard.native._core is not built")
    before = module.native.available
    module.native.available = request.param
    yield request.param
    module.native.available = before


def check(values, error_bound, rounding):
    """Assert everything that the quantiser promises; gives what was decoded."""
    quantised = quantise(values, error_bound, rounding)
    assert quantised is not None
    decoded = dequantise(quantised)
    assert decoded.dtype == values.dtype
    finite = values.isfinite()
    kept = values[~finite]
    assert torch.equal(decoded[~finite].nan_to_num(7.0), kept.nan_to_num(7.0))
    assert torch.equal(decoded == 0, values == 0)
    assert torch.equal(decoded[finite].sign(), values[finite].sign())
    error = (values[finite].double() - decoded[finite].double()).abs()
    assert (error <= bound_after_cast(error_bound, decoded[finite])).all()
    return decoded


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0])
def test_bound_sign_and_zero_are_exact(fused, dtype, rounding, scale):
    """All elements, heavy tails, NaN and infinity included."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(20_001, generator=generator, dtype=torch.float64) ** 3 * scale
    values[::3] = 0
    values[5] = math.nan
    values[7] = math.inf
    values[8] = -math.inf
    values = values.to(dtype)
    deviation = float(values[values.isfinite()].double().std())
    for share in (0.02, 0.1, 0.5):
        check(values, share * deviation, rounding)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=60),
    st.floats(2.0**-40, 2.0**40),
    st.sampled_from(FLOATS),
    st.sampled_from(ROUNDINGS),
)
def test_any_floats_and_any_bound(numbers, error_bound, dtype, rounding):
    """Subnormals, huge values, negative zeros: within the bound, or refused as a whole."""
    values = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    padded = torch.cat([values, torch.zeros(2000, dtype=dtype)])  # so that escapes are affordable
    for available in (True, False):
        before = module.native.available
        module.native.available = before and available
        try:
            if quantise(padded, error_bound, rounding) is None:
                assert module.step_of(error_bound, dtype) is None
            else:
                check(padded, error_bound, rounding)
        finally:
            module.native.available = before


def test_values_on_the_edges_of_bins_need_no_escapes(fused):
    """A mask of 0 and 1 whose ones lie between two bins stays one byte an element."""
    for denominator in range(2, 200):
        values = torch.ones(1000)
        values[::2] = 0
        quantised = quantise(values, 1 / denominator)
        assert quantised.index is None
        check(values, 1 / denominator, "nearest")


def test_native_and_torch_agree_bit_for_bit():
    """A tensor that moves between devices means the same."""
    if not module.native.available:
        pytest.skip("pcrshard.native._core is not built")
    for dtype in FLOATS:
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).to(dtype)
        quantised = quantise(values, 0.05)
        fast = dequantise(quantised)
        slow = module._meaning(quantised.codes, quantised.step, "nearest", dtype)
        kept = quantised.codes != module.ESCAPE
        assert torch.equal(fast[kept], slow[kept])


def test_stochastic_rounding_is_unbiased():
    """The mean over many draws is the value, small values included; the nearest is biased there."""
    value = 0.013
    values = torch.full((200_000,), value)
    decoded = check(values, 0.1, "stochastic")
    assert float(decoded.double().mean()) == pytest.approx(value, rel=0.02)
    assert float(check(values, 0.1, "nearest")[0]) == pytest.approx(0.1, rel=1e-3)


def test_stochastic_rounding_leaves_the_global_generator_alone():
    """Training with and without compression sees the same random numbers."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    quantise(torch.randn(1000, generator=generator), 0.1, "stochastic", generator)
    assert torch.equal(before, torch.get_rng_state())


def test_what_does_not_pay_is_refused():
    """A tensor of escapes, and bounds that the type cannot express."""
    assert quantise(torch.full((100,), math.nan), 0.1) is None
    assert quantise(torch.randn(100), 1e-44) is None
    assert quantise(torch.randn(100), 1e37) is None
    assert quantise(torch.randn(100).half(), 300.0) is None


def test_an_empty_tensor_is_no_special_case(fused):
    """Nothing in, nothing out."""
    assert dequantise(quantise(torch.empty(0), 0.1)).shape == (0,)
