"""The samples of a shard as WebDataset gives them, or its files; it needs no WebDataset."""

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

    What the functions raise costs one file, or the rest of the shard: the handler decides.

    Attributes:
        url: The shard's URL, as it was given.
        handler: Is asked about each error.
        select_files: Says which files are wanted, by their name.
        rename_files: Gives files another name.
        last_error: The error that the handler was last asked about.
        handler_raised: Whether the handler raised.
        stopped: Whether the handler does not want to go on in this shard.
    """

    url: str
    handler: Handler
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    last_error: Exception | None = None
    handler_raised: bool = False
    stopped: bool = False

    def samples(self, loaded: Prefix) -> Samples:
        """What ``group_by_keys`` would give of :meth:`files`, where nothing is done to files."""
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
        """What ``tar_file_expander`` would give."""
        about = self._about(loaded)
        # What is not wanted is not read.
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
        """Ask the handler: it raises, or says whether to go on."""
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
