"""Two attempts at once, in an order that the test chooses: each filesystem operation is a turn.

An attempt that never gets another turn is as good as dead, so what a store holds after any turn is
what a crash of both would leave.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fsspec import AbstractFileSystem

from kettle.checkpoint.events import Committed
from kettle.checkpoint.layout import LOG, MARKER, place_of
from kettle.checkpoint.log import Entry
from kettle.errors import SupersededError, TornCheckpointError
from support.small_runs import BrokenError
from support.watched import Operation, Watcher

T = TypeVar("T")

PATIENCE_S = 30.0


class Turns:
    """Lets two lives act one at a time, and changes over before the turns that are named."""

    def __init__(self, switches: Sequence[int]) -> None:
        self.count = 0
        self.both_until: int | None = None
        self.errors: list[BaseException] = []
        self._switches = frozenset(switches)
        self._gates = (threading.Semaphore(1), threading.Semaphore(0))
        self._alive = [True, True]

    def run(self, lives: Sequence[Callable[[], None]]) -> None:
        """Let both live to their ends, the first one first."""
        threads = [
            threading.Thread(target=self._live, args=(me, life), daemon=True)
            for me, life in enumerate(lives)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "no attempt has its turn"

    def take(self, me: int) -> int:
        """Wait for a turn; its number."""
        other = 1 - me
        if self.count in self._switches and self._alive[other]:
            # The other one takes this turn.
            self._switches -= {self.count}
            self._gates[other].release()
            self._wait(me)
        number = self.count
        self.count += 1
        return number

    def _live(self, me: int, life: Callable[[], None]) -> None:
        self._wait(me)
        try:
            life()
        except SupersededError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by whoever reads them
            self.errors.append(error)
        self._alive[me] = False
        if self.both_until is None:
            self.both_until = self.count
        self._gates[1 - me].release()

    def _wait(self, me: int) -> None:
        assert self._gates[me].acquire(timeout=PATIENCE_S), "no attempt has its turn"


@dataclass
class Judge:
    """Looks on at every turn, and notes what should never happen.

    Args:
        filesystem: the store itself, which nobody watches.
        is_whole: whether a folder is what its marker says.
        granted: folders that were granted before.
    """

    filesystem: AbstractFileSystem
    is_whole: Callable[[str], bool]
    granted: set[str]
    faults: list[str] = field(default_factory=list)
    _dying: set[str] = field(default_factory=set)
    _late: set[str] = field(default_factory=set)
    _generation: int = 0

    def before(self, operation: Operation) -> None:
        folder = operation.path.rsplit("/", 1)[0]
        if operation.kind != "delete" or folder.endswith(LOG):
            return
        is_marked = self.filesystem.exists(f"{folder}/{MARKER}")
        if is_marked and operation.name != MARKER and folder not in self._dying | self._late:
            self.faults.append(f"{operation.path} is deleted below its marker")
        self._dying.add(folder)

    def after(self, operation: Operation) -> None:
        folder = operation.path.rsplit("/", 1)[0]
        if operation.kind == "create" and folder.endswith(LOG):
            entry = Entry.model_validate_json(operation.content)
            self._generation = entry.generation
            if isinstance(entry.event, Committed):
                self._saw_grant(f"{folder.removesuffix(LOG)}{entry.event.name}", entry.event)
        elif operation.kind == "overwrite" and operation.name == MARKER:
            if folder not in self.granted:
                self.faults.append(f"{operation.path} is written, and was not granted")
            # One that was granted may be restored, or left behind, and deleted before its own
            # writer goes on: then that one's marker comes late.
            place = place_of(folder.rsplit("/", 1)[-1])
            if place is not None and place.generation < self._generation:
                self._late.add(folder)
            if folder not in self._dying and not self.is_whole(folder):
                self.faults.append(f"{operation.path} is written before what it names")

    def _saw_grant(self, folder: str, event: Committed) -> None:
        self.granted.add(folder)
        sizes = {
            name: self.filesystem.exists(f"{folder}/{name}")
            and self.filesystem.info(f"{folder}/{name}")["size"]
            for name in event.marker.objects
        }
        if sizes != {name: e.size_bytes for name, e in event.marker.objects.items()}:
            self.faults.append(f"{folder} is granted before its objects are there")


class Player(Watcher):
    """One of two attempts: takes turns, under the eyes of a judge."""

    def __init__(
        self, me: int, turns: Turns, judge: Judge, after_turn: Callable[[int], None]
    ) -> None:
        self._me, self._turns, self._judge, self._after_turn = me, turns, judge, after_turn

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        number = self._turns.take(self._me)
        self._judge.before(operation)
        try:
            result = act(operation.content)
            self._judge.after(operation)
            return result
        finally:
            self._after_turn(number)


def schedules(
    play: Callable[[tuple[int, ...]], Turns], *, most_switches: int
) -> Iterator[tuple[int, ...]]:
    """Play every order of turns with at most so many switches, and give what was played.

    A switch beyond the end of one of the two would change nothing, so none is tried twice.
    """
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        switches = waiting.pop()
        turns = play(switches)
        yield switches
        if len(switches) < most_switches:
            first = switches[-1] + 1 if switches else 0
            until = turns.both_until or 0
            waiting += [(*switches, at) for at in range(first, until)]


__all__ = ["BrokenError", "Judge", "Player", "TornCheckpointError", "Turns", "schedules"]
