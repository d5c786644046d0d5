"""A short run that is killed again and again, at instants that a seed chooses, until it is done."""

import multiprocessing
import os
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fsspec import AbstractFileSystem

from kettle.checkpoint.catalog import look
from kettle.checkpoint.digest import verify_object
from kettle.checkpoint.filesystem import open_store, use_endpoint
from kettle.checkpoint.layout import MARKER, METADATA, place_of
from kettle.checkpoint.log import claim, read_tail
from kettle.checkpoint.marker import read_marker
from kettle.checkpoint.protocol import prune
from kettle.checkpoint.retention import latest
from kettle.distributed import process_group
from kettle.records import CheckpointSkipped, Record, RunCompleted, RunStarted, parse_line
from kettle.train.assemble import assemble
from kettle.train.loop import train
from support.attempts import never
from support.experiments import noise, tiny

Store = Literal["file", "s3"]
Periodic = Literal["sync", "async"]

STEPS = 12
KEEP = 2
LONGEST_S: dict[Store, float] = {"file": 1.0, "s3": 2.0}
"""About what an attempt takes that nobody kills."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}

_CONTEXT = multiprocessing.get_context("forkserver")
# Of installed packages alone: the server has another path than its children.
_CONTEXT.set_forkserver_preload(
    ["kettle.train.assemble", "kettle.train.loop", "kettle.evidence.compare", "s3fs"]
)


def live(root: str, name: str, periodic: Periodic, told: str, endpoint: str | None) -> None:
    """One attempt, in a process of its own; its records go into a file."""
    os.environ.update(CREDENTIALS)
    if endpoint is not None:
        use_endpoint(endpoint)
    config = tiny(
        root,
        experiment__total_steps=STEPS,
        checkpoint__every=1,
        checkpoint__keep=KEEP,
        checkpoint__debris_hours=0.0,
        checkpoint__periodic=periodic,
    )
    with (
        Path(told).open("w", encoding="utf-8", buffering=1) as lines,
        process_group("cpu", timeout_s=60) as ranks,
    ):

        def emit(record: Record) -> None:
            lines.write(record.model_dump_json() + "\n")

        run = assemble(
            config,
            noise(),
            ranks=ranks,
            attempt_id=name,
            stop=never,
            emit=emit,
            grace_s=30.0,
        )
        train(run)
        run.batches.close()


@dataclass
class Soak:
    """What was done, and what was hit."""

    kills: int = 0
    runs: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass
class Killed:
    """One run, over its attempts."""

    root: str
    place: Path
    periodic: Periodic
    endpoint: str | None
    attempts: int = 0

    def attempt(self, *, kill_after_s: float | None) -> tuple[bool, list[Record]]:
        """Let the next attempt live so long; whether it was killed, and what it said."""
        self.attempts += 1
        told = self.place / f"attempt-{self.attempts}.jsonl"
        args = (self.root, f"attempt-{self.attempts}", self.periodic, str(told), self.endpoint)
        process = _CONTEXT.Process(target=live, args=args)
        process.start()
        process.join(kill_after_s if kill_after_s is not None else 120)
        killed = process.is_alive()
        process.kill()
        process.join()
        assert killed or process.exitcode == 0, f"exit code {process.exitcode} in {self.root}"
        lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
        return killed, [record for line in lines if (record := parse_line(line)) is not None]

    def store(self) -> tuple[AbstractFileSystem, str] | None:
        """Filesystem and prefix, once an attempt has got so far."""
        filesystem, path = open_store(self.root)
        filesystem.invalidate_cache()
        try:
            prefixes = filesystem.ls(path, detail=False)
        except FileNotFoundError:
            return None
        return (filesystem, prefixes[0]) if prefixes else None


def newest_step(run: Killed) -> int | None:
    """The step that the next attempt has to go on from."""
    store = run.store()
    newest = read_tail(*store).state.newest if store is not None else None
    place = place_of(newest) if newest is not None else None
    return None if place is None else place.step


def what_was_hit(run: Killed, records: list[Record]) -> str:
    """What the attempt was doing, by its records and what it has left."""
    store = run.store()
    name = f"attempt-{run.attempts}"
    if store is None or read_tail(*store).state.attempt_id != name:
        return "start-up"
    if not any(isinstance(record, RunStarted) for record in records):
        return "restore"
    folders = look(*store).folders
    for number, folder in enumerate(folders):
        if not folder.has_marker:
            # The newest is being written, and older ones are being deleted.
            is_new = number == 0 and folder.name.endswith(f"-{name}")
            whole = METADATA in folder.sizes_bytes
            return ("commit" if whole else "save") if is_new else "delete"
    return "before a delete" if len(folders) > KEEP else "step"


def check_end(run: Killed, records: list[Record], *, wanted: str) -> list[str]:
    """What is wrong with a run that is complete."""
    faults = []
    digests = [record.weights_digest for record in records if isinstance(record, RunCompleted)]
    if digests != [wanted]:
        faults.append(f"{run.root}: the weights are not the reference's")
    store = run.store()
    assert store is not None
    filesystem, prefix = store
    lease = claim(filesystem, prefix, uri=prefix, attempt_id="last")
    newest = place_of(lease.tail.state.newest or "")
    assert newest is not None
    prune(
        lease,
        policies=[latest(KEEP)],
        newest=newest,
        verified={newest.name},
        verify=lambda _: False,
        debris_age_s=0.0,
    )
    left = look(filesystem, prefix)
    faults += [f"{path} is left" for path in left.partials]
    for folder in left.folders:
        path = f"{prefix}/{folder.name}"
        if not folder.has_marker:
            faults.append(f"{path} is left, with {sorted(folder.sizes_bytes)}")
            continue
        told = read_marker(filesystem.cat_file(f"{path}/{MARKER}"), uri=path)
        for name, expected in told.objects.items():
            verify_object(filesystem, f"{path}/{name}", expected, uri=path, progress=lambda _: None)
        if extra := set(folder.sizes_bytes) - {MARKER, *told.objects}:
            faults.append(f"{path} holds {extra} as well")
    if len(left.folders) > KEEP:
        faults.append(f"{prefix} has {len(left.folders)} checkpoints, and {KEEP} are kept")
    return faults


@contextmanager
def root_of(store: Store, place: Path) -> Iterator[tuple[str, str | None]]:
    """Where the checkpoints of all runs lie, and the server's address."""
    if store == "file":
        yield str(place / "checkpoints"), None
        return
    from support.s3 import s3_server  # noqa: PLC0415 - no attempt has to wait for moto

    os.environ.update(CREDENTIALS)
    with s3_server() as server:
        use_endpoint(server.endpoint)
        open_store(f"s3://{server.bucket}")[0].mkdir(server.bucket)
        yield f"s3://{server.bucket}", server.endpoint


