"""The samples or files of a shard in WebDataset's form; does not require WebDataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import storage
from ..reading.prefix import Prefix, number_lists
from ..redaction import redact_url

Handler = Callable[[Exception], bool]
Samples = Iterator[dict[str, Any]]
T = TypeVar("T")


@dataclass
class ShardFiles:
    """The samples or files of one shard, by WebDataset's handler and its functions for files.

    If a function raises, the handler decides whether to skip the file or the rest of the shard.

    Attributes:
        url: The shard's URL, as given.
        handler: Called with each error.
        select_files: Selects files by name.
        rename_files: Renames files.
        last_error: The last error passed to the handler.
        handler_raised: Whether the handler raised.
        stopped: Whether the handler stopped reading this shard.
    """

    url: str
    handler: Handler
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    last_error: Exception | None = None
    handler_raised: bool = False
    stopped: bool = False

    def samples(self, loaded: Prefix) -> Samples:
        """Yield what ``group_by_keys`` would yield from :meth:`files`, without file functions."""
        about = self._about(loaded)
        has_lists = bool(loaded.index.schema.lists)
        for sample in loaded.samples(on_error=self.on_error):
            yield (number_lists(sample) if has_lists else sample) | about
            if self.stopped:
                break

    def _about(self, loaded: Prefix) -> dict[str, str]:
        path = loaded.shard.url
        local = {"__local_path__": path} if storage.is_local(path) else {}
        return {"__url__": redact_url(self.url), **local}

    def files(self, loaded: Prefix) -> Samples:
        """Yield what ``tar_file_expander`` would yield."""
        about = self._about(loaded)
        # Unselected files are not read.
        for sample in loaded.samples(select=self._select, on_error=self.on_error):
            key = sample.pop("__key__")
            for field, data in number_lists(sample).items():
                if (name := self._rename(f"{key}.{field}")) is not None:
                    yield {
                        "fname": name,
                        "data": data,
                        **about,
                    }
            if self.stopped:
                break

    def on_error(self, error: Exception) -> bool:
        """Call the handler, which raises or returns whether to continue."""
        self.last_error = error
        error.args += (redact_url(self.url),)
        self.handler_raised = True
        go_on = self.handler(error)
        self.handler_raised = False
        return bool(go_on)

    def _rename(self, name: str) -> str | None:
        return name if self.rename_files is None else self._result(self.rename_files, name)

    def _select(self, key: str, field: str) -> bool:
        name = None if self.stopped else self._rename(f"{key}.{field}")
        if name is None or self.select_files is None:
            return name is not None
        return bool(self._result(self.select_files, name))

    def _result(self, function: Callable[[str], T], name: str) -> T | None:
        try:
            return function(name)
        except Exception as error:
            self.stopped = not self.on_error(error)
            return None
