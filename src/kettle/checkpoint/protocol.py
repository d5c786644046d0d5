"""Committing, finding and deleting checkpoints, over a filesystem and named bytes.

The log grants, the marker proves. To commit: every object is written and durable, the log's next
entry grants the commit, `_COMMIT` is written. To find: the newest that the log names, then every
older one that has a marker. To delete: the marker goes first. Each of these may be cut off after
any operation, and the next attempt goes on from what it finds.

Nothing here knows what the bytes mean. torch writes and reads them in `store`; the tests run the
same functions over a few bytes each.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fsspec import AbstractFileSystem

from kettle.checkpoint.catalog import Folder, look
from kettle.checkpoint.digest import DigestStream, Expected
from kettle.checkpoint.events import Committed, LogState, Quarantined, Restored
from kettle.checkpoint.layout import MARKER, Place, is_own_object, join
from kettle.checkpoint.log import Lease, Tail, read_entry
from kettle.checkpoint.marker import Marker, check_sizes, read_marker
from kettle.checkpoint.retention import Policy, sort_out
from kettle.errors import NoCheckpointError, TornCheckpointError


class Reading(Protocol):
    """A run whose log somebody has read: a lease, or a person who only looks."""

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The store."""
        ...

    @property
    def prefix(self) -> str:
        """The run's place in it."""
        ...

    @property
    def uri(self) -> str:
        """The same, as a person names it."""
        ...

    @property
    def tail(self) -> Tail:
        """What the log says."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be restored: its marker reads well, and every object has its size.

    Attributes:
        name: its folder, below the run's prefix.
        needs_marker: its writer died between the log's entry and the marker.
    """

    name: str
    marker: Marker
    needs_marker: bool


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


def write_objects(
    filesystem: AbstractFileSystem, folder: str, payloads: Mapping[str, bytes]
) -> dict[str, Expected]:
    """Write named bytes into a folder, durably, and say what a reader has to find there."""
    filesystem.makedirs(folder, exist_ok=True)
    written = {}
    for name, payload in payloads.items():
        digests = DigestStream()
        with filesystem.open(join(folder, name), "wb") as file:
            file.write(payload)
            digests.update(memoryview(payload))
        finished = digests.finish()
        written[name] = Expected(size_bytes=finished.size_bytes, digest=finished.digest)
    return written


def commit(lease: Lease, marker: Marker, *, name: str) -> None:
    """Commit a checkpoint whose objects are all durable.

    Raises:
        SupersededError: a newer attempt has claimed the run; nothing is committed.
        OSError: the store failed. The checkpoint may be granted all the same: then the next
            attempt writes the marker, so its objects have to stay.
    """
    lease.append(Committed(name=name, marker=marker))
    # Right after the entry that grants it, and after everything that it names.
    lease.filesystem.pipe_file(join(lease.prefix, name, MARKER), marker.to_bytes())


def candidates(lease: Lease) -> Iterator[Candidate | Skipped]:
    """Checkpoints to resume from, the best first, and those that can't be used.

    The newest that the log names costs one listing of its own folder and one read. Only when that
    one is no good, or the log names none or has a gap, everything below the prefix is listed.

    Raises:
        OSError: the store can't be read.
        CheckpointError: a marker is of another version.
    """
    state = lease.tail.state
    seen = None
    if state.newest is not None and not state.has_gap:
        seen = state.newest
        yield inspect(lease, seen, sizes_bytes=_sizes(lease, seen))
    for folder in look(lease.filesystem, lease.prefix).folders:
        is_left_behind = folder.place.generation < state.from_generation
        is_committed = folder.has_marker or folder.name == state.newest
        if folder.name == seen or not is_committed or is_left_behind:
            continue
        if folder.name in state.quarantined:
            yield Skipped(folder.name, f"it is in quarantine: {state.quarantined[folder.name]}")
            continue
        yield inspect(lease, folder.name, sizes_bytes=folder.sizes_bytes)


