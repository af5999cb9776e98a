"""Modules that take a second to import, which only the process that runs their tests spends."""

import warnings

import pytest


class Later:
    """A module that is imported when a test first reads a name in it; skips the test without it."""

    def __init__(self, name, reason=None):
        self._name, self._reason = name, reason

    def __getattr__(self, name):
        if name.startswith("_"):  # pytest asks for these when it collects
            raise AttributeError(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = pytest.importorskip(self._name, reason=self._reason)
        return getattr(module, name)
