"""What comes back of any tensor that autograd saves: the bound, zeros, signs, masks, memory."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from within import assert_within

from pcrshard import compress_activations, zstd
from pcrshard.activation import Absolute, ActivationOptions, quantizer

CODECS = ("zstd", "bits", "int8")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def options(**others):
    return ActivationOptions(min_bytes=0, min_dims=1, **others)


def saved(values, bound=0.05, codec="zstd", **others):
    """(row, what backward gets of a tensor that an operation saves)."""
    leaf = values.clone().requires_grad_()
    saver = compress_activations(nn.Identity(), bound, codec, options(**others))
    with saver:
        out = (leaf * 1.0).pow(2)
    (row,) = saver.report().rows
    return row, out.grad_fn._saved_self.detach()


def saved_exactly(values, codec="zstd"):
    """The same of a tensor without gradient."""
    saver = compress_activations(nn.Identity(), 0.05, codec, options())
    other = torch.ones(values.shape, requires_grad=True)
    with saver:
        if values.dtype == torch.bool:
            back = torch.where(values, other, 0.0).grad_fn._saved_condition
        elif values.dtype.is_floating_point:
            back = (other * values).grad_fn._saved_other
        else:
            back = other.expand(9, -1).gather(0, values[None]).grad_fn._saved_index[0]
    (row,) = [row for row in saver.report().rows if row.dtype == values.dtype]
    return row, back


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("codec", "rounding"),
    [*((codec, "nearest") for codec in CODECS), ("zstd", "stochastic"), ("bits", "stochastic")],
)
def test_bound_sign_and_zero_are_exact(dtype, rounding, codec):
    """ReLU's backward mask is right, and no value is farther off than promised."""
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    values = torch.where(values > 0, values, values * (values < -1)).to(dtype)
    values[7:10] = torch.tensor([math.nan, math.inf, 6e4])
    row, back = saved(values, 0.1, codec, rounding=rounding)
    assert row.kind == "lossy"
    assert_within(values, back, row.error_bound, ~values.isfinite())


@settings(max_examples=50)
@given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=50),
    error_bound=st.floats(1e-30, 1e30),
    dtype=st.sampled_from(FLOATS),
    codec=st.sampled_from(CODECS),
)
def test_any_floats_and_any_bound(numbers, error_bound, dtype, codec):
    """Subnormals, huge values, negative zeros: within the bound, or kept bit for bit."""
    values = torch.tensor(numbers).to(dtype)
    row, back = saved(values, Absolute(error_bound), codec)
    assert_within(values, back, row.error_bound, ~values.isfinite())


def test_the_native_core_and_pytorch_agree_bit_for_bit(monkeypatch):
    """A tensor that moves between devices means the same."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    for dtype in FLOATS:
        _, fast = saved(values.to(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(quantizer, "has_core", lambda _: False)
            _, slow = saved(values.to(dtype))
        assert torch.equal(fast, slow)


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    """Blocks of large tensors, packed and unpacked together; an error in one is raised."""
    values = torch.randn(9_000_001, generator=torch.Generator().manual_seed(0)).relu()
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(saved(values)[1])
    assert torch.equal(*found)
    monkeypatch.setattr(zstd, "compress", lambda *_: {}["no frame"])
    with pytest.raises(KeyError, match="no frame"):
        saved(values)


def test_parts_of_a_projection_are_read_where_they_lie():
    """Queries, keys and values of attention have gaps; the bound holds for each part's elements."""
    tokens = torch.randn(40, 25, 3, 2, 64, generator=torch.Generator().manual_seed(0))
    tokens[:, :, 1] *= 10
    saver = compress_activations(nn.Identity(), options=options())
    with saver:
        parts = (tokens.requires_grad_() * 1.0).permute(2, 0, 3, 1, 4).unbind()
        outs = [part.pow(2) for part in parts]
    for row, part, out in zip(saver.report().rows, parts, outs, strict=True):
        values, back = part.detach(), out.grad_fn._saved_self.detach()
        assert row.error_bound == pytest.approx(0.05 * float(values.std()), rel=0.02)
        assert_within(values, back, row.error_bound, ~values.isfinite())


def test_views_of_the_same_elements_share_what_is_stored():
    """Tokens of one layer are the matrix of another, packed once, until they change in place."""
    values = torch.randn(8, 16, 64, requires_grad=True)
    saver = compress_activations(nn.Identity(), options=options())
    with saver:
        tokens = values * 1.0
        outs = [tokens.pow(2), tokens.flatten(0, 1).pow(2), tokens.transpose(0, 1).pow(2)]
    assert len(saver.report().rows) == 1
    first = outs[0].grad_fn._saved_self
    assert torch.equal(outs[1].grad_fn._saved_self, first.flatten(0, 1))
    assert torch.equal(outs[2].grad_fn._saved_self, first.transpose(0, 1))
    with saver:
        tokens.mul_(3)
        changed = tokens.pow(2)
    assert torch.allclose(changed.grad_fn._saved_self, 3 * first, atol=0.4)


