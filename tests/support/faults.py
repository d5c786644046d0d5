"""A store that fails as stores do: at one operation, for a while, without a word."""

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from botocore.exceptions import ClientError, EndpointConnectionError

from support.watched import Kind, Operation, Watcher

T = TypeVar("T")


def no_access() -> Exception:
    return PermissionError(errno.EACCES, "Forbidden (403)")


def slow_down() -> Exception:
    """As s3fs raises it when all its tries have met a 503."""
    return OSError(errno.EBUSY, "Please reduce your request rate. (503 SlowDown)")


def unreachable() -> Exception:
    """botocore's own errors are no OSErrors."""
    error: Exception = EndpointConnectionError(endpoint_url="http://127.0.0.1:9")
    return error


def refused_by_server() -> Exception:
    answer = {"Error": {"Code": "InternalError", "Message": "We encountered an internal error."}}
    error: Exception = ClientError(answer, "PutObject")
    return error


def no_answer() -> Exception:
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def reset() -> Exception:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def disk_is_full() -> Exception:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def quota_is_reached() -> Exception:
    return OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def broken_disk() -> Exception:
    return OSError(errno.EIO, os.strerror(errno.EIO))


class Failing(Watcher):
    """Fails operations of a kind whose path contains some words.

    Args:
        kind: which operations count.
        error: what is raised.
        inside: what the path must contain.
        first: the first that fails, counted from 1.
        count: how many of them fail.
        answer_lost: whether the operation happens all the same.
    """

    def __init__(
        self,
        kind: Kind,
        error: Callable[[], Exception] = broken_disk,
        *,
        inside: str = "",
        first: int = 1,
        count: int = 1,
        answer_lost: bool = False,
    ) -> None:
        self.failed = 0
        self._kind, self._error, self._inside = kind, error, inside
        self._first, self._count = first, count
        self._answer_lost = answer_lost
        self._seen = 0
        self._lock = threading.Lock()

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if operation.kind != self._kind or self._inside not in operation.path:
            return act(operation.content)
        with self._lock:
            self._seen += 1
            fails = self._first <= self._seen < self._first + self._count
            self.failed += fails
        if not fails:
            return act(operation.content)
        if self._answer_lost:
            act(operation.content)
        raise self._error()


class Down(Watcher):
    """A store that takes nothing more, once the test says so; what it has, can be read."""

    def __init__(self, error: Callable[[], Exception] = slow_down) -> None:
        self.is_down = False
        self._error = error

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if self.is_down and operation.kind not in ("read", "list"):
            raise self._error()
        return act(operation.content)


class Lossy(Watcher):
    """Says that all is well, and keeps something else of one object.

    Args:
        change: what is kept of what is written.
    """

    def __init__(self, change: Callable[[bytes], bytes], *, inside: str) -> None:
        self.changed = 0
        self._change, self._inside = change, inside

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if operation.kind not in ("write", "overwrite") or self._inside not in operation.path:
            return act(operation.content)
        self.changed += 1
        return act(self._change(operation.content))


def without_tail(content: bytes) -> bytes:
    return content[:-10]


def with_a_flipped_bit(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 4
    return bytes(changed)


class Stale(Watcher):
    """Lists every folder as it was when it was first listed."""

    def __init__(self) -> None:
        self._first: dict[str, object] = {}

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if operation.kind != "list":
            return act(operation.content)
        if operation.path not in self._first:
            try:
                self._first[operation.path] = act(operation.content)
            except FileNotFoundError as error:
                self._first[operation.path] = error
        found = self._first[operation.path]
        if isinstance(found, FileNotFoundError):
            raise found
        return found  # type: ignore[return-value]


class Slow(Watcher):
    """Takes its time."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        time.sleep(self._delay_s)
        return act(operation.content)


class Careless(Watcher):
    """Overwrites what it was asked to create."""

    ignores_conditions = True
