"""From a root as the run file gives it to a filesystem: plain paths and URIs alike."""

import errno
import os

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem, make_path_posix

from kettle.errors import CheckpointError, UsageError


def absolute(root: str) -> str:
    """The same place for every working directory: URIs as they are, paths made absolute."""
    return root if "://" in root else make_path_posix(root)


def use_endpoint(s3_endpoint: str) -> None:
    """Send s3:// to this server; a process-wide fact, since torch opens stores by URI alone."""
    fsspec.config.conf.setdefault("s3", {})["endpoint_url"] = s3_endpoint


def open_store(uri: str) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a URI, and the path in it.

    Raises:
        CheckpointError: the scheme is unknown, or its library is not installed.
    """
    try:
        filesystem, path = fsspec.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"can't open {uri}: {error}; for s3:// install kettle[s3], for gs:// kettle[gcs]"
        ) from error
    return filesystem, path


def refuse_unusable(root: str) -> None:
    """Find out before a worker starts that nothing can be saved below a root.

    Raises:
        UsageError: the scheme is unknown, a local root is no folder that can be written to, or the
            root is in this process's memory.
    """
    if root.startswith("memory:"):
        raise UsageError(
            f"checkpoint.root = {root!r} is gone when the process ends; name a folder, or a URI "
            "of a store that lasts"
        )
    try:
        filesystem, path = open_store(absolute(root))
        if isinstance(filesystem, LocalFileSystem):
            filesystem.makedirs(path, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "it can't be written to")
    except CheckpointError as error:
        raise UsageError(f"checkpoint.root = {root!r}: {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"checkpoint.root = {root!r} can't be used: {reason}; "
            "name a folder that can be written to, or a URI"
        ) from error
