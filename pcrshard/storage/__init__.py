"""The one door to bytes: exact ranged reads, atomic writes, listings, local and through fsspec."""

from .files import (
    Options,
    atomic_write,
    exists,
    expand,
    file_bytes,
    file_name,
    identity,
    is_folder,
    is_local,
    join,
    list_files,
    local_path,
    make_folder,
    open_file,
    open_local,
    open_range,
    plain_path,
    read_bytes,
    read_into,
    read_ranges,
    remove,
    remove_temporary_files,
    split_query,
    write_at,
)
from .retry import Retry

__all__ = [
    "Options", "Retry", "atomic_write", "exists", "expand", "file_bytes", "file_name", "identity", "is_folder", "is_local",
    "join", "list_files", "local_path", "make_folder", "open_file", "open_local", "open_range", "plain_path", "read_bytes",
    "read_into", "read_ranges", "remove", "remove_temporary_files", "split_query", "write_at",
]
