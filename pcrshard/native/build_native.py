"""Builds ``pcrshard.native._core``; setup.py names it in ``cffi_modules``.

To run manually, from the project's root: ``python pcrshard/native/build_native.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

# Relative to the project's root, because setuptools refuses absolute sources.
_FOLDER = Path("pcrshard/native/src")
# cffi cannot parse preprocessor lines.
_HEADERS = ("pcr.h", "numbers.h")
_DECLARATIONS = re.sub(
    r"^#.*$", "", "".join((_FOLDER / name).read_text() for name in _HEADERS), flags=re.MULTILINE
)

ffibuilder = FFI()
ffibuilder.cdef(_DECLARATIONS)
ffibuilder.set_source(
    "pcrshard.native._core",
    "".join(f'#include "{name}"\n' for name in _HEADERS),
    sources=sorted(map(str, _FOLDER.glob("*.c"))),
    depends=sorted(map(str, _FOLDER.glob("*.h"))),
    include_dirs=[str(_FOLDER)],
    # -ffp-contract: products and sums are rounded separately, so that every machine draws the same
    # crops.
    extra_compile_args=["-std=c11", "-O3", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"],
    extra_link_args=["-pthread"],
    libraries=["m"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
