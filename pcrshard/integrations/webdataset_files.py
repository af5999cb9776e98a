"""The samples or files of a shard in WebDataset's form; does not require WebDataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import storage
from ..reading.prefix import Prefix, number_lists
from ..redaction import redact_url

Handler = Callable[[Exception], bool]
Samples = Iterator[dict[str, Any]]


@dataclass
class ShardFiles:
    """The samples or files of one shard, by WebDataset's handler and its functions for files.

    Attributes:
        url: The shard's URL, as given.
        handler: Called with each error.
        select_files: Selects files by name, after ``rename_files``; all by default.
        rename_files: Renames files.
        last_error: The last error passed to the handler.
        handler_raised: Whether the handler raised.
    """

    url: str
    handler: Handler
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    last_error: Exception | None = None
    handler_raised: bool = False

    def samples(self, loaded: Prefix) -> Samples:
        """Yield what ``group_by_keys`` would yield from :meth:`files`, without file functions."""
        about = self._about(loaded)
        has_lists = bool(loaded.index.schema.lists)
        for sample in loaded.samples(on_error=self.on_error):
            yield (number_lists(sample) if has_lists else sample) | about

    def files(self, loaded: Prefix) -> Samples:
        """Yield what ``tar_file_expander`` would yield."""
        about = self._about(loaded)
        # Unselected files are not read.
        for sample in loaded.samples(select=self._is_selected, on_error=self.on_error):
            key = sample.pop("__key__")
            for field, data in number_lists(sample).items():
                yield {"fname": self._name(key, field), "data": data, **about}

    def _about(self, loaded: Prefix) -> dict[str, str]:
        path = loaded.shard.url
        local = {"__local_path__": path} if storage.is_local(path) else {}
        return {"__url__": redact_url(self.url), **local}

    def _name(self, key: str, field: str) -> str:
        name = f"{key}.{field}"
        return name if self.rename_files is None else self.rename_files(name)

    def _is_selected(self, key: str, field: str) -> bool:
        return self.select_files is None or self.select_files(self._name(key, field))

    def on_error(self, error: Exception) -> bool:
        """Call the handler, which raises or returns whether to continue."""
        self.last_error = error
        error.args += (redact_url(self.url),)
        self.handler_raised = True
        go_on = self.handler(error)
        self.handler_raised = False
        return bool(go_on)
