"""A chaos run from beginning to end: plan, watch, trigger, wait, verify."""

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kettle.chaos.attempts import (
    Launches,
    Progress,
    run_to_completion,
    run_until_evicted,
    silence_limit_s,
    stop_limit_s,
)
from kettle.chaos.folder import Folder, Side, claim
from kettle.chaos.plan import parse_workers, plan_evictions, width_of
from kettle.chaos.result import ChaosResult, Plan, PlannedEviction
from kettle.chaos.triggers import Trigger
from kettle.config import deployment_facts, load
from kettle.errors import KettleError
from kettle.evidence.checks import Verdict, first_difference, verify
from kettle.evidence.compare import compare, floor, judge
from kettle.evidence.read import read_logs
from kettle.evidence.report import plot_loss
from kettle.evidence.timeline import attempts_of
from kettle.records import CheckpointCommitted, Record


def run_chaos(
    run_file: Path,
    *,
    evictions: int,
    seed: int | None,
    workers: str,
    overrides: Sequence[str],
    out: Path,
    trigger: Trigger,
    progress: Progress,
) -> ChaosResult:
    """Run two references and a trial that is evicted, and judge the trial.

    Writes records, checkpoints and `chaos.json` under `out`. `workers` is as on the command line.
    However it ends, no process that it started lives on.

    Raises:
        UsageError: the run file, the plan or `out` can't be used; nothing was started.
        KettleError: an attempt hangs, or ends otherwise than it must.
    """
    config = load(run_file, overrides)
    total_steps = config.experiment.total_steps
    widths = parse_workers(workers, virtual_ranks=config.experiment.virtual_ranks)
    points = plan_evictions(total_steps, evictions, seed)
    plan = Plan(
        run_file=str(run_file),
        overrides=tuple(overrides),
        total_steps=total_steps,
        seed=seed,
        points=points,
        workers=tuple(width_of(n, widths) for n in range(1, len(points) + 2)),
        reference_workers=widths[0],
    )
    launches = Launches(
        run_file=run_file,
        overrides=tuple(overrides),
        total_steps=total_steps,
        stop_s=stop_limit_s(deployment_facts().grace_seconds or config.runtime.grace_seconds),
        silence_s=silence_limit_s(config.runtime.timeout_seconds),
        progress=progress,
    )
    folder = claim(out)
    began_s = time.monotonic()
    with _termination_as_interrupt():
        for reference in folder.references:
            _run_reference(launches, reference, workers=plan.reference_workers)
        _run_trial(launches, folder.trial, plan=plan, trigger=trigger)
    progress.phase("comparing")
    result = conclude(folder, plan=plan, wall_s=time.monotonic() - began_s)
    folder.result.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return result


def conclude(folder: Folder, *, plan: Plan, wall_s: float) -> ChaosResult:
    """Judge what lies in the folder of a chaos run whose attempts have all ended.

    Raises:
        EvidenceError: logs or checkpoints can't be read.
        KettleError: a run has left no final checkpoint.
    """
    first, second = (read_logs([side.path]) for side in folder.references)
    trial = read_logs([folder.trial.path])
    uris = [_final_checkpoint(log, total_steps=plan.total_steps) for log in (first, second, trial)]
    comparison = compare(uris[0], uris[2])
    measured_floor = floor(uris[0], uris[1])
    verdict = verify(attempts_of(trial))
    return ChaosResult(
        plan=plan,
        evictions=_evictions(verdict, plan=plan),
        trial=verdict,
        references=(verify(attempts_of(first)), verify(attempts_of(second))),
        first_difference=first_difference(first, trial),
        comparison=comparison,
        floor=measured_floor,
        verdict=judge(comparison, measured_floor),
        wall_s=wall_s,
    )


def plot(folder: Folder) -> None:
    """Draw the trial's loss on reference 1's. Raises UsageError if matplotlib isn't installed."""
    reference, trial = (read_logs([side.path]) for side in (folder.references[0], folder.trial))
    plot_loss(attempts_of(reference), attempts_of(trial), folder.out)


def _run_reference(launches: Launches, side: Side, *, workers: int) -> None:
    launches.progress.phase(
        f"{side.title} on {_workers(workers)}", total_steps=launches.total_steps
    )
    run_to_completion(launches, side, attempt=1, workers=workers, resumes_after=None)


def _run_trial(launches: Launches, side: Side, *, plan: Plan, trigger: Trigger) -> None:
    stopped_after: int | None = None
    for attempt, workers, point in itertools.zip_longest(
        range(1, len(plan.workers) + 1), plan.workers, plan.points
    ):
        fate = "to the end" if point is None else f"evicted at step {point}"
        launches.progress.phase(
            f"{side.title} attempt {attempt} of {len(plan.workers)} on {_workers(workers)}, {fate}",
            total_steps=launches.total_steps,
        )
        if point is None:
            run_to_completion(
                launches, side, attempt=attempt, workers=workers, resumes_after=stopped_after
            )
            return
        preemption = run_until_evicted(
            launches,
            side,
            attempt=attempt,
            workers=workers,
            point=point,
            trigger=trigger,
            resumes_after=stopped_after,
        )
        stopped_after = preemption.step


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _final_checkpoint(log: Sequence[Record], *, total_steps: int) -> str:
    saved = [r for r in log if isinstance(r, CheckpointCommitted) and r.step == total_steps]
    if not saved:
        raise KettleError(
            f"{log[0].run_id} has left no checkpoint of step {total_steps}, so there is nothing "
            "to compare; look at its records"
        )
    return saved[-1].checkpoint_uri


def _evictions(verdict: Verdict, *, plan: Plan) -> tuple[PlannedEviction, ...]:
    return tuple(
        PlannedEviction(**dict(eviction), planned_step=point, workers=workers)
        for eviction, point, workers in zip(
            verdict.evictions, plan.points, plan.workers, strict=False
        )
    )


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """While attempts run, SIGTERM and SIGHUP end the drive the way Ctrl-C does: with clean-up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        # nohup lets a drive outlive its terminal by ignoring SIGHUP; that stays so.
        if handler != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
