"""From a root as the run file gives it to a filesystem: plain paths and URIs alike."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem, make_path_posix

from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.errors import CheckpointError, KettleError, UsageError

_CLIENTS = {"botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google"}
_CLIENT_TRIES = 5
_WAITS_S = 2.0
"""How long s3fs sleeps between its tries, together."""


def absolute(root: str) -> str:
    """The same place for every working directory: URIs as they are, paths made absolute."""
    return root if "://" in root else make_path_posix(root)


def use_endpoint(s3_endpoint: str) -> None:
    """Send s3:// to this server; a process-wide fact."""
    fsspec.config.conf.setdefault("s3", {})["endpoint_url"] = s3_endpoint


def bound_retries(grace_s: float) -> None:
    """Let the S3 client try again after a fault, but give up within half of a grace period.

    By default botocore and s3fs both try five times, each with a limit of 15 s: a store that
    doesn't answer would hold a save for minutes after the pod is gone. A process-wide fact.
    """
    # botocore's own tries are in series with s3fs's, so only one of the two has any.
    read_timeout_s = max(0.5, (grace_s / 2 - _WAITS_S) / _CLIENT_TRIES)
    fsspec.config.conf.setdefault("s3", {})["config_kwargs"] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": min(5.0, read_timeout_s),
        "read_timeout": read_timeout_s,
    }


def open_store(uri: str) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a URI, and the path in it. Local files are written durably.

    Raises:
        CheckpointError: the scheme is unknown, or its library is not installed.
    """
    try:
        filesystem, path = fsspec.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"can't open {uri}: {error}; for s3:// install kettle[s3], for gs:// kettle[gcs]"
        ) from error
    if type(filesystem) is LocalFileSystem:
        filesystem = DurableLocalFileSystem()
    elif "s3" in filesystem.protocol:
        _send_bodies_at_once(filesystem)
    return filesystem, path


def _send_bodies_at_once(filesystem: AbstractFileSystem) -> None:
    """Don't let the S3 client ask with `Expect: 100-continue` before it sends a body.

    Where the answer comes while it is about to wait for it, aiohttp (3.14) waits without its read
    timeout from then on, so a server that falls silent holds a save for ever.
    """
    from botocore.handlers import add_expect_header  # noqa: PLC0415 - of the extra kettle[s3]

    filesystem.s3.meta.events.unregister("before-call.s3", add_expect_header)


def free_bytes(filesystem: AbstractFileSystem, path: str) -> int | None:
    """How much still fits, or None where the store doesn't say."""
    if not isinstance(filesystem, LocalFileSystem):
        return None
    while not os.path.isdir(path):  # noqa: PTH112 - a string for fsspec
        path = os.path.dirname(path)  # noqa: PTH120
    return shutil.disk_usage(path).free


def is_store_fault(error: BaseException) -> bool:
    """Whether the store failed, rather than kettle.

    Clients of object stores raise errors of their own where the network fails, and not all of them
    are OSErrors.
    """
    if isinstance(error, KettleError):
        return False
    origin = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or origin in _CLIENTS


@contextmanager
def store_faults() -> Iterator[None]:
    """Raise every fault of a store as an OSError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or not is_store_fault(error):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


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
