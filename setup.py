"""Builds the native code; everything else is in setup.cfg."""

import os
import sysconfig

import setuptools

# Free-threaded CPython has no limited API yet: one wheel for each of its versions.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")

scatter = setuptools.Extension(
    "pcrshard.native._scatter",
    ["pcrshard/native/scattermodule.c"],
    depends=["pcrshard/native/src/avx2.h", "pcrshard/native/src/crc32c.h"],
    extra_compile_args=["-std=c11", "-O3", "-Werror=implicit-function-declaration"],
    py_limited_api=LIMITED,
    optional=True,
)

setuptools.setup(
    cffi_modules=["pcrshard/native/build_native.py:ffibuilder"],
    ext_modules=[] if os.name == "nt" else [scatter],  # there are no scattered reads
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
