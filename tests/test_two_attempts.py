"""Two attempts of a run alive at once: whatever the order of what they do, nothing is lost."""

import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from kettle.checkpoint.catalog import look
from kettle.checkpoint.digest import verify_object
from kettle.checkpoint.events import Committed
from kettle.checkpoint.facts import Identity
from kettle.checkpoint.layout import MARKER, checkpoint_name, place_of
from kettle.checkpoint.log import Lease, Tail, claim, read_tail
from kettle.checkpoint.marker import Marker, read_marker
from kettle.checkpoint.protocol import write_objects
from kettle.checkpoint.retention import latest
from kettle.checkpoint.store import CheckpointStore
from kettle.distributed import Ranks, process_group
from kettle.errors import TornCheckpointError
from support.drawer import Drawer
from support.schedules import Judge, Player, Turns, schedules
from support.small_runs import (
    KETTLE,
    PREFIX,
    Attempt,
    Left,
    Ways,
    check,
    foreign,
    payloads,
    story,
    whole,
)
from support.watched import WatchedFileSystem, watched_by


def begun() -> Left:
    """One attempt that has saved twice, and was killed while it saved a third time."""
    filesystem = Drawer()
    first = Attempt(filesystem, PREFIX, "z")
    first.start()
    first.save(1)
    first.save(2)
    debris = checkpoint_name(3, generation=1, attempt_id="z")
    filesystem.pipe_file(f"{PREFIX}/{debris}/__0_0.distcp", b"wei")
    others = foreign(PREFIX, folder=first.committed[0])
    for path, content in others.items():
        filesystem.pipe_file(path, content)
    return Left(objects=dict(filesystem.objects), sacred=others)


def short_life(attempt: Attempt) -> None:
    step = attempt.start()
    attempt.save(step + 1)
    attempt.prune()
    attempt.end(step + 1)


def longer_life(attempt: Attempt) -> None:
    step = attempt.start()
    attempt.save(step + 1)
    attempt.prune()
    attempt.save(step + 2)
    attempt.prune()


def life_from_scratch(attempt: Attempt) -> None:
    attempt.start(begin="scratch")
    attempt.save(1)
    attempt.prune()


LEFT = begun()


@dataclass
class Played:
    """One order of turns, and what was wrong with it."""

    turns: Turns
    faults: list[str]


def play(
    switches: tuple[int, ...],
    *,
    ways: Ways = KETTLE,
    life: Callable[[Attempt], None] = short_life,
    crash_at: int | None = None,
) -> Played:
    """Two attempts over one store, which is looked at as of the turn `crash_at` and of the end."""
    filesystem = Drawer(LEFT.objects)
    known = {f"{PREFIX}/{name}" for name in story(filesystem, PREFIX).granted}
    judge = Judge(filesystem, lambda folder: whole(filesystem, folder), known)
    turns = Turns(switches)
    crash: dict[str, bytes] = {}

    def after_turn(number: int) -> None:
        if number == crash_at:
            crash.update(filesystem.objects)

    attempts = [
        Attempt(
            WatchedFileSystem.over(filesystem, Player(me, turns, judge, after_turn)),
            PREFIX,
            name,
            ways=ways,
        )
        for me, name in enumerate("ab")
    ]
    turns.run([lambda a=a: life(a) for a in attempts])  # type: ignore[misc]
    faults = [*judge.faults, *(f"{type(e).__name__}: {e}" for e in turns.errors)]
    granted = {name for attempt in attempts for name in attempt.committed}
    for objects, promised in ((crash, set()), (dict(filesystem.objects), granted)):
        if objects and not faults:
            try:
                check(Drawer(objects), PREFIX, LEFT, granted=promised)
            except Exception as error:  # noqa: BLE001 - every fault is of interest
                faults.append(f"{type(error).__name__}: {error}")
    return Played(turns, faults)