def test_stochastic_rounding_is_unbiased_and_leaves_the_global_generator_alone():
    """The mean of many errors is 0; training draws the same random numbers as without."""
    state = torch.get_rng_state()
    values = torch.full((200_000,), 0.013)
    values[0] = 1.0
    _, back = saved(values, Absolute(0.05), rounding="stochastic")
    assert float(back[1:].mean()) == pytest.approx(0.013, rel=0.02)
    assert torch.equal(torch.get_rng_state(), state)


def test_outliers_do_not_widen_the_bound():
    """A few huge values (massive activations) are exact; the others keep a useful bound."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values[:10] = 10_000
    row, back = saved(values, codec="int8")
    assert row.error_bound < 0.05 * 8 * 1.05
    assert torch.equal(back[:10], values[:10])
    assert row.stored_bytes < values.nbytes / 3.9


def test_a_tensor_that_would_not_shrink_is_kept_as_it_is():
    """Escapes everywhere, or bounds that the type cannot express."""
    for values, bound in ((torch.randn(500), 1e-4), (torch.randn(500).half(), 1e-9)):
        row, back = saved(values, Absolute(bound))
        assert row.kind == "exact"
        assert torch.equal(back, values)


@settings(max_examples=50)
@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=100),
    numbers=st.lists(st.integers(0, 8), min_size=1, max_size=100),
    floats=st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, math.nan, math.inf]), min_size=1),
    dtype=st.sampled_from(FLOATS),
    codec=st.sampled_from(CODECS),
)
def test_what_has_no_gradient_comes_back(flags, numbers, floats, dtype, codec):
    """Every bit of masks, indices, and floats: NaN, negative zero, nothing but zeros."""
    for values in (torch.tensor(flags), torch.tensor(numbers), torch.tensor(floats, dtype=dtype)):
        _, back = saved_exactly(values, codec)
        assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))


POOLS = {
    "2d": (functional.max_pool2d, (3, 4, 23, 29), (2,)),
    "2d, overlapping": (functional.max_pool2d, (3, 4, 23, 29), (3, 2, 1)),
    "2d, dilated, rounded up": (functional.max_pool2d, (3, 4, 23, 29), (3, 1, 1, 2, True)),
    "2d, oblong": (functional.max_pool2d, (4, 23, 29), ((3, 5), (2, 1), (1, 2), (1, 2))),
    "2d, too large for a byte": (functional.max_pool2d, (3, 4, 40, 40), (17, 3)),
    "3d": (functional.max_pool3d, (2, 3, 9, 9, 9), (3, 2, 1)),
    "1d": (functional.max_pool1d, (2, 8, 90), (3, 2)),
    "adaptive": (functional.adaptive_max_pool2d, (3, 4, 23, 29), (5,)),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_has_its_gradients_from_places_in_windows(name, codec):
    """Windows of any kind, in any order of memory: the gradient is that of the exact indices."""
    pool, shape, settings = POOLS[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()
    for layout in (torch.contiguous_format, torch.channels_last):
        if len(shape) == 4:
            values = values.contiguous(memory_format=layout)
        leaf = values.clone().requires_grad_()
        found = []
        saver = compress_activations(nn.Identity(), 0.05, codec, options())
        for context in (contextlib.nullcontext(), saver):
            with context:
                out = pool(leaf * 1.0, *settings)
            found.append(torch.autograd.grad(out.square().sum(), leaf)[0])
        assert torch.equal(*found)
        (row,) = [row for row in saver.report().rows if row.dtype == torch.int64]
        assert row.kind == "lossless"
        if "too large" not in name and name != "adaptive":
            assert row.raw_bytes > (7 if name == "3d" else 13) * row.stored_bytes
        assert saver.ledger.live_bytes == 0


@pytest.mark.parametrize(("codec", "ratio"), [("zstd", 25), ("int8", 15)])
def test_indices_and_masks_shrink(codec, ratio):
    """int64 indices of max-pooling, boolean masks, and CPU dropout's masks of two floats."""
    values = torch.randn(8, 8, 32, 32, requires_grad=True)
    saver = compress_activations(nn.Identity(), 0.05, codec, ActivationOptions(min_bytes=0))
    with saver:
        out = functional.max_pool2d(values * 1.0, 2)
        torch.where(values > 0, values * 1.0, 0.0)
        functional.dropout(values * 1.0, 0.1)
    rows = {row.dtype: row for row in saver.report().rows if row.kind == "lossless"}
    assert rows[torch.int64].raw_bytes > ratio * rows[torch.int64].stored_bytes
    assert rows[torch.bool].raw_bytes > 6 * rows[torch.bool].stored_bytes
    assert rows[torch.float32].raw_bytes > 25 * rows[torch.float32].stored_bytes
    out.sum().backward()


def test_codecs_differ_in_size_only():
    """Every codec gives back the same values; zstd is smaller than bits, bits than int8."""
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).relu()
    found = {codec: saved(values, 0.1, codec) for codec in ("int8", "bits", "zstd")}
    first, second, third = (row.stored_bytes for row, _ in found.values())
    assert first > 1.2 * second > 1.4 * third
    assert all(torch.equal(back, found["int8"][1]) for _, back in found.values())
