"""Builds the optional native core; everything else is in setup.cfg."""

import setuptools

setuptools.setup(cffi_modules=["pcrshard/native/build_native.py:ffibuilder"])
