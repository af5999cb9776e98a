"""Run PyTorch's own tests of distributed checkpoints on DeltaStorageWriter and DeltaStorageReader.

    git clone --depth 1 https://github.com/pytorch/pytorch
    python scripts/torch_checkpoint_tests.py pytorch [-k save ...]

The tests run on the CPU with gloo. ``FileSystemWriter`` and ``FileSystemReader`` are replaced,
GPU-only skips are removed, and processes are forked instead of spawned. Tests that move models to
a GPU fail. Requires ``pip install expecttest pytest``.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SUBSTITUTES = """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._shard import sharded_tensor

from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader, DeltaStorageWriter


class IdsAreFolders:
    def __init__(self, path, **_):
        super().__init__(path)

    def reset(self, checkpoint_id=None):
        pass


class FileSystemWriter(IdsAreFolders, DeltaStorageWriter):
    pass


class FileSystemReader(IdsAreFolders, DeltaStorageReader):
    pass


for module in (dcp, filesystem, _storage_utils):
    module.FileSystemWriter, module.FileSystemReader = FileSystemWriter, FileSystemReader
common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
common_distributed.requires_nccl = lambda: lambda test: test
common_distributed.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(
    torch.multiprocessing.get_context("fork").Process
)
by_nccl = sharded_tensor.with_comms
sharded_tensor.with_comms = lambda test=None, init_rpc=False, backend="gloo": by_nccl(
    test, init_rpc=init_rpc, backend="gloo"
)
"""


def main(checkout, *options):
    """Run the tests of a checkout with options of pytest; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        tests = pathlib.Path(folder) / "checkpoint"
        shutil.copytree(pathlib.Path(checkout) / "test/distributed/checkpoint", tests)
        (tests / "substitutes.py").write_text(SUBSTITUTES)
        for path in tests.rglob("test_*.py"):
            path.write_text("import substitutes\n" + path.read_text())
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        environment = os.environ | {"PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
        command.append(str(tests))
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
