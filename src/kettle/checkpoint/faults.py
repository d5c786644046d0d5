"""What went wrong, as an error of kettle's own that says what to do."""

import errno

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from kettle.checkpoint.filesystem import is_store_fault
from kettle.checkpoint.writer import SaveCancelledError
from kettle.errors import CheckpointError, KettleError, SaveError, StoreError, TornCheckpointError


def save_error(cause: BaseException, *, uri: str) -> KettleError:
    """Why a save of `uri` failed: a SaveError where the store did, so that training may go on."""
    if isinstance(cause, KettleError) and not isinstance(cause, SaveCancelledError):
        return cause
    if not (is_store_fault(cause) or isinstance(cause, SaveCancelledError)):
        return CheckpointError(f"can't save {uri}: {words(cause)}")
    remedy = "what was committed before is untouched"
    if isinstance(cause, PermissionError):
        remedy = "renew the credentials, or allow this process to write there; " + remedy
    elif isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room, or lower checkpoint.keep; " + remedy
    return SaveError(f"can't save {uri}: {words(cause)}; {remedy}")


def load_error(
    cause: BaseException, *, filesystem: AbstractFileSystem, uri: str
) -> CheckpointError:
    """Why a load of `uri` failed: torn where the checkpoint is to blame, and not its store."""
    if isinstance(cause, CheckpointError):
        return cause
    message = f"can't load {uri}: {words(cause)}"
    if is_bad_sector(cause, filesystem=filesystem):
        return TornCheckpointError(message)
    return StoreError(message) if is_store_fault(cause) else CheckpointError(message)


def is_bad_sector(cause: BaseException, *, filesystem: AbstractFileSystem) -> bool:
    """Whether a local disk has lost what it held; object stores say EIO for anything."""
    is_local = isinstance(filesystem, LocalFileSystem)
    return is_local and isinstance(cause, OSError) and cause.errno == errno.EIO


def cause_of(error: CheckpointException) -> BaseException:
    """The first rank's own error; torch's is no Exception."""
    _, (cause, _) = min(error.failures.items())
    return cause


def words(error: BaseException) -> str:
    """An error with its class, for one that kettle did not word."""
    return f"{type(error).__name__}: {error}"
