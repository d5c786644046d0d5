"""The story of one attempt: take over, restore, step until the end or an eviction, save."""

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from kettle.checkpoint.facts import TakenOver
from kettle.exits import ExitCode
from kettle.grace import GraceBudget
from kettle.identity import library_versions
from kettle.model.build import assert_tied, parameter_count
from kettle.records import (
    CheckpointSkipped,
    Preemption,
    RunCompleted,
    RunStarted,
    Step,
    StopDecided,
)
from kettle.state.digest import weights_digest
from kettle.train.run import Run
from kettle.train.saving import (
    Covered,
    finish_background,
    report_background,
    save_final,
    save_for_stop,
    save_periodic,
    warn_of_store,
    who,
)
from kettle.train.step import StepResult, take_step
from kettle.train.stop import StopDecision

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    exit_code: ExitCode


def train(run: Run) -> Outcome:
    """Run to `total_steps` or to an eviction, whichever comes first; collective.

    Raises:
        NoCheckpointError: the run has committed before, and nothing of that can be used.
        SupersededError: a newer attempt has taken the run over.
        SaveError: the last step could not be saved.
    """
    started = time.monotonic()
    covered = restore(run)
    total_steps = run.config.experiment.total_steps

    for step in range(run.progress.step + 1, total_steps + 1):
        step_started = time.monotonic()
        result = take_step(run, step)
        if isinstance(result, StopDecision):
            return leave(run, result, covered=covered)
        elapsed_s = time.monotonic() - step_started
        run.emit(step_record(run, step, result, elapsed_s=elapsed_s, weights=weights_at(run, step)))
        report_background(run)
        match run.schedule.due(step):
            case "schedule":
                covered = save_periodic(run, covered)
            case "final":
                covered = save_final(run, finish_background(run, covered))

    digest = weights_digest(run.parts["model"].state_dict(), ranks=run.ranks)
    run.store.leave(step=total_steps, exit_code=ExitCode.OK)
    run.emit(
        RunCompleted(
            **who(run),
            step=total_steps,
            weights_digest=digest,
            exit_code=ExitCode.OK,
            wall_s=time.monotonic() - started,
        )
    )
    run.store.wait_for_retention()
    if run.ranks.is_first:
        log.info("%s: complete after step %d", run.run_id, total_steps)
    return Outcome(ExitCode.OK)


def restore(run: Run) -> Covered | None:
    """Take the run over and restore every part from the newest whole checkpoint; collective."""
    started = time.monotonic()
    taken = run.store.take_over(
        begin=run.begin, after_failures=run.config.checkpoint.quarantine_after
    )
    found = run.store.restore(run.parts)
    for skipped in found.skipped:
        run.emit(CheckpointSkipped(**who(run), checkpoint_uri=skipped.uri, reason=skipped.reason))
        if run.ranks.is_first:
            log.warning("skipped checkpoint %s: %s", skipped.uri, skipped.reason)
    covered = None
    restore_ms = None
    if found.uri is not None:
        _warn_of_other_versions(run, found.versions)
        assert_tied(run.model, expected=run.config.experiment.model.tie_embeddings)
        restore_ms = (time.monotonic() - started) * 1e3
        covered = Covered(step=run.progress.step, uri=found.uri)
    run.emit(_started_record(run, taken, resumed_from=found.step, restore_ms=restore_ms))
    warn_of_store(run, taken)
    if run.ranks.is_first:
        begun = "a new run" if covered is None else f"resumes after step {covered.step}"
        total_steps = run.config.experiment.total_steps
        log.info(
            "%s: %s, to step %d, saved below %s", run.run_id, begun, total_steps, run.store.uri
        )
    return covered


def leave(run: Run, decision: StopDecision, *, covered: Covered | None) -> Outcome:
    """Save what no checkpoint covers yet, and end with 75 if that worked; collective.

    The save is tried however little grace is left: the platform may be late, and a try that is
    cut off only leaves a folder without marker.
    """
    budget = GraceBudget(total_s=run.grace_s, started_s=decision.requested_s)
    step = run.progress.step
    run.emit(
        StopDecided(
            **who(run),
            step=step,
            micro_batch=decision.micro_batch,
            waited_ms=budget.spent_s() * 1e3,
        )
    )
    outcome: Literal["saved", "already_saved", "nothing_new", "not_saved"] = "nothing_new"
    save_ms = None
    exit_code = ExitCode.PREEMPTED
    if step > 0:
        covered, save_ms = save_for_stop(run, covered, budget=budget)
        if covered is None or covered.step < step:
            outcome, exit_code = "not_saved", ExitCode.NOT_SAVED
        else:
            outcome = "already_saved" if save_ms is None else "saved"
    run.emit(
        Preemption(
            **who(run),
            step=step,
            outcome=outcome,
            checkpoint_uri=None if covered is None else covered.uri,
            save_ms=save_ms,
            grace_s=run.grace_s,
            grace_left_s=budget.left_s(),
            exit_code=exit_code,
        )
    )
    run.store.leave(step=step, exit_code=exit_code)
    if run.ranks.is_first:
        log.info(
            "%s: stopped after step %d (%s); start it again to go on", run.run_id, step, outcome
        )
    return Outcome(exit_code)


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


def _started_record(
    run: Run, taken: TakenOver, *, resumed_from: int | None, restore_ms: float | None
) -> RunStarted:
    return RunStarted(
        **who(run),
        fingerprint=run.fingerprint,
        resumed_from=resumed_from,
        total_steps=run.config.experiment.total_steps,
        steps_per_epoch=run.order.steps_per_epoch,
        world_size=run.ranks.world_size,
        virtual_ranks=run.order.virtual_ranks,
        device_kind=run.ranks.device.type,
        generation=taken.generation,
        conditional_writes=taken.conditional_writes,
        data_digest=run.dataset.digest,
        parameters=parameter_count(run.model),
        checkpoint_prefix=run.store.uri,
        restore_ms=restore_ms,
        startup_s=time.time() - psutil.Process().create_time(),
        versions=library_versions(),
        resource={
            "service.name": "kettle",
            "service.instance.id": run.attempt_id,
            "host.name": socket.gethostname(),
        },
    )


def weights_at(run: Run, step: int) -> str | None:
    """The digest of the weights after a step, if the run file wants it there; collective."""
    if step % run.config.runtime.digest_every != 0:
        return None
    return weights_digest(run.parts["model"].state_dict(), ranks=run.ranks)


def step_record(
    run: Run, step: int, result: StepResult, *, elapsed_s: float, weights: str | None
) -> Step:
    """The record of a finished step that took so long."""
    return Step(
        **who(run),
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
        rng_digest=result.rng_digest,
        weights_digest=weights,
    )
