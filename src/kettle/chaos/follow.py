"""One attempt as a child process: its records as they come, kept in files as they came."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from kettle.errors import KettleError
from kettle.records import Record, parse_line

_TAIL_LINES = 25
_KILL_WAIT_S = 10.0


@dataclass(frozen=True)
class Attempt:
    """A launcher that was started here and is still to be followed to its end.

    Attributes:
        name: what to call it in errors, such as "attempt 2 of the trial".
        launcher: the process that gets the eviction.
        log: every line of its stdout, written as it comes.
        errors: its stderr.
    """

    name: str
    launcher: subprocess.Popen[bytes]
    log: Path
    errors: Path
    _lines: "queue.SimpleQueue[str | None]"

    def records(self, *, silence_s: float) -> Iterator[Record]:
        """Yield records until stdout ends or the caller has seen enough.

        Raises:
            KettleError: no line came for `silence_s` seconds.
        """
        yield from self._follow(
            lambda: silence_s, complaint=f"has written nothing for {silence_s:g} s"
        )

    def last_records(self, *, within_s: float, doing: str) -> Iterator[Record]:
        """Yield the remaining records until stdout ends.

        Raises:
            KettleError: it did not end in time; `doing` says what it was asked for.
        """
        deadline_s = time.monotonic() + within_s
        yield from self._follow(
            lambda: max(0.0, deadline_s - time.monotonic()),
            complaint=f"{doing} for more than {within_s:g} s",
        )

    def exit_code(self, *, within_s: float) -> int:
        """Wait for the launcher's exit status. Raises KettleError if it doesn't come in time."""
        try:
            return self.launcher.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"has closed its stdout and lives on after {within_s:g} s") from None

    def failure(self, complaint: str) -> KettleError:
        """An error about this attempt that shows the end of what it said on stderr."""
        said = self.errors.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = [f"  | {line}" for line in said[-_TAIL_LINES:]] or ["  | (nothing)"]
        return KettleError(
            "\n".join([f"{self.name} {complaint}", f"  stderr ({self.errors}) ends:", *tail])
        )

    def _follow(self, timeout_s: Callable[[], float], *, complaint: str) -> Iterator[Record]:
        while True:
            try:
                line = self._lines.get(timeout=timeout_s())
            except queue.Empty:
                raise self.failure(complaint) from None
            if line is None:
                # Left in place for a second reader: the end of a stream can be read again.
                self._lines.put(None)
                return
            record = parse_line(line)
            if record is not None:
                yield record


def launch_command(run_file: Path, *, workers: int, overrides: Sequence[str]) -> list[str]:
    """The command line of one attempt."""
    command = [sys.executable, "-m", "kettle", "launch", str(run_file), "--workers", str(workers)]
    for override in overrides:
        command += ["--set", override]
    return command


@contextlib.contextmanager
def started(command: Sequence[str], *, name: str, log: Path, errors: Path) -> Iterator[Attempt]:
    """Start a launcher and hand it out; on leaving, whatever of it still runs is killed."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # One id for all attempts would hide every restart from the readers of the records.
    environment = {key: value for key, value in os.environ.items() if key != "KETTLE_ATTEMPT_ID"}
    with errors.open("wb") as errors_file:
        launcher = subprocess.Popen(  # noqa: S603 - our own command, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors_file,
            env=environment,
            # Ctrl-C at the terminal is for the driver; an attempt is evicted by its trigger only.
            start_new_session=True,
        )
    assert launcher.stdout is not None
    try:
        tee = threading.Thread(
            target=_tee, args=(launcher.stdout, log.open("wb"), lines), name="tee", daemon=True
        )
        tee.start()
        yield Attempt(name=name, launcher=launcher, log=log, errors=errors, _lines=lines)
    finally:
        kill_tree(launcher)
    # Not joined when something was raised: it ends by itself with the last holder of the pipe.
    tee.join(timeout=_KILL_WAIT_S)


def kill_tree(launcher: subprocess.Popen[bytes]) -> None:
    """SIGKILL a launcher and all that descends from it, and reap the launcher."""
    if launcher.poll() is not None:
        return  # its id may belong to another process by now
    try:
        root = psutil.Process(launcher.pid)
        # Looked up while the launcher lives: its workers have sessions of their own, and once it
        # is gone nothing leads to them. Stopped first, so that it can't start another meanwhile.
        root.suspend()
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()
    psutil.wait_procs(family, timeout=_KILL_WAIT_S)


def _tee(source: IO[bytes], log_file: IO[bytes], lines: "queue.SimpleQueue[str | None]") -> None:
    with source, log_file:
        for line in source:
            log_file.write(line)
            # Who reads the file meanwhile, or after the driver was killed, misses nothing.
            log_file.flush()
            lines.put(line.decode("utf-8", errors="replace"))
    lines.put(None)
