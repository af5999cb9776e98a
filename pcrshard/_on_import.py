"""Do something when a package is imported, without importing it.

WebDataset brings torch, two seconds that ``pcrshard info`` or an encoding worker should not pay. So ``.pcr_scan`` is added
to WebDataset when the user imports it, before or after pcrshard.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def on_import(name: str, callback: Callable[[], object]) -> None:
    """Call ``callback`` after the top-level package ``name`` is imported; at once if it already is."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one package, by asking the other finders, and steps aside."""

    def __init__(self, name: str, callback: Callable[[], object]) -> None:
        self.name, self.callback = name, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.callback)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the real loader does, then calls back."""

    def __init__(self, loader: importlib.abc.Loader, callback: Callable[[], object]) -> None:
        self.loader, self.callback = loader, callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.callback()
