"""From a root as the run file gives it to a filesystem: plain paths and URIs alike."""

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import make_path_posix

from kettle.errors import CheckpointError


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
