"""Builds the native core; everything else is in setup.cfg."""

import sys
import sysconfig

import setuptools

if sys.platform == "win32":
    raise SystemExit(
        "pcrshard does not run on Windows: it relies on POSIX threads, file locks and atomic "
        "replacement of open files. Use the Windows Subsystem for Linux (WSL)."
    )

# Free-threaded CPython has no limited API yet: one wheel for each of its versions.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")

setuptools.setup(
    cffi_modules=["pcrshard/native/build_native.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
