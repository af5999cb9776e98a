"""Every dense tensor goes to words and back; what has no values of its own is refused by name."""

import numpy as np
import pytest
import torch

from pcrshard.checkpoint import tensors
from pcrshard.errors import CorruptCheckpoint, UnsupportedState

SHAPES = [(), (0,), (3,), (2, 0, 4), (5, 7)]


@pytest.mark.parametrize("name", tensors.ITEM_BYTES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_of_each_type_come_back(name, shape):
    """Bit for bit, with type and shape, scalars and empty ones included."""
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * tensors.ITEM_BYTES[name]
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    spec = tensors.spec_of(tensor)
    back = tensors.tensor_from(tensors.words_of(tensor).copy(), spec)
    assert spec == tensors.spec_from(name, list(shape))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert tensors.words_of(back).tobytes() == tensors.words_of(tensor).tobytes()


def test_a_snapshot_is_contiguous_and_does_not_change():
    """Transposed, sliced, expanded and channels_last tensors; training goes on meanwhile."""
    base = torch.randn(2, 3, 4, 5)
    views = [base.permute(3, 1, 0, 2), base[:, 1:], base[:1].expand(6, -1, -1, -1)]
    views.append(base.to(memory_format=torch.channels_last))
    expected = [view.tolist() for view in views]
    copies = tensors.snapshot(views)
    for view in (base, views[-1]):
        view.add_(1)
    assert all(copy.is_contiguous() for copy in copies)
    assert [copy.tolist() for copy in copies] == expected


def test_the_memory_of_snapshots_is_used_again():
    """Only when nothing refers to any tensor of an earlier one."""
    source = [torch.full((1000, 1000), float(i)) for i in range(3)]
    first = tensors.snapshot(source)
    kept = first[1]
    del first
    second = tensors.snapshot([torch.zeros(1000, 1000)] * 3)
    assert (kept == 1).all()
    place = second[0].data_ptr()
    del second
    assert tensors.snapshot(source)[0].data_ptr() == place


def test_lazy_conjugates_are_resolved():
    """A conjugated complex tensor holds its values, not those of its source."""
    tensor = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(tensors.snapshot([tensor.conj()])[0], tensor.conj().resolve_conj())


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.randn(3).as_subclass(Subclass),
        torch.nn.Parameter(torch.empty(3, device="meta")),
    ],
)
def test_tensors_without_values_of_their_own_are_refused(tensor):
    """The path tells which one; a DTensor is a subclass and goes through the distributed writer."""
    with pytest.raises(UnsupportedState, match=r"dense tensor with values.*key=model\.w"):
        tensors.check_storable(tensor, "model.w")


def test_arrays_of_objects_are_refused():
    """They could hold anything."""
    for array in (np.array([object()]), np.array(["text"]), np.array(["2020"], "M8[Y]")):
        with pytest.raises(UnsupportedState, match="cannot store arrays of type"):
            tensors.array_tensor(array, "a")


def test_big_endian_arrays_keep_their_values():
    """Files are little-endian, whatever an array was."""
    array = np.array([1, 256], ">i4")
    assert tensors.array_tensor(array, "a").tolist() == [1, 256]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("qint8", [1]),
        (None, [1]),
        ([], [1]),
        ("float32", 3),
        ("float32", [-1]),
        ("float32", [True]),
        ("float32", [1 << 60]),
        ("float32", [1] * 65),
        ("float32", ["1"]),
    ],
)
def test_hostile_types_and_shapes_are_refused(dtype, shape):
    """Before anything is computed from them."""
    with pytest.raises(CorruptCheckpoint, match="expected a tensor's"):
        tensors.spec_from(dtype, shape)
