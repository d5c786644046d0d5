"""Which fault is the store's, which the checkpoint's, and which kettle's own."""

import errno
import os

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.faults import load_error, save_error
from kettle.checkpoint.writer import SaveCancelledError
from kettle.errors import CheckpointError, KettleError, SaveError, StoreError, TornCheckpointError

STORES: dict[str, type[AbstractFileSystem]] = {
    "local": DurableLocalFileSystem,
    "memory": MemoryFileSystem,
}


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("store", "cause", "expected"),
    [
        ("local", os_error(errno.EIO), TornCheckpointError),
        ("memory", os_error(errno.EIO), StoreError),
        ("local", os_error(errno.EACCES), StoreError),
        ("memory", TimeoutError("no answer"), StoreError),
        ("local", RuntimeError("a bug"), CheckpointError),
        ("local", TornCheckpointError("half"), TornCheckpointError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_load_blames_the_checkpoint_only_for_what_is_wrong_with_it(
    store: str, cause: Exception, expected: type[KettleError]
) -> None:
    filesystem = STORES[store]()
    assert type(load_error(cause, filesystem=filesystem, uri="uri")) is expected


@pytest.mark.parametrize(
    ("cause", "expected", "remedy"),
    [
        (PermissionError("403"), SaveError, "renew the credentials"),
        (os_error(errno.ENOSPC), SaveError, "make room"),
        (SaveCancelledError("given up"), SaveError, "untouched"),
        (RuntimeError("a bug"), CheckpointError, "can't save"),
    ],
    ids=repr,
)
def test_save_that_fails_says_what_to_do(
    cause: Exception, expected: type[KettleError], remedy: str
) -> None:
    error = save_error(cause, uri="uri")
    assert type(error) is expected
    assert remedy in str(error)
