"""Elements of any fixed width are words of bits."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from states import same

from pcrshard.checkpoint import DeltaStore, export_safetensors
from pcrshard.errors import UnsupportedState
from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader, DeltaStorageWriter
from pcrshard.weightsync import WeightMirror, WeightPublisher

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
REFUSED = {
    torch.complex32, *(getattr(torch, f"bits{bits}") for bits in ("8", "16", "1x8", "2x4", "4x2")),
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)),
    torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4,
}  # fmt: skip


def tensors(dtype, step):
    """Tensors of a type, of which few elements differ from step to step."""
    generator = torch.Generator().manual_seed(0)
    # Bytes 0 and 1 are values of every type, bool included.
    raw = torch.randint(0, 2, (3, 40 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    raw[1, step * dtype.itemsize] ^= 1
    return {"w": raw.view(dtype), "one": raw[0, : dtype.itemsize].view(dtype)}


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - REFUSED, key=str), ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_every_type_passes_through_everything(tmp_path, dtype):
    """Stores, distributed checkpoints, weight sync and exports keep each type that there is."""
    with DeltaStore(tmp_path / "store") as store:
        publisher = WeightPublisher(tmp_path / "stream")
        mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
        for step in (1, 2):
            expected = tensors(dtype, step)
            store.save(expected, blocking=True)
            assert same(store.load(), expected)
            dcp.save(
                expected,
                storage_writer=DeltaStorageWriter(tmp_path / "dcp", precision="lossless"),
                no_dist=True,
            )
            found = tensors(dtype, 0)
            dcp.load(found, storage_reader=DeltaStorageReader(tmp_path / "dcp"), no_dist=True)
            assert same(found, expected)
            if dtype != torch.complex128:  # safetensors has none
                export_safetensors(store, -1, tmp_path / "model.safetensors")
                found = load_file(tmp_path / "model.safetensors")
                assert same(dict(sorted(found.items())), dict(sorted(expected.items())))
                publisher.publish(expected)
                mirror.update()
                found = mirror.tensors()
                assert same(dict(sorted(found.items())), dict(sorted(expected.items())))
                assert same(load_file(mirror.path)["w"], expected["w"])


@pytest.mark.parametrize("dtype", sorted(REFUSED, key=str), ids=str)
def test_types_without_fixed_width_are_refused(tmp_path, dtype):
    """Fractions of a byte and quantized values, which nobody saves, are errors with a name."""
    try:
        tensor = torch.empty(1, 8, dtype=torch.uint8).view(dtype)
    except RuntimeError:
        pytest.skip("torch makes no such tensors")
    with pytest.raises(UnsupportedState, match=r"key=w"):
        WeightPublisher(tmp_path / "stream").publish({"w": tensor})


def test_half_a_byte_is_no_file(tmp_path):
    """A scalar of two packed numbers, which safetensors files cannot hold, is refused by name."""
    packed = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(())
    with pytest.raises(UnsupportedState, match=r"no scalars.*key=w"):
        WeightPublisher(tmp_path / "stream").publish({"w": packed})


def test_a_sharded_tensor_names_the_remedy(tmp_path):
    """A DTensor, of which this rank has a part, is refused with the call that gathers it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        publisher = WeightPublisher(tmp_path / "stream")
        with pytest.raises(UnsupportedState, match=r"full_tensor\(\).*key=w"):
            publisher.publish({"w": sharded})
        assert publisher.publish({"w": sharded.full_tensor()}) == 1
    finally:
        dist.destroy_process_group()
