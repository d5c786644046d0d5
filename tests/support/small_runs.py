"""Attempts of a run whose checkpoints hold a few bytes: kettle's protocol, without torch's state.

A step's content follows from its number, as that of a run that computes bit for bit the same does.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from kettle.checkpoint.catalog import Folder
from kettle.checkpoint.digest import Expected, digest_of
from kettle.checkpoint.events import Claimed, Committed, Ended, Quarantined, Restored
from kettle.checkpoint.layout import (
    LOG,
    MARKER,
    METADATA,
    PARTIAL,
    checkpoint_name,
    entry_name,
    place_of,
)
from kettle.checkpoint.log import Lease, claim, entry_numbers, read_entry
from kettle.checkpoint.marker import Marker, read_marker
from kettle.checkpoint.protocol import (
    Candidate,
    candidates,
    commit,
    first_that_loads,
    prune,
    settle,
    write_objects,
)
from kettle.checkpoint.retention import latest
from kettle.errors import TornCheckpointError
from support.checkpoints import marker
from support.drawer import Drawer

SHARD = "__0_0.distcp"


def payloads(step: int) -> dict[str, bytes]:
    """What the checkpoint of a step holds."""
    return {SHARD: b"weights after step %d" % step, METADATA: b'{"step": %d}' % step}


def expected(step: int) -> dict[str, Expected]:
    return {
        name: Expected(size_bytes=len(content), digest=digest_of(content))
        for name, content in payloads(step).items()
    }


def save(lease: Lease, name: str, told: Marker) -> None:
    """As kettle saves: objects, grant, marker."""
    written = write_objects(lease.filesystem, f"{lease.prefix}/{name}", payloads(told.step))
    commit(lease, told.model_copy(update={"objects": written}), name=name)


def prune_but(lease: Lease, newest: str, *, keep: int) -> None:
    """As kettle prunes, with debris of every age."""
    place = place_of(newest)
    assert place is not None

    def is_whole(folder: Folder) -> bool:
        return whole(lease.filesystem, f"{lease.prefix}/{folder.name}")

    prune(
        lease,
        policies=[latest(keep)],
        newest=place,
        verified=set(),
        verify=is_whole,
        debris_age_s=-1.0,
    )


@dataclass(frozen=True)
class Ways:
    """How attempts do things: as kettle does, or wrongly."""

    claim: Callable[..., Lease] = claim
    save: Callable[[Lease, str, Marker], None] = save
    prune: Callable[..., None] = prune_but


KETTLE = Ways()


@dataclass
class Attempt:
    """One attempt. Each call is what a worker does at one point of its life."""

    filesystem: AbstractFileSystem
    prefix: str
    name: str
    ways: Ways = KETTLE
    keep: int = 1
    newest: str = ""
    restored: int | None = None
    committed: list[str] = field(default_factory=list)

    def start(self, *, begin: Literal["newest", "scratch"] = "newest") -> int:
        """Claim and restore; the step that it goes on from."""
        self.lease = self.ways.claim(
            self.filesystem, self.prefix, uri=self.prefix, attempt_id=self.name, begin=begin
        )
        found, skipped = first_that_loads(candidates(self.lease), self._load)
        settle(self.lease, found, skipped)
        if found is not None:
            self.newest = found.name
            self.restored = found.marker.step
        return self.restored or 0

    def save(self, step: int) -> None:
        generation = self.lease.generation
        name = checkpoint_name(step, generation=generation, attempt_id=self.name)
        told = marker(
            step=step, generation=generation, attempt_id=self.name, objects=expected(step)
        )
        self.ways.save(self.lease, name, told)
        self.committed.append(name)
        self.newest = name

    def prune(self) -> None:
        self.ways.prune(self.lease, self.newest, keep=self.keep)

    def end(self, step: int) -> None:
        self.lease.append(Ended(step=step, exit_code=0))

    def _load(self, candidate: Candidate) -> None:
        """Read every byte, as a restore does."""
        folder = f"{self.prefix}/{candidate.name}"
        found = {}
        for name, wanted in candidate.marker.objects.items():
            try:
                found[name] = self.filesystem.cat_file(f"{folder}/{name}")
            except FileNotFoundError as error:
                raise TornCheckpointError(f"{folder}: {name} is missing") from error
            if digest_of(found[name]) != wanted.digest:
                raise TornCheckpointError(f"{folder}: {name} is damaged")
        # Whatever a marker says: this is what the step must be.
        assert found == payloads(candidate.marker.step), f"took {folder} for whole: {found}"


def whole(filesystem: AbstractFileSystem, folder: str) -> bool:
    """Whether a checkpoint is what its marker says, and that is what the step must be."""
    try:
        told = read_marker(filesystem.cat_file(f"{folder}/{MARKER}"), uri=folder)
        found = {name: filesystem.cat_file(f"{folder}/{name}") for name in told.objects}
    except (FileNotFoundError, TornCheckpointError):
        return False
    return found == payloads(told.step) and dict(told.objects) == expected(told.step)


@dataclass(frozen=True)
class Story:
    """What a run's log tells, in its order.

    Attributes:
        line: what was granted or restored since the last begin from scratch, the newest last.
        granted: every checkpoint that was ever granted.
        quarantined: what was set aside.
        from_generation: of the last begin from scratch.
        broken: what should never have been written.
    """

    line: tuple[str, ...]
    granted: frozenset[str]
    quarantined: frozenset[str]
    from_generation: int
    broken: tuple[str, ...]


def story(filesystem: AbstractFileSystem, prefix: str) -> Story:
    """Read the log from its beginning, and believe nothing but its events."""
    line: list[str] = []
    generation = from_generation = 0
    granted: set[str] = set()
    quarantined: set[str] = set()
    broken: list[str] = []
    for number in entry_numbers(filesystem, prefix):
        entry = read_entry(filesystem, prefix, number)
        match entry.event if entry is not None else None:
            case Committed(name=name, marker=told):
                if told.generation != generation:
                    broken.append(
                        f"{entry_name(number)}: generation {told.generation} commits {name} after "
                        f"generation {generation} has claimed the run"
                    )
                line.append(name)
                granted.add(name)
            case Restored(name=name):
                line.append(name)
            case Quarantined(name=name):
                line = [other for other in line if other != name]
                quarantined.add(name)
            case Claimed(from_scratch=from_scratch):
                assert entry is not None
                if entry.generation <= generation:
                    broken.append(f"{entry_name(number)}: generation {entry.generation} again")
                generation = entry.generation
                if from_scratch:
                    line, from_generation = [], generation
    return Story(
        tuple(line), frozenset(granted), frozenset(quarantined), from_generation, tuple(broken)
    )


PREFIX = "/root/run"


def foreign(prefix: str, *, folder: str) -> dict[str, bytes]:
    """What kettle didn't write, beside its own: in the run, in a checkpoint, in other runs."""
    return {
        f"{prefix}/notes.txt": b"of a person",
        f"{prefix}/{LOG}/README": b"of a person",
        f"{prefix}/{folder}/README": b"of a person",
        f"{prefix}/{folder}/sub/{SHARD}": b"of a person",
        f"{prefix}/step-1/{MARKER}": b"of another program",
        f"{prefix}-b/step-00000001-g0001-a/{SHARD}": b"of another run",
        f"{prefix}-b/step-00000001-g0001-a/{MARKER}": b"of another run",
        f"{prefix}-b/{LOG}/{entry_name(1)}": b"of another run",
    }


