"""When a checkpoint is saved, how, and what becomes of one that can't be."""

import logging
from dataclasses import dataclass
from typing import Literal

from kettle.checkpoint.facts import Saved, TakenOver
from kettle.distributed import told_by_first
from kettle.errors import SaveError
from kettle.grace import GraceBudget
from kettle.records import Alarm, CheckpointCommitted
from kettle.state.parts import size_bytes
from kettle.train.run import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Covered:
    """The newest checkpoint that this attempt knows to be committed: restored, or its own."""

    step: int
    uri: str


Plan = Literal["wait_and_save", "save_instead", "wait_only"]


def save_periodic(run: Run, covered: Covered | None) -> Covered | None:
    """Save the last step boundary as the run file says, or raise an alarm and go on; collective."""
    covered = finish_background(run, covered)
    if run.config.checkpoint.periodic == "async":
        run.store.save_in_background(run.progress.step, run.parts)
        return covered
    try:
        saved = run.store.save(run.progress.step, run.parts)
    except SaveError as error:
        alarm(run, "save_failed", str(error))
        return covered
    return _committed(run, saved, reason="schedule")


def save_final(run: Run, covered: Covered | None) -> Covered:
    """Save the last step of the run, unless that is done; collective. Raises SaveError."""
    if covered is not None and covered.step == run.progress.step:
        return covered
    return _committed(run, run.store.save(run.progress.step, run.parts), reason="final")


def save_for_stop(
    run: Run, covered: Covered | None, *, budget: GraceBudget
) -> tuple[Covered | None, float | None]:
    """Commit the last step boundary before the grace period ends, if that can be; collective.

    A save that goes on in the background is waited for or given up, whichever leads to the newer
    committed step in the time that is left.

    Returns:
        What is covered afterwards, and how long its save took; None for one that was there before.
    """
    step = run.progress.step
    plan = _plan_for_stop(run, budget)
    if plan == "save_instead":
        run.store.cancel_background()
    covered = finish_background(run, covered)
    if plan == "wait_only" or (covered is not None and covered.step == step):
        return covered, None
    try:
        saved = run.store.save(step, run.parts)
    except SaveError as error:
        alarm(run, "save_failed", str(error))
        return covered, None
    return _committed(run, saved, reason="preemption"), saved.save_ms


def finish_background(run: Run, covered: Covered | None) -> Covered | None:
    """Wait for the background save, if there is one; what is covered afterwards; collective."""
    if run.store.background_step is None:
        return covered
    answer = run.store.finish_background()
    report_background(run)
    return Covered(answer.step, answer.uri) if isinstance(answer, Saved) else covered


def report_background(run: Run) -> None:
    """Make a record of how the background save ended, as soon as that is known."""
    match run.store.take_news():
        case Saved() as saved:
            _committed(run, saved, reason="schedule")
        case SaveError() as error:
            alarm(run, "save_failed", str(error))


def alarm(
    run: Run,
    kind: Literal["save_failed", "little_space", "conditional_writes_not_enforced"],
    message: str,
) -> None:
    """Tell of something that a person should look at; training goes on."""
    run.emit(Alarm(**who(run), kind=kind, step=run.progress.step, message=message))
    if run.ranks.is_first:
        log.warning("%s", message)


def warn_of_store(run: Run, taken: TakenOver) -> None:
    """Raise an alarm, once an attempt, where the store can't give what kettle would rely on."""
    if taken.conditional_writes == "not_enforced":
        alarm(
            run,
            "conditional_writes_not_enforced",
            f"the store of {run.store.uri} overwrites what it was asked to create; two attempts "
            "that write within one round trip of each other may not notice, so see to it that "
            "only one runs",
        )
    # The save that is in flight, beside those that are kept.
    needed_bytes = size_bytes(run.parts) * (run.config.checkpoint.keep + 1)
    if taken.free_bytes is not None and taken.free_bytes < needed_bytes:
        alarm(
            run,
            "little_space",
            f"{run.store.uri} has {taken.free_bytes / 1e9:.2f} GB free, and "
            f"{run.config.checkpoint.keep} checkpoints and the one being saved take up to "
            f"{needed_bytes / 1e9:.2f} GB; make room, or lower checkpoint.keep",
        )


def who(run: Run) -> dict[str, str]:
    """The fields that every record begins with."""
    return {"run_id": run.run_id, "attempt_id": run.attempt_id}


def _committed(
    run: Run, saved: Saved, *, reason: Literal["schedule", "final", "preemption"]
) -> Covered:
    run.emit(
        CheckpointCommitted(
            **who(run),
            step=saved.step,
            reason=reason,
            checkpoint_uri=saved.uri,
            save_ms=saved.save_ms,
            blocked_ms=saved.blocked_ms,
            size_bytes=saved.size_bytes,
        )
    )
    if reason != "preemption":
        run.store.prune_in_background(saved)
    return Covered(step=saved.step, uri=saved.uri)


def _plan_for_stop(run: Run, budget: GraceBudget) -> Plan:
    """What to do about a save in flight; collective."""
    if run.store.background_step in (None, run.progress.step):
        return "wait_and_save"
    return told_by_first(
        lambda: plan_for_stop(left_s=budget.left_s(), expected_s=run.store.expected_save_s),
        ranks=run.ranks,
    )


def plan_for_stop(*, left_s: float, expected_s: float | None) -> Plan:
    """Whether a save in flight is worth its time, when a newer step has to be saved: pure.

    Args:
        left_s: of the grace period.
        expected_s: how long a save takes; None if none has ended yet.
    """
    if expected_s is None or left_s < expected_s:
        # The older step is half written already; the newer one would not be in time.
        return "wait_and_save" if expected_s is None else "wait_only"
    return "wait_and_save" if left_s >= 2 * expected_s else "save_instead"