def first_that_loads(
    found: Iterator[Candidate | Skipped], load: Callable[[Candidate], None]
) -> tuple[Candidate | None, list[Skipped]]:
    """Load candidates until one holds; that one, and what was passed over before it.

    `load` raises TornCheckpointError where the content is not what the marker says. What it has
    overwritten by then, the next candidate overwrites again, whole.
    """
    skipped: list[Skipped] = []
    for candidate in found:
        if isinstance(candidate, Skipped):
            skipped.append(candidate)
            continue
        try:
            load(candidate)
        except TornCheckpointError as error:
            skipped.append(Skipped(candidate.name, str(error)))
            continue
        return candidate, skipped
    return None, skipped


def settle(lease: Lease, restored: Candidate | None, skipped: Sequence[Skipped]) -> None:
    """Leave word of what was restored, and heal what its writer could not finish.

    Raises:
        NoCheckpointError: nothing could be restored, although the run has committed before.
        SupersededError: a newer attempt has claimed the run.
        OSError: the store can't be written to.
    """
    state = lease.tail.state
    if restored is None:
        _refuse_to_begin_again(state, skipped)
        return
    if restored.needs_marker:
        marker = join(lease.prefix, restored.name, MARKER)
        lease.filesystem.pipe_file(marker, restored.marker.to_bytes())
    if restored.needs_marker or restored.name != state.newest or state.has_gap:
        damaged = {s.name: s.reason for s in skipped if s.name not in state.quarantined}
        lease.append(Restored(name=restored.name, damaged=damaged))


def set_aside_if_stuck(lease: Lease, *, after_failures: int) -> None:
    """Quarantine the newest checkpoint if attempts keep crashing from it.

    The one before it is then tried once. Whether that helps shows in a commit beyond the step at
    which they crashed.

    Raises:
        NoCheckpointError: the older one was tried, and an attempt crashed from that as well.
    """
    failures, last_chance = lease.tail.state.failures, lease.tail.state.last_chance
    if failures is None:
        return
    where = f"after step {failures.step}" if failures.step is not None else "at an unknown step"
    if last_chance is not None:
        raise NoCheckpointError(
            f"{lease.uri}: the run crashes from older checkpoints, too\n"
            f"  quarantined  {last_chance.quarantined}\n"
            f"  then         crashed {where}: {failures.error}\n"
            "  remove the cause, then `kettle checkpoints release` it or begin again with "
            "--from-scratch"
        )
    if failures.count >= after_failures and failures.checkpoint is not None:
        reason = f"{failures.count} attempts in a row crashed from it {where}: {failures.error}"
        lease.append(Quarantined(name=failures.checkpoint, reason=reason))


def prune(
    lease: Lease,
    *,
    policies: Sequence[Policy],
    newest: Place,
    verified: Collection[str],
    verify: Callable[[Folder], bool],
    debris_age_s: float,
) -> list[str]:
    """Delete what no policy keeps, and what dead writers left behind; the names deleted.

    Committed checkpoints go only while one that stays has been verified. What claims to be newer
    than `newest`, the last one that this attempt knows to be whole, takes no place from others.
    Quarantined ones stay. Debris goes if its writer is superseded, so that it can't be committed
    any more, and nothing was written to it for `debris_age_s`.

    Args:
        lease: whose generation may delete.
        policies: what to keep.
        newest: the checkpoint that was saved or restored last.
        verified: folders of which this attempt has read every byte.
        verify: read every byte of one, and say whether it is what the marker says.
        debris_age_s: seconds.

    Raises:
        SupersededError: a newer attempt has claimed the run.
        OSError: the store failed; what is half deleted has no marker any more.
    """
    state = lease.look().state
    found = sort_out(
        look(lease.filesystem, lease.prefix),
        state,
        policies=policies,
        newest=newest,
        generation=lease.generation,
        untouched_since_unix_s=time.time() - debris_age_s,
    )
    doomed = [*found.damaged, *found.debris]
    if found.retired and one_is_whole(found.keep, verified=verified, verify=verify):
        doomed = [*found.retired, *doomed]
    for folder in doomed:
        delete(lease.filesystem, lease.prefix, folder)
    for path in found.partials:
        # It may have been in one of these folders, or have become an object meanwhile.
        with suppress(FileNotFoundError):
            lease.filesystem.rm_file(path)
    return [folder.name for folder in doomed]