@dataclass(frozen=True)
class Left:
    """What earlier attempts have left.

    Attributes:
        sacred: what nobody may delete or change.
        damaged: folders whose content is not what their marker says.
    """

    objects: Mapping[str, bytes]
    sacred: Mapping[str, bytes]
    damaged: frozenset[str] = frozenset()


def empty(prefix: str = PREFIX) -> Left:
    """A run that nobody has started, beside other things."""
    others = foreign(prefix, folder="step-00000001-g0001-z")
    return Left(objects=others, sacred=others)


def lived_in(prefix: str = PREFIX) -> Left:
    """Two attempts: a checkpoint in quarantine, some to be pruned, debris of a killed save."""
    filesystem = Drawer()
    first = Attempt(filesystem, prefix, "a")
    first.start()
    for step in (1, 2, 3, 4):
        first.save(step)
    first.lease.append(Quarantined(name=first.newest, reason="crashes"))
    second = Attempt(filesystem, prefix, "b")
    assert second.start() == 3
    second.save(4)
    killed = checkpoint_name(5, generation=2, attempt_id="b")
    filesystem.pipe_file(f"{prefix}/{killed}/{SHARD}", b"wei")
    filesystem.pipe_file(f"{prefix}/{killed}/__1_0.distcp", b"")
    filesystem.pipe_file(f"{prefix}/{LOG}/.{'0' * 32}.partial", b"{")
    others = foreign(prefix, folder=first.committed[0])
    for path, content in others.items():
        filesystem.pipe_file(path, content)
    objects = dict(filesystem.objects)
    aside = f"{prefix}/{first.newest}/"
    quarantined = {path: objects[path] for path in objects if path.startswith(aside)}
    return Left(objects=objects, sacred=others | quarantined)


