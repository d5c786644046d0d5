"""The story of one attempt: restore, step until the end or an eviction, save."""

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from kettle.checkpoint.store import Saved
from kettle.exits import ExitCode
from kettle.grace import GraceBudget
from kettle.identity import library_versions
from kettle.model.build import assert_tied, parameter_count
from kettle.records import (
    CheckpointCommitted,
    CheckpointSkipped,
    Preemption,
    RunCompleted,
    RunStarted,
    Step,
    StopDecided,
)
from kettle.state.digest import weights_digest
from kettle.train.run import Run
from kettle.train.step import StepResult, take_step
from kettle.train.stop import StopDecision

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    exit_code: ExitCode


def train(run: Run) -> Outcome:
    """Run to `total_steps` or to an eviction, whichever comes first; collective."""
    started = time.monotonic()
    covered = restore(run)
    total_steps = run.config.experiment.total_steps

    for step in range(run.progress.step + 1, total_steps + 1):
        step_started = time.monotonic()
        result = take_step(run, step)
        if isinstance(result, StopDecision):
            return leave(run, result, covered=covered)
        run.emit(step_record(run, step, result, elapsed_s=time.monotonic() - step_started))
        reason = run.schedule.due(step)
        if reason is not None:
            covered = save(run, reason)
            prune(run, covered)

    digest = weights_digest(run.parts["model"].state_dict(), ranks=run.ranks)
    run.emit(
        RunCompleted(
            **_who(run),
            step=total_steps,
            weights_digest=digest,
            exit_code=ExitCode.OK,
            wall_s=time.monotonic() - started,
        )
    )
    if run.ranks.is_first:
        log.info("%s: complete after step %d", run.run_id, total_steps)
    return Outcome(ExitCode.OK)


def restore(run: Run) -> Saved | None:
    """Restore every part from the newest whole checkpoint, if there is one; collective."""
    started = time.monotonic()
    found = run.store.latest_complete()
    for skipped in found.skipped:
        run.emit(CheckpointSkipped(**_who(run), checkpoint_uri=skipped.uri, reason=skipped.reason))
        if run.ranks.is_first:
            log.warning("skipped checkpoint %s", skipped.reason)
    covered = None
    restore_ms = None
    if found.uri is not None:
        _warn_of_other_versions(run, found.versions)
        run.store.load(found.uri, run.parts)
        assert_tied(run.model, expected=run.config.experiment.model.tie_embeddings)
        restore_ms = (time.monotonic() - started) * 1e3
        covered = Saved(step=run.progress.step, uri=found.uri, save_ms=0.0, size_bytes=0)
    run.emit(_started_record(run, resumed_from=found.step, restore_ms=restore_ms))
    if run.ranks.is_first:
        begun = "a new run" if covered is None else f"resumes after step {covered.step}"
        total_steps = run.config.experiment.total_steps
        log.info(
            "%s: %s, to step %d, saved below %s", run.run_id, begun, total_steps, run.store.prefix
        )
    return covered


def save(run: Run, reason: Literal["schedule", "final", "preemption"]) -> Saved:
    """Commit the last step boundary; collective."""
    saved = run.store.save(run.progress.step, run.parts)
    run.emit(
        CheckpointCommitted(
            **_who(run),
            step=saved.step,
            reason=reason,
            checkpoint_uri=saved.uri,
            save_ms=saved.save_ms,
            size_bytes=saved.size_bytes,
        )
    )
    return saved


def prune(run: Run, saved: Saved) -> None:
    """Delete what retention doesn't keep; a fault there is no reason to end the run."""
    try:
        run.store.prune(saved, keep=run.config.checkpoint.keep)
    except OSError as error:
        log.warning("could not delete old checkpoints below %s: %s", run.store.prefix, error)


def leave(run: Run, decision: StopDecision, *, covered: Saved | None) -> Outcome:
    """Save what no checkpoint covers yet and end with 75; collective.

    The save is tried however little grace is left: the platform may be late, and a try that is
    cut off only leaves a folder without marker.
    """
    budget = GraceBudget(total_s=run.grace_s, started_s=decision.requested_s)
    step = run.progress.step
    run.emit(
        StopDecided(
            **_who(run),
            step=step,
            micro_batch=decision.micro_batch,
            waited_ms=budget.spent_s() * 1e3,
        )
    )
    outcome: Literal["saved", "already_saved", "nothing_new"] = "nothing_new"
    save_ms = None
    if covered is not None and covered.step == step:
        outcome = "already_saved"
    elif step > 0:
        covered = save(run, "preemption")
        outcome, save_ms = "saved", covered.save_ms
    run.emit(
        Preemption(
            **_who(run),
            step=step,
            outcome=outcome,
            checkpoint_uri=None if covered is None else covered.uri,
            save_ms=save_ms,
            grace_s=run.grace_s,
            grace_left_s=budget.left_s(),
            exit_code=ExitCode.PREEMPTED,
        )
    )
    if run.ranks.is_first:
        log.info(
            "%s: stopped after step %d (%s); start it again to go on", run.run_id, step, outcome
        )
    return Outcome(ExitCode.PREEMPTED)


def _warn_of_other_versions(run: Run, saved: Mapping[str, str]) -> None:
    changed = [
        f"{name} {saved.get(name, 'none')} -> {version}"
        for name, version in library_versions().items()
        if saved.get(name) != version
    ]
    if changed and run.ranks.is_first:
        log.warning(
            "other versions than the checkpoint's, so the same bits are not promised: %s",
            ", ".join(changed),
        )


def _who(run: Run) -> dict[str, str]:
    return {"run_id": run.run_id, "attempt_id": run.attempt_id}


def _started_record(run: Run, *, resumed_from: int | None, restore_ms: float | None) -> RunStarted:
    return RunStarted(
        **_who(run),
        fingerprint=run.fingerprint,
        resumed_from=resumed_from,
        total_steps=run.config.experiment.total_steps,
        steps_per_epoch=run.order.steps_per_epoch,
        world_size=run.ranks.world_size,
        virtual_ranks=run.order.virtual_ranks,
        device_kind=run.ranks.device.type,
        data_digest=run.dataset.digest,
        parameters=parameter_count(run.model),
        checkpoint_prefix=run.store.prefix,
        restore_ms=restore_ms,
        startup_s=time.time() - psutil.Process().create_time(),
        versions=library_versions(),
        resource={
            "service.name": "kettle",
            "service.instance.id": run.attempt_id,
            "host.name": socket.gethostname(),
        },
    )


def step_record(run: Run, step: int, result: StepResult, *, elapsed_s: float) -> Step:
    """The record of a finished step that took so long."""
    return Step(
        **_who(run),
        step=step,
        epoch=result.epoch,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        tokens=result.tokens,
        tokens_per_s=result.tokens / elapsed_s,
        step_ms=elapsed_s * 1e3,
        world_size=run.ranks.world_size,
        sample_digest=result.sample_digest,
    )
