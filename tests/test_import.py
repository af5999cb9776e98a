"""What `import pcrshard` brings, and what an installation has."""

import pathlib

from support import run_python

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


def test_types_are_shipped():
    """A type checker of a user sees ours."""
    folder = pathlib.Path(pcrshard.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "__init__.pyi").exists()
    assert (folder / "native" / "_core.pyi").exists()
