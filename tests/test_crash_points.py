"""An attempt is cut off before, within and after each of its operations; the next one goes on."""

import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeAlias, TypeVar

import pytest
from fsspec import AbstractFileSystem

from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import LOG, MARKER, METADATA, checkpoint_name
from support.drawer import Drawer
from support.small_runs import (
    PREFIX,
    SHARD,
    Attempt,
    Left,
    changed,
    check,
    damage,
    empty,
    lived_in,
    memory,
)
from support.system_calls import watched_calls
from support.watched import CHANGES, Operation, WatchedFileSystem, Watcher

T = TypeVar("T")


class Cut(BaseException):
    """The process is gone at this point; no handler may have a say."""


class Death(Watcher):
    """Counts operations, and kills the process around one of them.

    Args:
        at: the number of the operation, from 0; None to count only.
        when: "before" it happens, "within" a write, or "after".
    """

    def __init__(self, at: int | None, when: str = "before") -> None:
        self.operations: list[Operation] = []
        self._at, self._when = at, when
        self._dead = False

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if self._dead:
            raise Cut
        number = len(self.operations)
        self.operations.append(operation)
        if number != self._at:
            return act(operation.content)
        self._dead = True
        if self._when != "before":
            content = operation.content
            act(content if self._when == "after" else content[: len(content) // 2])
        raise Cut


def life(attempt: Attempt) -> None:
    """All that an attempt can do: restore, save, delete, leave."""
    step = attempt.start()
    attempt.save(step + 1)
    attempt.save(step + 2)
    attempt.prune()
    attempt.save(step + 3)
    attempt.prune()
    attempt.end(step + 3)


def save_over_debris(attempt: Attempt) -> None:
    """A save failed, and is tried again in the same folder; others lie beside it."""
    step = attempt.start()
    assert isinstance(attempt.filesystem, WatchedFileSystem)
    name = checkpoint_name(step + 1, generation=attempt.lease.generation, attempt_id=attempt.name)
    debris = {
        SHARD: b"wei",
        "__1_0.distcp": b"of a rank that is no more",
        METADATA: b"{}",
        MARKER: b"",
        f".{uuid.uuid4().hex}.partial": b"{",
    }
    for inside, content in debris.items():
        attempt.filesystem.inner.pipe_file(f"{attempt.prefix}/{name}/{inside}", content)
    attempt.save(step + 1)
    attempt.save(step + 2)
    attempt.prune()


def begin_again(attempt: Attempt) -> None:
    attempt.start(begin="scratch")
    attempt.save(1)
    attempt.save(2)
    attempt.prune()


def of_newest(name: str) -> str:
    """An object of the checkpoint that was committed last."""
    return f"{PREFIX}/{checkpoint_name(4, generation=2, attempt_id='b')}/{name}"


def without_marker() -> Left:
    left = lived_in()
    return changed(left, {of_newest(MARKER): None})


def with_an_empty_marker() -> Left:
    left = lived_in()
    return changed(left, {of_newest(MARKER): b""})


def with_a_damaged_newest() -> Left:
    left = lived_in()
    path = of_newest(SHARD)
    damaged = changed(left, {path: damage(left.objects[path])})
    return replace(damaged, damaged=frozenset([path.split("/")[-2]]))


def with_a_damaged_entry() -> Left:
    """The entry of the log that grants the newest checkpoint can't be read."""
    left = lived_in()
    path = max(path for path in left.objects if path.startswith(f"{PREFIX}/{LOG}/0"))
    return changed(left, {path: b""})


STORIES: dict[str, tuple[Callable[[], Left], Callable[[Attempt], None]]] = {
    "first attempt": (empty, life),
    "third attempt": (lived_in, life),
    "marker not written": (without_marker, life),
    "marker without content": (with_an_empty_marker, life),
    "damaged checkpoint": (with_a_damaged_newest, life),
    "damaged entry": (with_a_damaged_entry, life),
    "debris of the same name": (lived_in, save_over_debris),
    "from scratch": (lived_in, begin_again),
}


class InMemory:
    """A new store in memory for each cut."""

    def __init__(self, left: Left) -> None:
        self.left = left
        self.prefix = PREFIX

    def fresh(self) -> AbstractFileSystem:
        return memory(self.left.objects)


class OnDisk:
    """The same in local files."""

    def __init__(self, left: Left, root: Path) -> None:
        self._root = root
        self.prefix = f"{self._root}{PREFIX}"
        self.left = replace(
            left,
            objects={f"{self._root}{path}": c for path, c in left.objects.items()},
            sacred={f"{self._root}{path}": c for path, c in left.sacred.items()},
        )

    def fresh(self) -> AbstractFileSystem:
        shutil.rmtree(self._root, ignore_errors=True)
        for path, content in self.left.objects.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content)
        return open_store(self.prefix)[0]


Store: TypeAlias = InMemory | OnDisk
Made: TypeAlias = Callable[[Left], OnDisk]


class DeathByCall(Watcher):
    """Kills the process before a system call that changes a file or a folder."""

    def __init__(self, at: int | None) -> None:
        self.seen: list[tuple[str, str]] = []
        self._at = at
        self._dead = False

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if self._dead:
            raise Cut
        return act(operation.content)

    def live(
        self, store: Store, act: Callable[[Attempt], None]
    ) -> tuple[AbstractFileSystem, set[str]]:
        filesystem = store.fresh()
        attempt = Attempt(WatchedFileSystem.over(filesystem, self), store.prefix, "c")
        with watched_calls(self._called), suppress(Cut):
            act(attempt)
        return filesystem, set(attempt.committed)

    def _called(self, name: str, path: str) -> None:
        if not self._dead:
            self.seen.append((name, path))
            self._dead = len(self.seen) - 1 == self._at
        if self._dead:
            raise Cut


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Made]:
    """Makes stores of local files, on a disk in memory where the machine has one: it is faster."""
    shared = Path("/dev/shm")
    root = shared / f"kettle-{uuid.uuid4().hex}" if shared.is_dir() else tmp_path
    yield lambda left: OnDisk(left, root)
    shutil.rmtree(root, ignore_errors=True)


