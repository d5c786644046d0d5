"""The stop signals of this process, noted from its first instant on.

A process that receives SIGTERM before it has a handler dies with -15 or, as PID 1, never learns of
it and is killed when the grace period ends. So the entry modules call `install` before they import
anything heavy; this module therefore imports only modules that the interpreter's start has
loaded anyway, or that cost nothing.

A launcher starts its workers with the stop signals blocked (a blocked signal stays pending, and the
mask survives `exec`); `install` unblocks them once the handler is there, so a worker has no instant
in which the signal could kill it.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Process-wide, because signal handlers are.
_first: dict[str, float] = {}


def install() -> None:
    """Note SIGTERM and SIGINT from now on instead of dying, and let pending ones through."""
    for number in STOP_SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Keep stop signals pending; processes started inside never see one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def note_stop(*, at_monotonic_s: float) -> None:
    """Note a stop that was learnt of by another way than a signal to this process."""
    _first.setdefault("at", at_monotonic_s)


def stop_noted_at() -> float | None:
    """When the first stop request came, in seconds of the system's monotonic clock, or None."""
    return _first.get("at")


def write_stop_file(path: str, *, at_monotonic_s: float) -> None:
    """Tell the processes that will look at `path` when the stop came, in one atomic step."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib is too slow to import here
        file.write(repr(at_monotonic_s))
    os.replace(partial, path)  # noqa: PTH105 - as above


def read_stop_file(path: str) -> float | None:
    """When the launcher was told to stop, in monotonic seconds, or None if it wasn't."""
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - as above
            return float(file.read())
    except FileNotFoundError:
        return None


def claim(path: str) -> bool:
    """Create `path`, if nobody has: of all processes that try, exactly one is told True."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _note(_number: int, _frame: FrameType | None) -> None:
    note_stop(at_monotonic_s=time.monotonic())
