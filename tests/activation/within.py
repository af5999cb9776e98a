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