def changed(left: Left, changes: Mapping[str, bytes | None]) -> Left:
    """The same with other objects, or without some."""
    objects = {**left.objects, **{path: c for path, c in changes.items() if c is not None}}
    for path, content in changes.items():
        if content is None:
            del objects[path]
    return replace(left, objects=objects)


def memory(objects: Mapping[str, bytes]) -> MemoryFileSystem:
    """A filesystem of its own in memory."""
    filesystem = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    for path, content in objects.items():
        filesystem.pipe_file(path, content)
    return filesystem


def damage(content: bytes) -> bytes:
    """The same with one bit flipped, in the middle."""
    flipped = bytearray(copy.copy(content))
    flipped[len(flipped) // 2] ^= 16
    return bytes(flipped)


class BrokenError(AssertionError):
    """An invariant of the store does not hold."""


def check(filesystem: AbstractFileSystem, prefix: str, left: Left, *, granted: set[str]) -> None:
    """What must hold whenever all attempts are dead, shown by new ones, which change the store.

    Args:
        granted: what an attempt was told to be committed.

    Raises:
        BrokenError: saying what does not hold.
    """
    before = story(filesystem, prefix)
    if before.broken:
        raise BrokenError("; ".join(before.broken))
    if lost := granted - before.granted:
        raise BrokenError(f"the log does not know of {lost}")
    wanted = newest_that_counts(filesystem, prefix, before, left)
    after = Attempt(filesystem, prefix, "after")
    step = after.start()
    if after.newest != wanted:
        raise BrokenError(f"restored {after.newest} (step {step}) and not {wanted}")
    after.save(step + 1)
    after.keep = 2
    after.prune()
    if wanted and not whole(filesystem, f"{prefix}/{wanted}"):
        raise BrokenError(f"{wanted} is gone, though two are kept")
    last = Attempt(filesystem, prefix, "last")
    if (found := last.start()) != step + 1:
        raise BrokenError(f"the next save is not found: step {found}, not {step + 1}")
    for path, content in left.sacred.items():
        if not filesystem.exists(path) or filesystem.cat_file(path) != content:
            raise BrokenError(f"{path} is gone or changed")
    check_debris(filesystem, prefix, left)


def newest_that_counts(filesystem: AbstractFileSystem, prefix: str, told: Story, left: Left) -> str:
    """The checkpoint to resume from: granted last, or with a marker, where the log lost its entry.

    Empty where nothing was ever committed.
    """
    line = [name for name in told.line if name not in left.damaged]
    marked = {path.split("/")[-2] for path in filesystem.find(prefix) if path.endswith(MARKER)}
    forgotten = [
        place
        for place in map(place_of, sorted(marked - told.granted - told.quarantined - {*line}))
        if place is not None
        and place.generation >= told.from_generation
        and whole(filesystem, f"{prefix}/{place.name}")
    ]
    return max(forgotten).name if forgotten else line[-1] if line else ""


def check_debris(filesystem: AbstractFileSystem, prefix: str, left: Left) -> None:
    """After a prune that takes debris of every age, nothing lies around."""
    by_folder: dict[str, set[str]] = {}
    foreign_folders = {path.removeprefix(f"{prefix}/").split("/")[0] for path in left.sacred}
    for path, info in filesystem.find(prefix, withdirs=True, detail=True).items():
        folder, _, name = path.removeprefix(prefix).strip("/").partition("/")
        if path in left.sacred or (info["type"] == "directory" and folder in foreign_folders):
            continue
        if folder == LOG and name and not name.endswith(".json"):
            raise BrokenError(f"{path} is left")
        if place_of(folder) is not None:
            by_folder.setdefault(folder, set()).add(name)
    for folder, names in by_folder.items():
        has_partial = any(name.endswith(PARTIAL) for name in names)
        if has_partial or not whole(filesystem, f"{prefix}/{folder}"):
            raise BrokenError(f"{folder} is left, with {sorted(names)}")