def one_is_whole(
    folders: Sequence[Folder], *, verified: Collection[str], verify: Callable[[Folder], bool]
) -> bool:
    """Whether every byte of at least one is what its marker says; reads as few as possible."""
    return any(folder.name in verified for folder in folders) or any(map(verify, folders))


def delete(filesystem: AbstractFileSystem, prefix: str, folder: Folder) -> None:
    """Delete a checkpoint, its marker first, and nothing in its folder that kettle didn't write."""
    delete_objects(filesystem, join(prefix, folder.name), folder.sizes_bytes)


def delete_objects(filesystem: AbstractFileSystem, path: str, names: Iterable[str]) -> None:
    """Delete these objects of a checkpoint as `delete` does, and its folder if it is empty then."""
    # One half deleted must not be taken for whole.
    for name in sorted(names, key=lambda name: (name != MARKER, name)):
        if is_own_object(name):
            with suppress(FileNotFoundError):
                filesystem.rm_file(join(path, name))
    # Not every fsspec filesystem knows folders, and one with foreign files stays.
    with suppress(OSError, NotImplementedError):
        filesystem.rmdir(path)


def _sizes(lease: Lease, name: str) -> dict[str, int]:
    try:
        found = lease.filesystem.ls(join(lease.prefix, name), detail=True)
    except FileNotFoundError:
        return {}
    return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in found}


def inspect(run: Reading, name: str, *, sizes_bytes: Mapping[str, int]) -> Candidate | Skipped:
    """Whether a checkpoint can be used, as far as its marker, the log and sizes tell.

    Raises:
        OSError: the store can't be read.
        CheckpointError: its marker is of another version.
    """
    uri = join(run.uri, name)
    granted = run.tail.state.unproven if name == run.tail.state.newest else None
    needs_marker = False
    try:
        try:
            marker = _written_marker(run, name, sizes_bytes=sizes_bytes, uri=uri)
        except TornCheckpointError:
            if granted is None:
                raise
            # Its writer was killed before it, or within it on a store that shows half an object.
            marker, needs_marker = _granted_marker(run, granted, uri=uri), True
        check_sizes(marker, sizes_bytes, uri=uri)
    except TornCheckpointError as error:
        return Skipped(name, str(error))
    return Candidate(name=name, marker=marker, needs_marker=needs_marker)


def _written_marker(run: Reading, name: str, *, sizes_bytes: Mapping[str, int], uri: str) -> Marker:
    missing = TornCheckpointError(f"{uri}: it was committed, and its marker is missing")
    if MARKER not in sizes_bytes:
        raise missing
    try:
        content = run.filesystem.cat_file(join(run.prefix, name, MARKER))
    except FileNotFoundError as error:
        # Deleted since the listing, by an attempt that has taken this one over.
        raise missing from error
    return read_marker(content, uri=uri)


def _granted_marker(run: Reading, number: int, *, uri: str) -> Marker:
    entry = read_entry(run.filesystem, run.prefix, number)
    if entry is None or not isinstance(entry.event, Committed):
        raise TornCheckpointError(f"{uri}: its marker is missing, and entry {number} of the log")
    return entry.event.marker


def _refuse_to_begin_again(state: LogState, skipped: Sequence[Skipped]) -> None:
    if not skipped and state.newest is None:
        return
    reasons = "\n".join(f"  {s.name}: {s.reason}" for s in skipped)
    raise NoCheckpointError(
        f"the run has committed checkpoints, and none of them can be used\n{reasons}\n"
        "  repair or bring back one of them, or begin again from step 0 with --from-scratch"
    )
