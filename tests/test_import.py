"""What `import pcrshard` brings, and what an installation has."""

import pathlib

import pytest
from support import ROOT, run_python

import pcrshard


def test_the_import_brings_nothing_heavy():
    """Programs that only name a dataset do not wait for numpy, fsspec or a C library."""
    program = (
        "import sys; import pcrshard; "
        "print({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    said = run_python("-c", program)
    brought = {name for name in eval(said) if not name.startswith(("_", "distutils"))}
    # coverage tools and the finder of editable installations begin with an underscore
    assert brought <= {"lazy_loader", "pcrshard", "wrapt"}


def test_every_public_name_is_found():
    """A name that is loaded when it is used is there, and the same object each time."""
    assert pcrshard.hf.load_dataset
    for name in pcrshard.__all__:
        assert getattr(pcrshard, name) is getattr(pcrshard, name)
    assert set(dir(pcrshard)) - {"hf"} == set(pcrshard.__all__)


def test_listing_checkpoints_does_not_wait_for_torch(tmp_path):
    """``pcrshard checkpoint ls`` reads a manifest, which needs no tensors."""
    with pcrshard.DeltaStore(tmp_path) as store:
        store.save({"step": 1})
    program = (
        "import sys; from pcrshard.cli.main import main; "
        f"main(['checkpoint', 'ls', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    )
    assert run_python("-c", program).endswith("False\n")


def test_types_are_shipped():
    """A type checker of a user sees ours."""
    folder = pathlib.Path(pcrshard.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "__init__.pyi").exists()
    assert (folder / "native" / "_core.pyi").exists()


@pytest.mark.parametrize("attempt", range(3))
def test_threads_may_read_the_first_shard_together(attempt):
    """A loader's threads open shards as soon as it starts: none sees half-built types of another
    thread, which was a crash of the process.
    """
    program = f"""
import sys, threading
from pcrshard import Shard
sys.setswitchinterval(1e-6)
start = threading.Barrier(8)
def read():
    start.wait()
    Shard({str(ROOT / "tests" / "golden" / "v3" / "compact-000000.tar")!r}).load()
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""
    assert run_python("-c", program) == "read\n"