def explored(
    *,
    most_switches: int,
    ways: Ways = KETTLE,
    life: Callable[[Attempt], None] = short_life,
) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Every order with so many switches, each with a crash at a turn of its own."""
    draw = random.Random(most_switches)
    faults: list[str] = []

    def one(switches: tuple[int, ...]) -> Turns:
        played = play(switches, ways=ways, life=life, crash_at=draw.randrange(70))
        faults[:] = played.faults
        return played.turns

    for switches in schedules(one, most_switches=most_switches):
        yield switches, list(faults)


def faults_of(**options: Any) -> tuple[int, list[str]]:
    """How many orders were played, and the first faults."""
    count, found = 0, []
    for switches, faults in explored(**options):
        count += 1
        found += [f"{switches}: {fault}" for fault in faults]
    return count, found[:10]


LIVES = [short_life, longer_life, life_from_scratch]


@pytest.mark.parametrize("life", LIVES)
def test_attempts_may_change_over_once_at_any_turn(life: Callable[[Attempt], None]) -> None:
    count, faults = faults_of(life=life, most_switches=1)
    assert faults == []
    assert count > 15


def test_attempts_may_change_over_twice_at_any_turns() -> None:
    count, faults = faults_of(most_switches=2)
    assert faults == []
    assert count > 300


@pytest.mark.parametrize("life", LIVES)
def test_attempts_may_change_over_at_random(life: Callable[[Attempt], None]) -> None:
    draw = random.Random(life.__name__)
    for _ in range(300):
        switches = tuple(sorted(draw.sample(range(90), draw.randrange(3, 20))))
        played = play(switches, life=life, crash_at=draw.randrange(90))
        assert played.faults == [], switches


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_attempts_may_change_over_three_times_at_any_turns() -> None:
    count, faults = faults_of(most_switches=3)
    assert faults == []
    assert count > 10_000


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("life", LIVES[1:])
def test_longer_lives_may_change_over_twice_at_any_turns(life: Callable[[Attempt], None]) -> None:
    count, faults = faults_of(life=life, most_switches=2)
    assert faults == []
    assert count > 300


# The same through torch.


class Weights:
    """A part whose content follows from the step."""

    def __init__(self, step: int) -> None:
        self.tensor = torch.full((5, 3), float(step))

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return {"weights": self.tensor}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.tensor = state["weights"]


def store_of(uri: str, name: str, ranks: Ranks) -> CheckpointStore:
    identity = Identity(run_id="run", fingerprint="f" * 64, attempt_id=name, experiment={})
    return CheckpointStore(
        uri, identity=identity, ranks=ranks, policies=[latest(1)], debris_age_s=-1.0
    )


def restored(store: CheckpointStore) -> int:
    """The step that a store goes on from, and its content is that step's."""
    store.take_over(begin="newest", after_failures=3)
    weights = Weights(0)
    step = store.restore({"part": weights}).step or 0
    assert torch.equal(weights.tensor, Weights(step).tensor)
    return step


def life_in_torch(store: CheckpointStore) -> None:
    step = restored(store)
    saved = store.save(step + 1, {"part": Weights(step + 1)})
    store.prune_in_background(saved)
    store.wait_for_retention()
    store.save(step + 2, {"part": Weights(step + 2)})
    store.leave(step=step + 2, exit_code=0)


def is_whole_in_torch(filesystem: AbstractFileSystem, folder: str) -> bool:
    try:
        told = read_marker(filesystem.cat_file(f"{folder}/{MARKER}"), uri=folder)
        for name, expected in told.objects.items():
            verify_object(
                filesystem, f"{folder}/{name}", expected, uri=folder, progress=lambda _: None
            )
    except (FileNotFoundError, TornCheckpointError):
        return False
    return True


