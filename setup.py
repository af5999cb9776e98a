"""Builds the optional native code; everything else is in setup.cfg."""

import os
import sysconfig

import setuptools

scatter = setuptools.Extension(
    "pcrshard.native._scatter",
    ["pcrshard/native/scattermodule.c"],
    depends=["pcrshard/native/src/avx2.h", "pcrshard/native/src/crc32c.h"],
    extra_compile_args=["-std=c11", "-O3", "-Werror=implicit-function-declaration"],
    py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
    optional=True,
)

setuptools.setup(
    cffi_modules=["pcrshard/native/build_native.py:ffibuilder"],
    ext_modules=[] if os.name == "nt" else [scatter],  # there are no scattered reads
)
