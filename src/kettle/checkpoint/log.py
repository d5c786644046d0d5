"""The run's append-only log: who may write, and what was committed.

Two attempts of one run may be alive at once: a pod whose node can't be reached, a double submit. A
conditional write of a checkpoint can't keep the older one from committing another step, so every
attempt first takes the next number of one log, `<prefix>/_log/<n>.json`, each entry created only if
it does not exist yet; this is the protocol of Delta Lake's transaction log (Armbrust et al., "Delta
Lake: High-Performance ACID Table Storage over Cloud Object Stores", VLDB 2020). A writer may create
entry n + 1 only after it has read up to n. So one whose run was taken over finds its number taken,
reads that a newer generation has claimed the run, and is refused.

Each entry holds what happened and the state that follows from all entries up to it, so the newest
entry alone says everything. Entries are never deleted: a writer that has slept could otherwise
create one that others have read and forgotten.
"""

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from fsspec import AbstractFileSystem
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kettle.checkpoint.events import Claimed, Event, Failed, LogState, after, after_a_gap
from kettle.checkpoint.filesystem import store_faults
from kettle.checkpoint.layout import LOG, entry_name, entry_number, join
from kettle.errors import CheckpointError, SupersededError


class Entry(BaseModel):
    """One object of the log."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: int
    generation: int = Field(description="Of the attempt that wrote it.")
    attempt_id: str
    nonce: str = Field(description="Tells an attempt's own entry from another's.")
    written_unix_s: float = Field(description="Wall clock; for people, never for order.")
    event: Event
    state: LogState = Field(description="What holds after this entry.")


@dataclass(frozen=True)
class Tail:
    """How far somebody has read the log."""

    number: int = 0
    state: LogState = field(default_factory=LogState)


def read_tail(
    filesystem: AbstractFileSystem, prefix: str, *, known: Tail | None = None, at_least: int = 0
) -> Tail:
    """Everything that the log says: one listing, and one read if there is anything new.

    An entry that can't be read (a disk that lost it) keeps its number, and leaves a gap.

    Args:
        known: how far the log was read before.
        at_least: an entry that is known to be there, whether the listing shows it or not.

    Raises:
        OSError: the store can't be read.
    """
    known = known or Tail()
    numbers = {*entry_numbers(filesystem, prefix), at_least}
    newest = max(*numbers, known.number)
    lost = 0
    for number in sorted((n for n in numbers if n > known.number), reverse=True):
        entry = read_entry(filesystem, prefix, number)
        if entry is not None:
            return Tail(number=newest, state=after_a_gap(entry.state, entries=lost))
        lost += 1
    return Tail(number=newest, state=after_a_gap(known.state, entries=lost))


def entry_numbers(filesystem: AbstractFileSystem, prefix: str) -> list[int]:
    """The numbers of all entries, rising; one listing, a request for every 1,000 of them."""
    filesystem.invalidate_cache()
    folder = join(prefix, LOG)
    try:
        names = filesystem.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    numbers = (entry_number(name.rstrip("/").rsplit("/", 1)[-1]) for name in names)
    return sorted(number for number in numbers if number is not None)


def read_entry(filesystem: AbstractFileSystem, prefix: str, number: int) -> Entry | None:
    """An entry, or None where it is not there or can't be understood."""
    try:
        content = filesystem.cat_file(join(prefix, LOG, entry_name(number)))
        return Entry.model_validate_json(content)
    except (FileNotFoundError, ValidationError):
        return None


class Lease:
    """The right of one attempt to write into a run, until a newer attempt claims it.

    Attributes:
        filesystem, prefix: the run's place in its store, as its filesystem names it.
        uri: the same, as a person names it.
        attempt_id: who holds it.
        generation: the number of the claim.
        enforced: whether the store refuses to create what exists. Where it doesn't, each entry is
            looked for before and read back after it is written, which leaves a window of one round
            trip in which two writers don't see each other. The next entry of either ends that.
    """

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        prefix: str,
        *,
        uri: str,
        attempt_id: str,
        tail: Tail,
    ) -> None:
        self.filesystem = filesystem
        self.prefix = prefix
        self.uri = uri
        self.attempt_id = attempt_id
        self.generation = tail.state.generation
        self.enforced = True
        self.tail = tail

    def append(self, event: Event) -> Entry:
        """Add an entry under this lease.

        Raises:
            SupersededError: a newer attempt has claimed the run.
            OSError: the store can't be written to; the entry may be there all the same.
        """
        while True:
            if not self.enforced:
                self.tail = self.look()
            entry = _entry(event, tail=self.tail, attempt_id=self.attempt_id)
            if _create(self.filesystem, self.prefix, entry, enforced=self.enforced):
                self.tail = Tail(number=entry.number, state=entry.state)
                return entry
            # A listing may not show yet what a create has found.
            self.tail = self.look(at_least=entry.number)

    def look(self, *, at_least: int = 0) -> Tail:
        """What the log says now.

        Args:
            at_least: an entry that is known to be there.

        Raises:
            SupersededError: a newer attempt has claimed the run.
            OSError: the store can't be read.
        """
        # Where creating overwrites, even this attempt's own last entry may be another's by now.
        known = self.tail if self.enforced else None
        tail = read_tail(self.filesystem, self.prefix, known=known, at_least=at_least)
        newest = tail.state
        # By name as well: a claim that a disk has lost no longer raises the generation.
        if (newest.generation, newest.attempt_id) != (self.generation, self.attempt_id):
            raise SupersededError(
                f"attempt {self.attempt_id} (generation {self.generation}) may no longer write "
                f"into {self.uri}: attempt {newest.attempt_id} (generation {newest.generation}) "
                "has taken the run over; let that one go on, or stop it and start the run again"
            )
        return tail


