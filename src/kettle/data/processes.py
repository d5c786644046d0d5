"""Loader processes are forked from a server of the rank's own, never from the rank itself.

A rank has threads (autograd's, gloo's, those that feed queues), and a process forked beside threads
may find anything half done: on Python 3.13 some died of a segmentation fault. The server has
imported what a loader process needs and computes nothing, so forking it is quick and harmless.
"""

import atexit
import multiprocessing
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import forkserver, reduction, resource_tracker
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kettle.signals import stop_signals_blocked

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kettle.data.loader"])


def start_server() -> None:
    """Start the process that loader processes are forked from, unless it is there.

    It begins with the stop signals blocked, and what it forks inherits that: a signal to the whole
    process group stays pending there, and the rank alone decides when to leave.
    """
    # Before the block: where Python starts this helper, it unblocks both signals afterwards. The
    # helper itself, which removes the semaphores of a killed rank, ignores them.
    resource_tracker.ensure_running()
    with stop_signals_blocked():
        forkserver.ensure_running()


def end_with_rank(_number: int) -> None:
    """Have this loader process end when its rank is gone, however that went.

    torch's own watch looks whether the parent is there, and the parent is the server, which waits
    for the last loader process.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def follow() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=follow, name="end-with-rank", daemon=True).start()


@atexit.register
def _end_loader_processes() -> None:
    """Let a rank that fails with a loader open come to its end.

    At exit Python stops daemonic processes by SIGTERM, which these keep blocked, and then waits for
    them; so they get the signal that nothing blocks first.
    """
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


@dataclass(frozen=True)
class SharedArray:
    """An array that a process started with it reads from a file of the rank, not from a copy."""

    array: NDArray[np.int64]

    @cached_property
    def _file(self) -> IO[bytes]:
        # It has no name, so nothing is left of it when the last process is gone.
        file = tempfile.TemporaryFile(prefix="kettle-")  # noqa: SIM115 - open as long as the array
        weakref.finalize(self, file.close)
        self.array.tofile(file)
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (reduction.DupFd(self._file.fileno()), self.array.shape)


def _mapped(descriptor: Any, shape: tuple[int, ...]) -> SharedArray:
    with open(descriptor.detach(), "rb") as file:  # noqa: PTH123 - a descriptor has no path
        return SharedArray(np.memmap(file, dtype=np.int64, mode="r", shape=shape))
