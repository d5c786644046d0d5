"""Real launchers of tiny runs: started, watched by their records, and never left behind."""

import fcntl
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from kettle.records import Record, parse_line

RUN_FILE = Path(__file__).parents[2] / "examples" / "stdlib.toml"
TINY = (
    "experiment.total_steps=40",
    "experiment.accumulation=1",
    "experiment.micro_batch=1",
    "experiment.model.hidden_size=24",
    "experiment.model.intermediate_size=37",
    "experiment.model.layers=1",
    "experiment.data.sequence_length=16",
    "experiment.data.max_samples=70",
    "runtime.device=cpu",
)
LONG_STEPS = (
    "experiment.accumulation=100",
    "experiment.total_steps=4",
    "experiment.optim.warmup_steps=1",
    "experiment.data.max_samples=500",
)
"""For a stop that must come in the middle of a step: each has 400 micro-batches over all ranks."""

PATIENCE_S = 90.0
"""A busy machine may take this long for anything; a test fails by it only when something hangs."""

R = TypeVar("R")


@dataclass(frozen=True)
class Ended:
    """How a process ended, and all that it said."""

    exit_code: int
    stdout: str
    stderr: str
    after_s: float

    @property
    def records(self) -> list[Record]:
        found = [parse_line(line) for line in self.stdout.splitlines()]
        return [record for record in found if record is not None]

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def one(self, kind: type[R]) -> R:
        (record,) = self.of(kind)
        return record


@dataclass
class Running:
    """A process that was started here and writes records."""

    process: "subprocess.Popen[str]"
    errors: Path
    started_s: float
    _fresh: "queue.SimpleQueue[str | None]" = field(default_factory=queue.SimpleQueue)
    _lines: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def until(self, kind: type[R], wanted: Callable[[R], bool] = lambda _: True) -> R:
        """The next record of this kind that is wanted, as soon as it is written."""
        for line in self._follow():
            record = parse_line(line)
            if isinstance(record, kind) and wanted(record):
                return record
        raise AssertionError(f"no such {kind.__name__} in {self._lines}\n{self.errors.read_text()}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children()

    def rank(self, rank: int) -> psutil.Process:
        """The worker with this rank."""
        (worker,) = [c for c in self.children() if c.environ().get("RANK") == str(rank)]
        return worker

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def ended(self) -> Ended:
        """Wait for the end of the process and of its stdout."""
        exit_code = self.process.wait(PATIENCE_S)
        after_s = self.elapsed_s()
        for _ in self._follow():
            pass
        return Ended(exit_code, "".join(self._lines), self.errors.read_text(), after_s)

    def _follow(self) -> Iterator[str]:
        while (line := self._fresh.get(timeout=PATIENCE_S)) is not None:
            self._lines.append(line)
            yield line

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self._fresh.put(line)
        self._fresh.put(None)


def command(place: Path, *words: str, sets: tuple[str, ...] = ()) -> list[str]:
    """`kettle WORDS RUN.toml` of a tiny run whose checkpoints lie in `place`."""
    verb, *options = words
    given = (*TINY, f"checkpoint.root={place / 'checkpoints'}", *sets)
    overrides = [word for key_value in given for word in ("--set", key_value)]
    return [sys.executable, "-m", "kettle", verb, str(RUN_FILE), *options, *overrides]


@contextmanager
def started(
    place: Path, arguments: list[str], *, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a command in a session of its own; whatever is left of it is killed at the end."""
    (place / "tmp").mkdir(exist_ok=True)
    errors = place / f"stderr-{time.monotonic_ns()}"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # Every process that comes of it is known by its temporary folder.
            env={
                **_without_kettle(os.environ),
                "TMPDIR": str(place / "tmp"),
                **(environment or {}),
            },
            start_new_session=True,
        )
    running = Running(process=process, errors=errors, started_s=time.monotonic())
    reader = threading.Thread(target=running._read, daemon=True)
    reader.start()
    try:
        yield running
    finally:
        for left in processes_of(place):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()
        reader.join(PATIENCE_S)


def finished(
    place: Path, arguments: list[str], *, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its own end."""
    with started(place, arguments, environment=environment) as running:
        return running.ended()


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], R]) -> R:
    """What `make` gives; of test processes that work side by side, one makes it for all."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    stored = shared / f"{name}.pickle"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stored.exists():
            stored.write_bytes(pickle.dumps(make()))
    made: R = pickle.loads(stored.read_bytes())
    return made


def uninterrupted(factory: pytest.TempPathFactory) -> Ended:
    """The tiny run without an eviction."""

    def make() -> Ended:
        place = factory.mktemp("run")
        return finished(place, command(place, "launch"))

    return made_once(factory, "uninterrupted", make)


def processes_of(place: Path) -> list[psutil.Process]:
    """The living processes that come of what was started in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get("TMPDIR") == str(place / "tmp"):
                found.append(process)
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal, by the kernel's account."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def wait_until_caught(pid: int, number: int) -> None:
    """Return in the moment in which a starting process has its handler."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not catches(pid, number):
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


def _without_kettle(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith("KETTLE_")}