def claim(
    filesystem: AbstractFileSystem,
    prefix: str,
    *,
    uri: str,
    attempt_id: str,
    begin: Literal["newest", "scratch"] = "newest",
) -> Lease:
    """Take the run over: after this no older attempt can commit.

    The store is asked to create the claim a second time, with the same content. One that agrees
    does not enforce conditional writes, whatever it says of itself.

    Raises:
        OSError: the store can't be read or written to.
    """
    tail = read_tail(filesystem, prefix)
    while True:
        entry = _entry(Claimed(from_scratch=begin == "scratch"), tail=tail, attempt_id=attempt_id)
        if not _create(filesystem, prefix, entry, enforced=True):
            tail = read_tail(filesystem, prefix, known=tail, at_least=entry.number)
            continue
        enforced = not _accepts_again(filesystem, prefix, entry)
        if not enforced and not _is(read_entry(filesystem, prefix, entry.number), entry):
            tail = read_tail(filesystem, prefix, known=tail, at_least=entry.number)
            continue
        lease = Lease(
            filesystem,
            prefix,
            uri=uri,
            attempt_id=attempt_id,
            tail=Tail(number=entry.number, state=entry.state),
        )
        lease.enforced = enforced
        return lease


def note(filesystem: AbstractFileSystem, prefix: str, event: Event, *, attempt_id: str) -> Entry:
    """Add an entry without claiming the run: a person's decision, or word of a crash.

    Raises:
        OSError: the store can't be read or written to.
    """
    tail = read_tail(filesystem, prefix)
    while True:
        entry = _entry(event, tail=tail, attempt_id=attempt_id)
        if _create(filesystem, prefix, entry, enforced=False):
            return entry
        tail = read_tail(filesystem, prefix, known=tail, at_least=entry.number)


def note_failure(
    filesystem: AbstractFileSystem, prefix: str, *, attempt_id: str, step: int | None, error: str
) -> None:
    """Leave word that this attempt has crashed; once, and only if it holds the run.

    Args:
        step: the last finished one, where it is known.

    Raises:
        OSError: the store can't be read or written to.
    """
    tail = read_tail(filesystem, prefix)
    failures = tail.state.failures
    if tail.state.attempt_id != attempt_id:
        return
    if failures is not None and failures.generation == tail.state.generation:
        return
    lease = Lease(filesystem, prefix, uri=prefix, attempt_id=attempt_id, tail=tail)
    lease.enforced = False  # nobody has asked
    # The newer attempt's crashes are counted, and this one is not among them.
    with suppress(SupersededError):
        lease.append(Failed(step=step, error=error))


def _entry(event: Event, *, tail: Tail, attempt_id: str) -> Entry:
    number = tail.number + 1
    state = after(tail.state, event, number=number, attempt_id=attempt_id)
    return Entry(
        number=number,
        generation=state.generation,
        attempt_id=attempt_id,
        nonce=uuid.uuid4().hex,
        written_unix_s=time.time(),
        event=event,
        state=state,
    )


def _create(filesystem: AbstractFileSystem, prefix: str, entry: Entry, *, enforced: bool) -> bool:
    """Create an entry; whether it is this one that now has the number."""
    path = join(prefix, LOG, entry_name(entry.number))
    content = entry.model_dump_json(indent=1).encode()
    if not enforced and filesystem.exists(path):
        return False
    try:
        with store_faults():
            filesystem.pipe_file(path, content, mode="create")
    except OSError as error:
        # A request that was sent twice by a client that got no answer finds its own entry.
        found = read_entry(filesystem, prefix, entry.number)
        if found is None and not isinstance(error, FileExistsError):
            raise
        return _is(found, entry)
    return enforced or _is(read_entry(filesystem, prefix, entry.number), entry)


def _is(found: Entry | None, entry: Entry) -> bool:
    # Not by content: what has been JSON once may compare differently, a tuple for one.
    return found is not None and found.nonce == entry.nonce


def _accepts_again(filesystem: AbstractFileSystem, prefix: str, entry: Entry) -> bool:
    path = join(prefix, LOG, entry_name(entry.number))
    try:
        filesystem.pipe_file(path, entry.model_dump_json(indent=1).encode(), mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        raise CheckpointError(
            f"can't find out whether the store of {prefix} refuses to create what exists: {error}"
        ) from error
    return True
