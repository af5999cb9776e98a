"""Builds ``pcrshard.native._core``; setup.py names it in ``cffi_modules``.

To run manually, from the project's root: ``python pcrshard/native/build_native.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

# Paths are relative to the project's root, because setuptools refuses absolute sources.
SOURCE_DIR = Path("pcrshard/native/src")
HEADER = (
    Path(__file__).resolve().parent / "src" / "pcr.h"
    if "__file__" in globals()
    else SOURCE_DIR / "pcr.h"
)
# -ffp-contract: products and sums are rounded separately, so that every machine draws the same
# crops.
_COMPILE_ARGS = ["-std=c11", "-O3", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]


def public_declarations(header: str) -> str:
    """Return the public header without preprocessor lines, which cffi cannot parse."""
    return re.sub(r"^#.*$", "", header, flags=re.MULTILINE)


def _sources(pattern: str) -> list[str]:
    return [str(SOURCE_DIR / path.name) for path in sorted(HEADER.parent.glob(pattern))]


def make_builder() -> FFI:
    """Return the cffi builder of the extension, with every C file of the source folder."""
    builder = FFI()
    builder.cdef(public_declarations(HEADER.read_text()))
    builder.set_source(
        "pcrshard.native._core",
        '#include "pcr.h"',
        sources=_sources("*.c"),
        depends=_sources("*.h"),
        include_dirs=[str(SOURCE_DIR)],
        extra_compile_args=_COMPILE_ARGS,
        extra_link_args=["-pthread"],
        libraries=["m"],
    )
    return builder


ffibuilder = make_builder()

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=str(HEADER.parents[3]), verbose=True)