def play_in_torch(switches: tuple[int, ...], *, ranks: Ranks) -> list[str]:
    prefix = f"/{uuid.uuid4().hex}/run"
    filesystem = MemoryFileSystem()
    first = store_of(f"memory:/{prefix}", "z", ranks)
    restored(first)
    first.save(1, {"part": Weights(1)})
    known = {f"{prefix}/{name}" for name in story(filesystem, prefix).granted}
    judge = Judge(filesystem, lambda folder: is_whole_in_torch(filesystem, folder), known)
    turns = Turns(switches)
    with ExitStack() as stack:
        stores = [
            store_of(
                stack.enter_context(
                    watched_by(
                        Player(me, turns, judge, lambda _: None), f"memory:/{prefix}", case=name
                    )
                ),
                name,
                ranks,
            )
            for me, name in enumerate("ab")
        ]
        turns.run([partial(life_in_torch, store) for store in stores])
    told = story(filesystem, prefix)
    faults = [*judge.faults, *told.broken, *(f"{type(e).__name__}: {e}" for e in turns.errors)]
    newest = place_of(told.line[-1])
    found = restored(store_of(f"memory:/{prefix}", "after", ranks))
    if newest is None or found != newest.step:
        faults.append(f"restored step {found} and not {newest}")
    filesystem.rm(prefix.rsplit("/", 1)[0], recursive=True)
    return faults


def test_fifty_orders_go_as_well_through_torch() -> None:
    draw = random.Random(50)
    with process_group("cpu", timeout_s=60) as ranks:
        for number in range(50):
            switches = tuple(sorted(draw.sample(range(90), number % 4)))
            assert play_in_torch(switches, ranks=ranks) == [], switches


# What would be wrong, and is seen to be.


def marker_before_objects(lease: Lease, name: str, told: Marker) -> None:
    lease.append(Committed(name=name, marker=told))
    lease.filesystem.pipe_file(f"{lease.prefix}/{name}/{MARKER}", told.to_bytes())
    write_objects(lease.filesystem, f"{lease.prefix}/{name}", payloads(told.step))


def marker_before_grant(lease: Lease, name: str, told: Marker) -> None:
    write_objects(lease.filesystem, f"{lease.prefix}/{name}", payloads(told.step))
    lease.filesystem.pipe_file(f"{lease.prefix}/{name}/{MARKER}", told.to_bytes())
    lease.append(Committed(name=name, marker=told))


def no_grant(lease: Lease, name: str, told: Marker) -> None:
    write_objects(lease.filesystem, f"{lease.prefix}/{name}", payloads(told.step))
    lease.filesystem.pipe_file(f"{lease.prefix}/{name}/{MARKER}", told.to_bytes())


class Unfenced(Lease):
    """Appends whoever has claimed the run."""

    def look(self, *, at_least: int = 0) -> Tail:
        return read_tail(self.filesystem, self.prefix, known=self.tail, at_least=at_least)


def claim_without_fence(*args: Any, **options: Any) -> Lease:
    lease = claim(*args, **options)
    lease.__class__ = Unfenced
    return lease


def prune_marker_last(lease: Lease, newest: str, *, keep: int) -> None:
    assert keep == 1
    lease.look()
    place = place_of(newest)
    assert place is not None
    for folder in look(lease.filesystem, lease.prefix).folders:
        if folder.place < place:
            for name in sorted(folder.sizes_bytes, key=lambda name: name == MARKER):
                if name != "README":
                    lease.filesystem.rm_file(f"{lease.prefix}/{folder.name}/{name}")


def prune_everything_older(lease: Lease, newest: str, *, keep: int) -> None:
    """Without a look at who holds the run, or what is foreign."""
    assert keep == 1
    place = place_of(newest)
    assert place is not None
    for folder in look(lease.filesystem, lease.prefix).folders:
        if folder.place < place:
            for name in sorted(folder.sizes_bytes, key=lambda name: name != MARKER):
                lease.filesystem.rm_file(f"{lease.prefix}/{folder.name}/{name}")


WRONG = {
    "marker before objects": (Ways(save=marker_before_objects), "before"),
    "marker before grant": (Ways(save=marker_before_grant), "was not granted"),
    "no grant": (Ways(save=no_grant), "was not granted"),
    "no fence": (Ways(claim=claim_without_fence), "has claimed the run"),
    "marker deleted last": (Ways(prune=prune_marker_last), "is deleted below its marker"),
    "foreign files deleted": (Ways(prune=prune_everything_older), "is gone or changed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_protocol_is_found_out(name: str) -> None:
    ways, words = WRONG[name]
    for _, faults in explored(ways=ways, most_switches=2):
        if any(words in fault for fault in faults):
            return
    pytest.fail("every order of turns went well")
