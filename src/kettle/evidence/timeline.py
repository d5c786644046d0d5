"""Records to attempts, in the order in which the run lived them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kettle.records import (
    Alarm,
    CheckpointCommitted,
    CheckpointSkipped,
    Preemption,
    Record,
    RunCompleted,
    RunFailed,
    RunStarted,
    Step,
    StopDecided,
)


@dataclass(frozen=True)
class Attempt:
    """What one launch left behind.

    Attributes:
        resumed_from: step of the checkpoint that it restored; None if it began anew or never
            started.
        started: None for an attempt that ended before it could train.
        steps: in log order, so a step that was written twice is there twice.
        preemption: the last word about its eviction, if it was evicted.
        failed: the first failure, which is the cause of further ones.
    """

    run_id: str
    attempt_id: str
    resumed_from: int | None
    started: RunStarted | None
    steps: tuple[Step, ...]
    checkpoints: tuple[CheckpointCommitted, ...]
    skipped: tuple[CheckpointSkipped, ...]
    alarms: tuple[Alarm, ...]
    stop: StopDecided | None
    preemption: Preemption | None
    completed: RunCompleted | None
    failed: RunFailed | None

    @property
    def saved_steps(self) -> frozenset[int]:
        """Steps of which this attempt says that a checkpoint holds them."""
        saved = {checkpoint.step for checkpoint in self.checkpoints}
        evicted = self.preemption
        if evicted is not None and evicted.outcome in ("saved", "already_saved"):
            assert evicted.step is not None
            saved.add(evicted.step)
        return frozenset(saved)


def attempts_of(records: Iterable[Record]) -> tuple[Attempt, ...]:
    """Group the records of one run by attempt and put the attempts in order.

    What an attempt resumed from says where it belongs; the wall clock decides only between
    attempts that resumed from the same step and places those that never started. Attempts that
    even the clock can't tell apart stay in log order.
    """
    keyed: list[tuple[int, Attempt]] = []
    origin = 0
    for attempt in map(_attempt, sorted(_groups(records), key=_began_at)):
        if attempt.started:
            origin = attempt.resumed_from or 0
        keyed.append((origin, attempt))
    # Sorting is stable: ties stay in the clock's order, and the clock's ties in log order.
    return tuple(attempt for _, attempt in sorted(keyed, key=lambda pair: pair[0]))


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    groups: list[list[Record]] = []
    newest: dict[str, list[Record]] = {}
    for record in records:
        group = newest.get(record.attempt_id)
        restarted = isinstance(record, RunStarted) and group is not None and _has_started(group)
        # A container that is restarted inside its pod keeps the pod's name, and so its id.
        if group is None or restarted:
            group = newest[record.attempt_id] = []
            groups.append(group)
        group.append(record)
    return groups


def _has_started(group: Sequence[Record]) -> bool:
    return any(isinstance(record, RunStarted) for record in group)


def _began_at(group: Sequence[Record]) -> float:
    started = [record for record in group if isinstance(record, RunStarted)]
    return (started or group)[0].time_unix_s


def _attempt(group: Sequence[Record]) -> Attempt:
    started = next((r for r in group if isinstance(r, RunStarted)), None)
    return Attempt(
        run_id=group[0].run_id,
        attempt_id=group[0].attempt_id,
        resumed_from=started.resumed_from if started else None,
        started=started,
        steps=tuple(r for r in group if isinstance(r, Step)),
        checkpoints=tuple(r for r in group if isinstance(r, CheckpointCommitted)),
        skipped=tuple(r for r in group if isinstance(r, CheckpointSkipped)),
        alarms=tuple(r for r in group if isinstance(r, Alarm)),
        stop=next((r for r in reversed(group) if isinstance(r, StopDecided)), None),
        preemption=next((r for r in reversed(group) if isinstance(r, Preemption)), None),
        completed=next((r for r in reversed(group) if isinstance(r, RunCompleted)), None),
        failed=next((r for r in group if isinstance(r, RunFailed)), None),
    )