def soak(
    store: Store,
    periodic: Periodic,
    place: Path,
    *,
    seed: int,
    kills: range,
    say: Callable[[str], None] = lambda _: None,
) -> Soak:
    """Kill attempts of short runs, and look at what each kill has left.

    Args:
        seed: each kill's instant follows from it and the kill's number, and from nothing else.
        kills: the numbers.
    """
    done = Soak()
    with root_of(store, place) as (root, endpoint):
        reference = Killed(f"{root}/reference", _made(place / "reference"), "sync", endpoint)
        started = time.monotonic()
        _, records = reference.attempt(kill_after_s=None)
        alone_s = time.monotonic() - started
        wanted = next(r.weights_digest for r in records if isinstance(r, RunCompleted))
        say(
            f"{store}, {periodic}: an attempt takes {alone_s:.1f} s, so this takes about "
            f"{len(kills) * alone_s / 60:.0f} min"
        )
        run: Killed | None = None
        for number in kills:
            delay_s = random.Random(f"{seed} {number}").uniform(0, LONGEST_S[store])
            was_killed = False
            while not was_killed:
                if run is None:
                    name = uuid.uuid4().hex[:8]
                    run = Killed(f"{root}/{name}", _made(place / name), periodic, endpoint)
                from_step = newest_step(run)
                was_killed, records = run.attempt(kill_after_s=delay_s)
                done.faults += _check_start(run, records, from_step=from_step)
                if not was_killed:
                    done.faults += check_end(run, records, wanted=wanted)
                    done.runs += 1
                    shutil.rmtree(run.place, ignore_errors=True)
                    run = None
                    delay_s *= 0.8  # this machine is faster than that
            assert run is not None
            done.kills += 1
            hit = what_was_hit(run, records)
            done.hit[hit] += 1
            say(f"{store}, {periodic}: kill {number} after {delay_s:.2f} s hit {hit}")
        if run is not None:
            from_step = newest_step(run)
            _, records = run.attempt(kill_after_s=None)
            done.faults += _check_start(run, records, from_step=from_step)
            done.faults += check_end(run, records, wanted=wanted)
            done.runs += 1
    return done


def _check_start(run: Killed, records: list[Record], *, from_step: int | None) -> list[str]:
    faults = [
        f"{run.root}: {record.checkpoint_uri} was passed over: {record.reason}"
        for record in records
        if isinstance(record, CheckpointSkipped)
    ]
    faults += [
        f"{run.root}: went on from {record.resumed_from} and not {from_step}"
        for record in records
        if isinstance(record, RunStarted) and record.resumed_from != from_step
    ]
    return faults


def _made(place: Path) -> Path:
    place.mkdir(parents=True)
    return place
