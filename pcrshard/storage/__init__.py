"""The one door to bytes: exact ranged reads, whole files and folders, local and through fsspec."""

from .files import (
    abandon_writes,
    atomic_write,
    exists,
    file_bytes,
    fixed_folder,
    identity,
    is_folder,
    is_pattern,
    list_files,
    list_matching,
    make_folder,
    open_file,
    remove,
    remove_temporary_files,
    write_at,
)
from .patience import collect
from .ranges import (
    Window,
    open_local,
    open_range,
    read_bytes,
    read_into,
    read_ranges,
)
from .retry import Retry
from .stores import Options
from .urls import (
    Urls,
    expand,
    file_name,
    is_local,
    join,
    plain_path,
    split_query,
)

__all__ = [
    "Options",
    "Retry",
    "Urls",
    "Window",
    "abandon_writes",
    "atomic_write",
    "collect",
    "exists",
    "expand",
    "file_bytes",
    "file_name",
    "fixed_folder",
    "identity",
    "is_folder",
    "is_local",
    "is_pattern",
    "join",
    "list_files",
    "list_matching",
    "make_folder",
    "open_file",
    "open_local",
    "open_range",
    "plain_path",
    "read_bytes",
    "read_into",
    "read_ranges",
    "remove",
    "remove_temporary_files",
    "split_query",
    "write_at",
]