def points(operations: list[Operation]) -> Iterator[tuple[int, str]]:
    """Every place where the process may end."""
    for number, operation in enumerate(operations):
        yield number, "before"
        if operation.kind in ("write", "overwrite"):
            yield number, "within"
        if operation.kind in CHANGES:
            yield number, "after"


def live(
    store: Store, act: Callable[[Attempt], None], death: Watcher
) -> tuple[AbstractFileSystem, set[str]]:
    """Let an attempt live until its death; the store, and what it was told to be committed."""
    filesystem = store.fresh()
    attempt = Attempt(WatchedFileSystem.over(filesystem, death), store.prefix, "c")
    with suppress(Cut):
        act(attempt)
    return filesystem, set(attempt.committed)


def checked(
    store: Store, filesystem: AbstractFileSystem, granted: set[str], *, where: str
) -> list[str]:
    try:
        check(filesystem, store.prefix, store.left, granted=granted)
    except Exception as error:  # noqa: BLE001 - every fault is of interest
        return [f"{where}: {type(error).__name__}: {error}"]
    return []


def every_cut(store: Store, act: Callable[[Attempt], None]) -> list[str]:
    """What goes wrong, and where the attempt was cut off for it."""
    counted = Death(None)
    live(store, act, counted)
    faults = []
    for at, when in points(counted.operations):
        where = f"{when} {at} {counted.operations[at]}"
        faults += checked(store, *live(store, act, Death(at, when)), where=where)
    return faults


@pytest.mark.parametrize("name", STORIES)
def test_an_attempt_may_end_at_any_operation_in_memory(name: str) -> None:
    build, act = STORIES[name]
    assert every_cut(InMemory(build()), act) == []


def two_lives(left: Left, first: Death, second: Death) -> list[str]:
    """What goes wrong if an attempt ends, and the one after it does, too."""
    filesystem = Drawer(left.objects)
    granted = set()
    for name, death in (("c", first), ("d", second)):
        attempt = Attempt(WatchedFileSystem.over(filesystem, death), PREFIX, name)
        with suppress(Cut):
            life(attempt)
        granted |= set(attempt.committed)
    try:
        check(filesystem, PREFIX, left, granted=granted)
    except Exception as error:  # noqa: BLE001 - every fault is of interest
        return [f"{type(error).__name__}: {error}"]
    return []


def pairs(left: Left) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    counted = Death(None)
    two_lives(left, counted, Death(None))
    ends = list(points(counted.operations))
    return list(product(ends, ends))


@pytest.mark.parametrize("build", [lived_in, with_an_empty_marker, with_a_damaged_entry])
def test_the_next_attempt_may_end_as_well(build: Callable[[], Left]) -> None:
    left = build()
    for first, second in random.Random(2).sample(pairs(left), 200):
        assert two_lives(left, Death(*first), Death(*second)) == [], (first, second)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("build", [lived_in, with_an_empty_marker])
def test_the_next_attempt_may_end_as_well_everywhere(build: Callable[[], Left]) -> None:
    left = build()
    for first, second in pairs(left):
        assert two_lives(left, Death(*first), Death(*second)) == [], (first, second)


@pytest.mark.parametrize("name", STORIES)
def test_an_attempt_may_end_at_any_operation_on_files(name: str, on_disk: Made) -> None:
    build, act = STORIES[name]
    assert not every_cut(on_disk(build()), act)


@pytest.mark.parametrize("name", STORIES)
def test_an_attempt_may_end_before_any_system_call(name: str, on_disk: Made) -> None:
    build, act = STORIES[name]
    store = on_disk(build())
    calls = DeathByCall(None)
    calls.live(store, act)
    assert len(calls.seen) > 20
    faults = []
    for at in range(len(calls.seen)):
        death = DeathByCall(at)
        faults += checked(store, *death.live(store, act), where=str(death.seen[-1]))
    assert not faults


@pytest.mark.parametrize("entry", [-1, -2, 0], ids=["newest", "before it", "oldest"])
def test_a_flipped_bit_in_the_log_costs_no_checkpoint(entry: int) -> None:
    left = lived_in()
    path = sorted(path for path in left.objects if path.startswith(f"{PREFIX}/{LOG}/0"))[entry]
    content = left.objects[path]
    for bit in range(entry % 7, len(content) * 8, 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        attempt = Attempt(Drawer({**left.objects, path: bytes(flipped)}), PREFIX, "c")
        assert attempt.start() == 4, bit
