"""Fixtures of the native tests, and an independent oracle: libjpeg with block smoothing off."""

import ctypes
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from oracle import PHOTO_STEP, scan_ends, standard_scans

from pcrshard import native


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """oracle(jpeg, color=0|1|2, scale=1|2|4|8) decodes with libjpeg; None where it refuses."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    library = tmp_path_factory.mktemp("oracle") / "oracle.so"
    source = str(Path(__file__).parent / "oracle.c")
    if compiler is None:
        pytest.skip("no C compiler for the libjpeg oracle")
    built = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), source, "-ljpeg"], check=False
    )
    if built.returncode:
        pytest.skip("the libjpeg oracle does not build: install libjpeg62-turbo-dev")
    lib = ctypes.CDLL(str(library))

    def decode(jpeg, color=0, scale=1):
        pixels, shape = ctypes.c_void_p(), (ctypes.c_int * 3)()
        if (
            lib.oracle_decode(
                jpeg, ctypes.c_ulong(len(jpeg)), color, scale, ctypes.byref(pixels), shape
            )
            < 0
        ):
            return None
        out = np.ctypeslib.as_array(
            ctypes.cast(pixels, ctypes.POINTER(ctypes.c_uint8)), tuple(shape)
        ).copy()
        lib.oracle_free(pixels)
        return out

    return decode


@pytest.fixture(scope="session")
def photos(data_folder):
    """(name, bytes) of photographs of every set, every PHOTO_STEP-th one."""
    with tarfile.open(data_folder / "photos.tar") as tar:
        members = [m for m in tar.getmembers() if m.isfile()][::PHOTO_STEP]
        return [(m.name, tar.extractfile(m).read()) for m in members]


@pytest.fixture(scope="session")
def odd_files(data_folder):
    """The odd, tricky and broken files."""
    files = (data_folder / "odd").iterdir()
    return sorted(path for path in files if path.suffix.lower().startswith(".jp"))


@pytest.fixture(scope="session")
def progressive(photos):
    """(name, source, prefixes): photographs in the standard script, cut after every scan."""
    out = []
    for name, source in photos:
        whole = native.rescan(source, standard_scans(source)).jpeg
        out.append((name, source, [whole[:end] for end in scan_ends(whole)]))
    return out
