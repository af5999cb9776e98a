"""Progressive Compressed Records as WebDataset shards: read only the fidelity that training needs.

``import pcrshard`` adds ``.pcr_scan(k)`` to ``wds.WebDataset``. Every other name is in
``__init__.pyi`` and loaded at first use, so that the import takes a tenth of a second.
"""

from __future__ import annotations

import importlib

import lazy_loader
import wrapt

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in _names if name != "hf"]  # star imports work without datasets


# WebDataset imports torch, which takes two seconds that `pcrshard info` or an encoding worker
# should not spend. So the methods are added when the user imports it, before or after pcrshard.
@wrapt.when_imported("webdataset")
def _add_fluent_methods(_webdataset: object) -> None:
    importlib.import_module(".integrations.webdataset", __name__)
