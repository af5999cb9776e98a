"""What the tests of activations compare."""

import torch


def assert_within(values, back, bound, exact, units=0.5):
    """The bound with some units of rounding, zeros and signs, and exact values."""
    assert back.dtype == values.dtype
    torch.testing.assert_close(back[exact], values[exact], rtol=0, atol=0, equal_nan=True)
    wide, near = values[~exact].double(), back[~exact].double()
    assert torch.equal(wide.sign(), near.sign())
    room = units * near.abs() * torch.finfo(values.dtype).eps if values.element_size() == 2 else 0
    if values.dtype == torch.float16:
        room = room.clamp(min=2.0**-25)
    assert bool(((wide - near).abs() <= bound + room).all())


def assert_within_in_blocks(values, back, bound, most, units=1):
    """The same of (n,) values in the order of memory whose blocks of 64 have steps of their own: a
    block of outliers has the share 1 / most of its largest value as the bound; one with a NaN is
    all NaN, but for the extremes; infinity is exact.
    """
    values, back = (torch.nn.functional.pad(each, (0, -len(each) % 64)) for each in (values, back))
    has_nan = values.isnan().view(-1, 64).any(1).repeat_interleave(64)
    assert bool((back.isnan() | (back == values))[has_nan].all())
    assert int(back.isnan().sum()) > 32 * int(values.isnan().sum())
    finite = torch.where(values.isfinite(), values.double().abs(), 0).view(-1, 64)
    largest = finite.amax(1)
    limit = torch.where(largest > 2 * most * bound, largest / most, bound).repeat_interleave(64)
    for one in limit.unique().tolist():
        own = ~has_nan & (limit == one)
        assert_within(values[own], back[own], one, ~values[own].isfinite(), units)
    assert int((limit > bound).sum()) < len(values) / 200
